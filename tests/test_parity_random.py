"""Random module DAGs: skips, ties, in-place operations, dropout, batch norm, several outputs. Any partition is the model."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import packhorse as ph
from reference import assert_partitions_same

WIDTH = 6

OPERATIONS = (
    "linear",
    "tied",
    "norm",
    "batch_norm",
    "dropout",
    "relu_",
    "add_",
    "sigmoid_view",
    "write_slice",
    "add",
    "cat",
    "split",
    "detach",
    "no_grad",
    "matmul",
    "frozen",
    "counter",
)


class RandomNet(nn.Module):
    """A straight list of steps, each reading one or two earlier values."""

    def __init__(self, steps: list[tuple[str, int, int]]):
        super().__init__()
        self.steps = steps
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self._layer(name) for name, _, _ in steps)
        self.register_buffer("count", torch.zeros(()))

    def _layer(self, name: str) -> nn.Module:
        if name in ("linear", "frozen"):
            return nn.Linear(WIDTH, WIDTH).requires_grad_(name == "linear")
        if name == "tied":
            layer = nn.Linear(WIDTH, WIDTH)
            layer.weight = self.shared.weight
            return layer
        if name == "cat":
            return nn.Linear(2 * WIDTH, WIDTH)
        return {"norm": nn.LayerNorm(WIDTH), "batch_norm": nn.BatchNorm1d(WIDTH), "dropout": nn.Dropout(0.3)}.get(
            name, nn.Identity()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        values = [self.shared(x)]
        for (name, i, j), layer in zip(self.steps, self.layers, strict=True):
            values.append(self._step(name, values[i % len(values)], values[j % len(values)], layer))
        return values[-1], values[1::3]

    def _step(self, name: str, a: Tensor, b: Tensor, layer: nn.Module) -> Tensor:
        match name:
            case "relu_":
                return torch.relu_(a * 1.5)
            case "add_":
                return (a - 0.5).add_(b)
            case "sigmoid_view":
                y = a.clone()
                y.view(-1).sigmoid_()
                return y + b
            case "write_slice":
                y = torch.zeros_like(a)
                y[:, ::2] = b[:, ::2]
                return y * a
            case "add":
                return a + b
            case "cat":
                return layer(torch.cat([a, b], dim=1))
            case "split":
                left, right = a.chunk(2, dim=1)
                return torch.cat([right, left], dim=1) * b
            case "detach":
                return a.detach() * b
            case "no_grad":
                with torch.no_grad():
                    scale = a.abs().mean(dim=1, keepdim=True)
                return b / (1 + scale)
            case "matmul":
                return torch.softmax(a @ b.t() / WIDTH, dim=1) @ a
            case "counter":
                self.count += 1
                return a * (1 + self.count)
        return layer(a)


def loss(output: tuple[Tensor, list[Tensor]], batch: tuple[Tensor, Tensor]) -> Tensor:
    last, others = output
    return nn.functional.mse_loss(last, batch[1]) + sum(o.square().mean() for o in others)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


steps = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=14
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(steps)
def test_any_partition_of_any_net_is_the_net(steps: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    model: Any = RandomNet(steps).train()
    graph = ph.capture(model, batch(4), loss)
    assert not graph.opaque, graph.opaque
    assert_partitions_same(model, graph, [batch(4), batch(3)], loss)


def test_every_operation_is_reached() -> None:
    """All kinds of steps in one net, so that none is left to chance."""
    model = RandomNet([(name, i, i // 2) for i, name in enumerate(OPERATIONS)]).train()
    graph = ph.capture(model, batch(4), loss)
    assert not graph.opaque, graph.opaque
    assert graph.buffers["count"].written
    assert_partitions_same(model, graph, [batch(4), batch(3)], loss)

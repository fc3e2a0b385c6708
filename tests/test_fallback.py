"""Models that cannot be traced: cuts at module boundaries, blocks run as they are, the numbers stay those of plain."""

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
from reference import assert_partitions_same, assert_same, run_composed, run_segments, seed_by_key


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        y = self.b(y).relu() if x.sum() > 0 else y.tanh()
        return x + self.dropout(y)


class Net(nn.Module):
    """`where` the branch on data is: in the blocks, or also between them."""

    def __init__(self, where: str = "blocks", tied: bool = False):
        super().__init__()
        self.where, self.tied = where, tied
        self.embed = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Branch() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
            if self.where == "between" and x.mean() > 0:
                x = x * 0.5
        if self.tied:
            x = nn.functional.linear(x, self.embed.weight)
        return self.head(x)


class Sign(torch.autograd.Function):
    """A straight-through estimator: its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Sign.apply(self.first(x)))


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


@pytest.mark.parametrize(
    "model",
    [Net(), Net("between"), Net(tied=True), Quantised()],
    ids=["in-blocks", "between-blocks", "tied", "autograd-function"],
)
def test_it_trains_the_same(model: nn.Module) -> None:
    graph = ph.capture(model, batch(4), squared)
    assert graph.opaque
    assert len(ph.partition(graph, "finest").segments) >= 3
    assert_partitions_same(model, graph, [batch(4), batch(3), batch(5)], squared)


def test_it_says_where_and_why() -> None:
    graph = ph.capture(Net(), batch(4), squared)
    assert "data-dependent" in graph.opaque
    assert "test_fallback.py" in graph.opaque and "x.sum() > 0" in graph.opaque


def test_a_branch_inside_blocks_carries_only_what_the_next_block_needs() -> None:
    finest = ph.partition(ph.capture(Net(), batch(4), squared), "finest")
    carried = [[name for name in segment.inputs if not name.startswith("batch")] for segment in finest.segments]
    assert all(len(names) <= 1 for names in carried)


def test_a_meta_model_falls_back_too() -> None:
    with torch.device("meta"):
        shell = Net()
    model = Net()
    graph = ph.capture(shell, batch(4), squared)
    assert_partitions_same(model, graph, [batch(4)], squared, counts=(1, 3))


class Droppy(nn.Module):
    """Layers dropped at random, as OPT, BART and Whisper do."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.rate:
                continue
            x = x + layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh())


def test_layers_dropped_with_probability_zero_are_traced() -> None:
    model = Droppy(0.0)
    graph = ph.capture(model, batch(4), squared)
    assert not graph.opaque
    assert_partitions_same(model, graph, [batch(4), batch(3)], squared)


def test_layers_dropped_at_random_by_key() -> None:
    """The same layers are dropped on any partition; several seeds, so that each layer is dropped in one and kept in another."""
    model = Droppy(0.5)
    graph = ph.capture(model, batch(4), squared)
    assert "torch.rand([]) < self.rate" in graph.opaque
    example, dropped = batch(4), []
    for seed in range(6):

        def rng(key: int | str, seed: int = seed) -> None:
            seed_by_key(f"{seed} {key}")

        whole = run_composed(model, ph.partition(graph, 1), example, rng=rng)
        dropped.append(tuple(f"layers.{i}.linear.weight" not in whole.gradients for i in range(4)))
        for count in (2, "finest"):
            assert_same(run_segments(model, ph.partition(graph, count), example, rng=rng), whole)
    assert all({d[i] for d in dropped} == {True, False} for i in range(4))
    with pytest.raises(ph.CaptureError, match="pass rng"):
        run_composed(model, ph.partition(graph, 2), example)


def test_a_data_dependent_path_may_differ_from_the_example_s() -> None:
    model = Net("between")
    graph = ph.capture(model, (torch.full((4, 8), 3.0), torch.zeros(4, 8)), squared)
    assert_partitions_same(model, graph, [batch(4), (torch.full((4, 8), -3.0), torch.zeros(4, 8))], squared)


def test_without_anything_to_cut_at_the_error_names_line_and_remedy() -> None:
    class Lump(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight if x.sum() > 0 else x @ self.weight.t()

    with pytest.raises(ph.CaptureError, match=r"x\.sum\(\) > 0.*torch\.where"):
        ph.capture(Lump(), batch(4), squared)

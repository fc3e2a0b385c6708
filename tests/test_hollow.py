"""Recomputations without what only outputs need: what is left out, and that nothing reads it."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
import toys
from packhorse.partition import hollow


class Residual(nn.Module):
    def __init__(self, width: int = 8, last: nn.Module | None = None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.relu(self.up(self.norm(x)))))


def find_hollow(model: nn.Module, example: Any = None) -> list[str]:
    """Of the whole model as one segment, without the loss: what its outputs alone need."""
    graph = ph.capture(model, torch.randn(4, 8) if example is None else example, lambda y, _: y.sum())
    return [str(graph.nodes[i]) for i in sorted(hollow.find_hollow(graph, 0, len(graph.nodes) - 1))]


def test_the_last_product_of_a_residual_block_and_its_addition() -> None:
    assert find_hollow(Residual()) == ["linear in down", "add.Tensor"]


def test_a_dropout_draws_its_mask_all_the_same() -> None:
    assert find_hollow(Residual(last=nn.Dropout(0.5))) == ["linear in down", "add.Tensor", "dropout in last"]


def test_what_a_norm_or_an_activation_reads_is_computed() -> None:
    assert find_hollow(Residual(last=nn.LayerNorm(8))) == []
    assert find_hollow(Residual(last=nn.GELU())) == []
    assert find_hollow(Residual(last=nn.ReLU())) == []


def test_what_is_written_in_place_is_computed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.mul_(2.0)
            return y

    assert find_hollow(Writes()) == []


def test_a_frozen_layer_reads_nothing_in_backward_but_its_weight() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    assert find_hollow(model) == ["linear in 0", "linear in 1"]


def test_a_view_hides_nothing() -> None:
    class Viewed(nn.Module):
        def __init__(self, read: bool) -> None:
            super().__init__()
            self.layer, self.read = nn.Linear(8, 8), read

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).unflatten(1, (2, 4)).transpose(1, 2)
            return torch.tanh(y) if self.read else y

    assert find_hollow(Viewed(read=False)) == ["linear in layer"]
    assert find_hollow(Viewed(read=True)) == []


def test_inside_autocast_all_is_computed() -> None:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x)

    assert not any("linear" in name for name in find_hollow(Autocast()))


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_graph_built_again_makes_blanks_only_of_outputs(name: str) -> None:
    """With blanks that are NaN (conftest.py), whatever a backward reads of them would show in its gradients."""
    model, make_batch, loss = toys.zoo(name)
    graph = ph.capture(model, make_batch(4), loss)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = graph.inputs(make_batch(4))
    for segment in ph.partition(graph).segments[:-1]:
        leaves = {n: v.detach().requires_grad_(n in segment.differentiable_inputs) for n, v in values.items()}
        leaves = {n: leaves[n] for n in segment.inputs}
        torch.manual_seed(1)
        outputs = segment(parameters, buffers, leaves)
        torch.manual_seed(1)
        again = segment.rebuild(parameters, buffers, leaves)
        seeds = {n: torch.randn_like(t) for n, t in outputs.items() if t.requires_grad}
        expected = segment.differentiate(parameters, leaves, outputs, seeds)
        found = segment.differentiate(parameters, leaves, again, seeds)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
        assert all(t.isnan().all() for t in again.values()) == bool(segment.hollow)
        values.update({n: t.detach() for n, t in outputs.items()})


def test_twins_share_the_shorter_code_too() -> None:
    model, make_batch, loss = toys.zoo("gpt")
    segments = ph.partition(ph.capture(model, make_batch(4), loss)).segments
    assert segments[1].rebuilding_code is segments[2].rebuilding_code is not segments[1].code
    assert segments[-1].rebuilding_code is segments[-1].code


def test_hollow_operations_do_not_load_the_compiler() -> None:
    program = (
        "import sys, torch; from packhorse.partition.hollow import Hollow\n"
        "with Hollow(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"

"""Operations that run in another way than torch's own: the same bits, with less memory."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import packhorse as ph
from packhorse.graph import lean

RUN = torch.ops.aten.cross_entropy_loss.default


def differentiate(run: Any, logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = run(leaf, *rest)
    (gradient,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.37))
    return loss, gradient


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (64, 1000), (33, 50257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_is_torchs_own_to_the_bit(reduction: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(shape).to(dtype)
    target = torch.randint(shape[1], shape[:1])
    target[::5] = -100  # ignored
    wanted, found = (differentiate(run, logits, target, None, reduction) for run in (RUN, lean.cross_entropy))
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_other_cross_entropies_are_torchs_own() -> None:
    logits, target, weight = torch.randn(6, 5), torch.randint(5, (6,)), torch.rand(5)
    images, classes = torch.randn(2, 5, 4, 4), torch.randint(5, (2, 4, 4))
    cases = [
        (logits, target, weight, 1, -100, 0.0),
        (logits, target, None, 1, -100, 0.1),
        (logits, logits.softmax(1), None, 1, -100, 0.0),
        (images, classes, None, 1, -100, 0.0),
        (logits[0], target[0], None, 1, -100, 0.0),
    ]
    for case in cases:
        wanted, found = (differentiate(run, *case) for run in (RUN, lean.cross_entropy))
        assert torch.equal(wanted[0], found[0]) and torch.equal(wanted[1], found[1])


def test_backward_takes_one_tensor_less_than_torchs_own() -> None:
    model = torch.nn.Linear(8, 1000)
    example = (torch.randn(64, 8), torch.randint(1000, (64,)))
    graph = ph.capture(model, example, lambda output, batch: functional.cross_entropy(output, batch[1]))
    (node,) = [node for node in graph.nodes if "cross_entropy" in node.operation.target]
    logits = 64 * 1000 * 4
    assert node.operation.hidden // logits == 1, "the logarithms of the likelihoods are kept"
    assert node.operation.backward_peak // logits == 1, "torch's own takes two"

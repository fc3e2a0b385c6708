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


def write_over_a_copy(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return lean.cross_entropy(logits.clone(), *rest, over=True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (64, 1000), (33, 50257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_is_torchs_own_to_the_bit(reduction: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(shape).to(dtype)
    target = torch.randint(shape[1], shape[:1])
    target[::5] = -100  # ignored
    wanted = differentiate(RUN, logits, target, None, reduction)
    for run in (lean.cross_entropy, write_over_a_copy):
        for a, b in zip(wanted, differentiate(run, logits, target, None, reduction), strict=True):
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


LOGITS = 64 * 1000 * 4  # bytes


def capture_loss(loss: Any, **options: Any) -> Any:
    example = (torch.randn(64, 8), torch.randint(1000, (64,)))
    graph = ph.capture(torch.nn.Linear(8, 1000), example, loss, **options)
    (node,) = [node for node in graph.nodes if "cross_entropy" in node.operation.target]
    return node.operation


def test_logits_that_nobody_reads_again_are_written_over() -> None:
    operation = capture_loss(lambda output, batch: functional.cross_entropy(output, batch[1]))
    assert operation.target == lean.OVER_LOGITS and operation.writes == (0,) and 0 in operation.saved
    assert max(operation.building_peak, operation.hidden) < LOGITS, "forward makes no tensor of their size"
    assert operation.backward_peak // LOGITS <= 1, "torch's own takes two"


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: functional.cross_entropy(output, batch[1]) + output.square().mean(),
        lambda output, batch: functional.cross_entropy(output.relu(), batch[1]),  # whose backward reads its result
        lambda output, batch: functional.cross_entropy(batch[0].repeat(1, 125), batch[1]) + output.mean(),
        lambda output, batch: functional.cross_entropy(output[:, :1].expand(-1, 1000), batch[1]),
        lambda output, batch: functional.cross_entropy(output, batch[1], label_smoothing=0.1),
        lambda output, batch: RUN(output, batch[1], label_smoothing=0.1),
    ],
    ids=["read again", "read backward", "a copy", "expanded", "smoothed", "smoothed by name"],
)
def test_other_logits_stay(loss: Any) -> None:
    operation = capture_loss(loss)
    if operation.target == lean.OVER_LOGITS:  # a copy, which nobody else has
        assert "repeat" in loss.__code__.co_names
    else:
        assert operation.target == lean.CROSS_ENTROPY and not operation.writes


def test_likelihoods_are_not_used_twice() -> None:
    """They are written over: a second backward would be wrong."""
    logits = torch.randn(4, 5, requires_grad=True)
    loss = lean.cross_entropy(logits, torch.randint(5, (4,)))
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(AssertionError, match="written over"):
        torch.autograd.grad(loss, logits)

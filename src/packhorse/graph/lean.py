"""Operations that run in another way than torch's own: the same bits, with less memory.

In: an operation by name. Out: the function that runs in its place. Cross entropy is where a language model takes most: its
backward holds three tensors of the size of the logits, of which one is written over here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def find_kernel(name: str, torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    return _KERNELS.get(name, torchs_own)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    is_plain = weight is None and label_smoothing == 0.0 and logits.dim() == 2 and target.dim() == 1
    if is_plain and logits.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        return _CrossEntropy.apply(logits, target, reduction, ignore_index)
    return aten.cross_entropy_loss.default(logits, target, weight, reduction, ignore_index, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    """The kernels that torch runs, in its order; the last writes over the gradient that it reads, row by row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
        likelihood = aten._log_softmax(logits, 1, False)
        loss, total = aten.nll_loss_forward(likelihood, target, None, reduction, ignore_index)
        ctx.save_for_backward(likelihood, target, total)
        ctx.options = reduction, ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]  # torch's own takes any
        likelihood, target, total = ctx.saved_tensors
        found = aten.nll_loss_backward(gradient, likelihood, target, None, *ctx.options, total)
        aten._log_softmax_backward_data.out(found, likelihood, 1, likelihood.dtype, out=found)
        return found, None, None, None


_KERNELS: dict[str, Callable[..., Any]] = {"aten.cross_entropy_loss.default": cross_entropy}

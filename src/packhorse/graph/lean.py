"""Operations that run in another way than torch's own: the same bits, with less memory.

In: an operation by name. Out: the function that runs in its place. Cross entropy is where a language model takes most: beside
the logits torch has one tensor of their size in forward, and two more in backward. Here backward writes over the one it
reads, and forward over the logits, where nobody reads them again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


CHUNK = 1 << 20  # elements of a gradient that is made apart: few enough for the cache
CROSS_ENTROPY, OVER_LOGITS = "aten.cross_entropy_loss.default", "lean.cross_entropy_over_logits"


def find_kernel(name: str, torchs_own: Callable[..., Any] | None = None) -> Callable[..., Any]:
    found = _KERNELS.get(name, torchs_own)
    assert found is not None, f"there is no operation {name}"
    return found


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    over: bool = False,
) -> Tensor:
    """`over` the logits, of which somebody has seen to it that nobody else reads them."""
    is_plain = _is_plain(logits, target, weight, label_smoothing)
    if is_plain and logits.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not _is_traced():
        return _CrossEntropy.apply(logits, target, reduction, ignore_index, over)
    return aten.cross_entropy_loss.default(logits, target, weight, reduction, ignore_index, label_smoothing)


def _is_plain(logits: Any, target: Any, weight: Any, label_smoothing: float) -> bool:
    return weight is None and label_smoothing == 0.0 and len(logits.shape) == 2 and len(target.shape) == 1


def may_write_over(logits: Any, target: Any, weight: Any = None, *options: Any) -> bool:
    """Whether logits like these, as the arguments of an operation tell, may be written over if nobody else reads them."""
    label_smoothing = options[2] if len(options) > 2 else 0.0
    is_dense = tuple(logits.stride) == (logits.shape[-1], 1)
    return is_dense and _is_plain(logits, target, weight, label_smoothing)


def _is_traced() -> bool:
    """A graph that is captured of segments, such as those of a part that trains apart, is to hold torch's own operations."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return bool(torch._C._get_dispatch_mode(key) or torch._ops._get_dispatch_mode_pre_dispatch(key))


class _CrossEntropy(torch.autograd.Function):
    """The kernels that torch runs, in its order; each works row by row, so that it may write over what it reads."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: int, ignore_index: int, over: bool) -> Tensor:
        logits = logits.detach()
        likelihood = aten._log_softmax.out(logits, 1, False, out=logits if over else torch.empty_like(logits))
        loss, total = aten.nll_loss_forward(likelihood, target, None, reduction, ignore_index)
        ctx.save_for_backward(likelihood, target, total)
        ctx.options, ctx.is_used = (reduction, ignore_index), False
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]  # torch's own takes any
        assert not ctx.is_used, "its likelihoods are written over"
        ctx.is_used = True
        likelihood, target, total = ctx.saved_tensors
        rows = min(max(CHUNK // max(likelihood.shape[1], 1), 1), likelihood.shape[0])
        place = torch.empty_like(likelihood[:rows])  # once: malloc would not take the same place again
        # Without data, as where only allocations are counted, one turn shows what all of them take.
        stop = likelihood.shape[0] if type(likelihood) is Tensor else rows
        for start in range(0, stop, max(rows, 1)):
            part, own = likelihood[start : start + rows], target[start : start + rows]
            seed = gradient[start : start + rows] if gradient.dim() else gradient
            found = place[: part.shape[0]]
            aten.nll_loss_backward.grad_input(seed, part, own, None, *ctx.options, total, grad_input=found)
            aten._log_softmax_backward_data.out(found, part, 1, part.dtype, out=part)
        return likelihood, None, None, None, None


_KERNELS: dict[str, Callable[..., Any]] = {CROSS_ENTROPY: cross_entropy, OVER_LOGITS: partial(cross_entropy, over=True)}

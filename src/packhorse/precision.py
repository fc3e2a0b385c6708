"""Precision: which tensors are cast to what while the model runs.

In: a precision by name and a model. Out: the working dtype of each parameter, and the list of all casts. Masters, optimizer
state and accumulated gradients stay in fp32; only what the device works on is cast.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packhorse.errors import PackhorseError

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Cast:
    """What is cast, and to what. `rule` names the exception where something keeps its dtype."""

    what: str
    dtype: torch.dtype
    rule: str = ""


def check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        raise PackhorseError(f"precision is {precision!r}, expected one of {', '.join(get_args(Precision))}")


def working_dtype(precision: Precision) -> torch.dtype | None:
    """What floating-point parameters and inputs are cast to; None: nothing is cast, all keep their own dtype."""
    return _DTYPES[precision]


def cast_floats(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def master_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """Masters are fp32 under a working precision; without one they are what the model has."""
    return torch.float32 if precision != "fp32" and dtype.is_floating_point else dtype


def uncast_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that are never cast: of norms with running statistics, which are fp32 beside them."""
    norms = (m for m in model.modules() if getattr(m, "running_mean", None) is not None)
    return {id(p) for m in norms for p in m.parameters(recurse=False)}


def list_casts(model: nn.Module, precision: Precision) -> tuple[Cast, ...]:
    """Every cast of a precision on this model: what an oracle has to do as well."""
    dtype = working_dtype(precision)
    if dtype is None:
        return ()
    kept = uncast_parameters(model)
    parameters = [
        Cast(name, p.dtype, "norm with running statistics") if id(p) in kept else Cast(name, dtype)
        for name, p in model.named_parameters()
        if p.is_floating_point()
    ]
    others = [
        Cast("floating-point inputs", dtype),
        Cast("input of cross_entropy", torch.float32),
        Cast("gradients, where they are summed over microbatches", torch.float32),
        Cast("losses, where they are summed over microbatches", torch.float32),
    ]
    return (*parameters, *others)


class CrossEntropyInFp32(TorchFunctionMode):
    """Within it, `F.cross_entropy` of bf16 or fp16 logits is computed in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy and args and args[0].dtype in (torch.bfloat16, torch.float16):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


class LossScale:
    """The dynamic loss scale of fp16: halved when a gradient overflows, doubled after a long time without."""

    def __init__(self, scale: float = 65536.0, interval: int = 2000):
        self.scale, self.interval, self.good_steps = scale, interval, 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
        else:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale, self.good_steps = self.scale * 2, 0

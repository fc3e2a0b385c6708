"""One way to call any model on any batch: flat tensors in, the loss (or the output) out.

In: a model, the structure of its batches, an optional loss. Out: `Entry`, the module that capture traces and that opaque
graphs run.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.batch import BatchSpec
from packhorse.errors import CaptureError
from packhorse.graph.graph import Mode
from packhorse.precision import CrossEntropyInFp32, Precision

Loss = Callable[[Any, Any], Tensor]


class Entry(nn.Module):
    """Calls the model on a batch given as flat tensors.

    A dict goes in by keyword, a tuple by position, anything else as the one argument. With a loss, what `forward` does
    not take is left to the loss: dict keys it does not name, and the last element of a tuple unless it is required.
    """

    def __init__(self, model: nn.Module, spec: BatchSpec, loss: Loss | None, mode: Mode, precision: Precision = "fp32"):
        super().__init__()
        self.model = model
        self.spec = spec
        self.mode = mode
        self.precision = precision
        self.watch: Callable[[tuple[Tensor, ...]], None] | None = None  # told the inputs as forward sees them
        self.loss = (loss,)  # in a tuple, so that a loss that is a module is not registered as part of the model

    def forward(self, *tensors: Tensor) -> Any:
        with nullcontext() if self.precision == "fp32" else CrossEntropyInFp32():
            return self._forward(tensors)

    def _forward(self, tensors: tuple[Tensor, ...]) -> Any:
        batch = self.spec.unflatten(list(tensors))
        (loss,) = self.loss
        args, kwargs = bind(self.model, batch, loss is not None or self.mode == "predict")
        if self.watch is not None:
            self.watch(tensors)
        with keep_buffers(self.model):
            output = self.model(*args, **kwargs)
        if self.mode == "predict":
            return _without_cache(output)
        return find_loss(output, batch, loss)


@contextmanager
def keep_buffers(module: nn.Module) -> Iterator[None]:
    """A buffer that forward replaces (`self.ema = ...`) is written instead, so that its storage carries the state on."""
    before = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    yield
    for owner, name, buffer in before:
        replaced = owner._buffers.get(name)
        if replaced is not None and replaced is not buffer:
            with torch.no_grad():
                buffer.copy_(replaced)
            owner._buffers[name] = buffer


def bind(model: nn.Module, batch: Any, partial: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `model(...)` for this batch; `partial` lets the model leave some to the loss."""
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, dict):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if partial and not (takes_any and not names):
            batch = {key: value for key, value in batch.items() if key in names}
        if not takes_any and not batch.keys() <= names:
            raise CaptureError(
                f"{type(model).__name__}.forward takes no argument {', '.join(sorted(batch.keys() - names))}; it takes "
                f"{', '.join(sorted(names))}. Name the batch's keys after its arguments, or pass a loss that uses the others"
            )
        return (), batch
    if isinstance(batch, (tuple, list)):
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = sum(p.default is p.empty for p in positional)
        most = len(batch) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
        count = min(most, max(required, len(batch) - 1)) if partial else len(batch)
        if count > most or count < required:
            raise CaptureError(
                f"{type(model).__name__}.forward takes {required} to {most} positional arguments, but the batch is a tuple of "
                f"{len(batch)}; pass loss=... to use the rest, or a batch that fits"
            )
        return tuple(batch[:count]), {}
    return (batch,), {}


def find_loss(output: Any, batch: Any, loss: Loss | None) -> Tensor:
    """The scalar to differentiate: loss(output, batch), or the output itself, or its `.loss`."""
    if loss is not None:
        found: Any = loss(output, batch)
        origin = f"loss {getattr(loss, '__name__', type(loss).__name__)!r} returned"
    else:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        origin = "the model returned"
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"{origin} {_describe(found)}, expected a scalar tensor: pass loss=callable(output, batch) -> scalar mean, "
            "or include the labels in the batch of a model that returns its loss"
        )
    if found.ndim != 0 or not found.is_floating_point():
        raise CaptureError(
            f"{origin} {_describe(found)}, expected a floating-point scalar (shape []): reduce it to a mean over the batch, "
            "for example with .mean() or reduction='mean'"
        )
    return found


def _describe(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"


def _without_cache(output: Any) -> Any:
    """Predictions carry no generation cache: it is no tensor tree, and streaming a batch is not generation."""
    if isinstance(output, Mapping) and output.get("past_key_values") is not None:
        kind: Any = type(output)
        return kind({key: value for key, value in output.items() if key != "past_key_values"})
    return output

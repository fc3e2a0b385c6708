"""Keeps a trace faithful to eager: what eager would choose is what gets captured, what a graph would lose is refused.

In: the model, the example. Out: a context in which tracing is safe. All of it is undone on exit, and normally it happens
in a short-lived child process anyway.
"""

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
import torch.fx.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from packhorse.batch import BatchSpec
from packhorse.errors import CaptureError
from packhorse.graph.entry import Entry
from packhorse.graph.graph import Guard
from packhorse.precision import Precision, uncast_parameters, working_dtype


class Untraceable(Exception):
    """Tracing would lose something that only running the module keeps; the caller falls back to opaque blocks."""


@contextlib.contextmanager
def faithful(entry: Entry, guards: tuple[Guard, ...], packed: bool = False) -> Iterator["Facts"]:
    """Patches for the time of a trace; what it learns of the model on the way is in the facts it yields."""
    ones = {guard.input for guard in guards if guard.fact == "all ones"}
    facts = Facts({i for i, leaf in enumerate(entry.spec.leaves) if leaf.path in ones})
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(torch.fx.config, "do_not_emit_stack_traces", True)  # a third of the time of a trace, and unused
        # Models ask these to choose simpler kernels for export; they should choose what eager chooses.
        patch(torch.compiler, "is_exporting", lambda: False)
        patch(torch.compiler, "is_compiling", lambda: False)
        # Traced through, these would silently lose their backward, or their effect.
        patch(torch.autograd.Function, "apply", classmethod(_refuse_function))
        patch(Tensor, "register_hook", _refuse_hook)
        patch(torch, "manual_seed", _refuse_from_user(torch.manual_seed, "torch.manual_seed"))
        entering = torch.inference_mode.__enter__
        patch(torch.inference_mode, "__enter__", _refuse_from_user(entering, "torch.inference_mode"))
        patch(torch._meta_registrations, "_meta_grouped_mm_common", _grouped_mm_shape)
        patch(torch.SymBool, "__bool__", facts.decide())
        patch(entry, "watch", facts.note_inputs)
        if "transformers.masking_utils" in sys.modules:
            _keep_masks(patch, facts, packed)
        stack.enter_context(facts)
        yield facts


class Facts(TorchFunctionMode):
    """What is known about values while only sizes are traced.

    `torch.rand(...) < 0` is False: many models ask of every layer whether to drop it, with probability 0. (The draw itself
    stays in the graph, as it advances the generator.) A mask that the guards say is all ones stays so when it is cast or
    sliced. And where the model's own code branches on the number of rows, a single row may take another path.
    """

    def __init__(self, ones: set[int]):
        super().__init__()
        self.input_ones = ones
        self.drawn: list[Tensor] = []
        self.ones: list[Tensor] = []
        self.single_row = ""

    def note_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        self.ones += [tensor for i, tensor in enumerate(inputs) if i in self.input_ones]

    def is_ones(self, tensor: Any) -> bool:
        return any(tensor is known for known in self.ones)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LESS and any(args[0] is drawn for drawn in self.drawn):
            threshold = args[1]
            if isinstance(threshold, (int, float)) and threshold <= 0:
                return False
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self.drawn.append(result)
        elif self.ones and func in _KEEPS_ONES and self.is_ones(args[0]):
            self.ones.append(result)
        return result

    def decide(self) -> Callable[[torch.SymBool], bool]:
        """`if x.shape[0] > 1`: tracing assumes at least two rows, so what one row would do is worked out here."""
        plainly = torch.SymBool.__bool__

        def decide(condition: torch.SymBool) -> bool:
            answer = plainly(condition)
            caller = sys._getframe(1)
            file, line = caller.f_code.co_filename, caller.f_lineno
            if not is_internal(file) and "/transformers/" not in file:  # those ask only to broadcast
                expression = condition.node.expr
                single = expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(1)))
                if single in (sympy.true, sympy.false) and bool(single) != answer:
                    self.single_row = f"{file}:{line}: {linecache.getline(file, line).strip()}"
            return answer

        return decide


_LESS = (Tensor.lt, Tensor.__lt__, torch.lt)
_KEEPS_ONES = (
    Tensor.to,
    Tensor.bool,
    Tensor.long,
    Tensor.int,
    Tensor.float,
    Tensor.type,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.__getitem__,
)

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(contextlib.__file__) + os.sep + "contextlib"


def is_internal(filename: str) -> bool:
    """Whether a line is torch's or ours rather than the user's."""
    return filename.startswith(("<", _TORCH, _OURS, _STANDARD_LIBRARY))


def _refuse_function(cls: type, *args: Any) -> Any:
    from torch.utils.checkpoint import CheckpointFunction

    if issubclass(cls, CheckpointFunction):  # recomputation is the schedule's business; the numbers are the same
        run, _preserve_rng, *inputs = args
        return run(*inputs)
    if cls.__module__.startswith("torch."):
        return _APPLY(cls, *args)
    raise Untraceable(f"{cls.__name__} is a torch.autograd.Function, whose backward a graph cannot hold")


_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


def _refuse_from_user(original: Any, name: str) -> Any:
    """The function, which torch itself may go on using, but not the model."""

    def refuse(*args: Any) -> Any:
        if not is_internal(sys._getframe(1).f_code.co_filename):
            raise Untraceable(f"{name} inside forward has no place in a graph")
        return original(*args)

    return refuse


def _refuse_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
    raise CaptureError(
        f"the model registers a hook on a tensor while it runs ({getattr(hook, '__qualname__', hook)}); a graph cannot hold "
        "it. Remove the hook, or express it as a torch.autograd.Function"
    )


def _grouped_mm_shape(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's own rule admits bf16 only, though the CPU kernel takes fp32 (mixture-of-experts layers)."""
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        raise Untraceable("this form of grouped matrix product has no shape rule")
    return mat_a.new_empty(mat_a.shape[0], mat_b.shape[2], dtype=kwargs.get("out_dtype") or mat_a.dtype)


def _keep_masks(patch: Callable[[Any, str, Any], None], facts: Facts, packed: bool) -> None:
    """transformers builds explicit masks for fake tensors; eager skips them when nothing is padded or packed.

    The guards say what holds for the example; where one fails on a later batch, the graph is captured again.
    """
    masking = sys.modules["transformers.masking_utils"]
    patch(masking, "is_torchdynamo_exporting", lambda: False)
    if not packed:
        patch(masking, "find_packed_sequence_indices", lambda position_ids: None)
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        original = getattr(masking, name)

        def ignore(padding_mask: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return _original(None if facts.is_ones(padding_mask) else padding_mask, *args, **kwargs)

        patch(masking, name, ignore)


def find_guards(model: nn.Module, spec: BatchSpec, tensors: list[Tensor]) -> tuple[tuple[Guard, ...], bool]:
    """What the example lets transformers' models skip, to be checked on every batch; and whether it packs sequences."""
    if not any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        return (), False
    inputs = {leaf.path: tensor for leaf, tensor in zip(spec.leaves, tensors, strict=True)}
    wanted = [Guard(path, "all ones") for path in inputs if path.endswith("attention_mask")]
    wanted.append(Guard("position_ids", "not packed"))
    guards = tuple(g for g in wanted if g.input in inputs and inputs[g.input].ndim == 2 and g.holds(inputs[g.input]))
    packed = "position_ids" in inputs and not any(g.input == "position_ids" for g in guards)
    return guards, packed


@contextlib.contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device, precision: Precision) -> Iterator[None]:
    """The model with fake parameters and buffers on the real device type: sizes without memory, wherever it lives."""
    uncast, working = uncast_parameters(model), working_dtype(precision)
    fakes: dict[int, Tensor] = {}
    undo: list[tuple[nn.Module, str, Tensor]] = []

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and id(tensor) not in uncast
            dtype = working if cast and working is not None else tensor.dtype
            released = (
                tensor.untyped_storage().nbytes() < tensor.nbytes and not tensor.is_meta
            )  # its values are in a store
            stride = torch.empty(tensor.shape, device="meta").stride() if released else tensor.stride()
            with mode:
                image = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
            fakes[id(tensor)] = nn.Parameter(image, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else image
        return fakes[id(tensor)]

    def put(module: nn.Module, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, tensor)  # through __setattr__, where RNNs refresh their list of weights
        else:
            module._buffers[name] = tensor

    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                undo.append((module, name, tensor))
                put(module, name, fake(tensor))
    try:
        yield
    finally:
        for module, name, tensor in undo:
            put(module, name, tensor)

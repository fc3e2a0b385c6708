"""Capture: from any module and an example batch to a `Graph`.

In: a model (with weights or on the meta device), an example, an optional loss. Out: a `Graph`. The model is traced by
torch.export in a forked child process, so the caller's memory does not grow with depth and the caller's objects are never
touched. What cannot be traced is cut at module boundaries instead (see `opaque`).
"""

import gc
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.batch import BatchSpec
from packhorse.errors import CaptureError, PackhorseError
from packhorse.graph.entry import Entry, Loss
from packhorse.graph.graph import Graph, Mode
from packhorse.graph.opaque import attach
from packhorse.precision import Precision, cast_floats, check_precision, working_dtype

STARTING = 30.0  # seconds for a child's first word, which takes milliseconds
ATTEMPTS = 3


def capture(
    model: nn.Module,
    example: Any,
    loss: Loss | None = None,
    *,
    mode: Mode = "train",
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
) -> Graph:
    """The graph of `model` on batches like `example`.

    `mode` is "train" (with the loss, in training mode), "eval" (with the loss, in evaluation mode) or "predict" (the
    model's output in evaluation mode; the batch needs no labels). Dimension 0 of the batch stays free: the graph runs
    microbatches of any size. `precision` casts parameters and inputs as `packhorse.precision` lists it.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a torch.nn.Module to capture, found {type(model).__name__}")
    if mode not in ("train", "eval", "predict"):
        raise CaptureError(f"mode is {mode!r}, expected 'train', 'eval' or 'predict'")
    check_precision(precision)
    spec = BatchSpec.of(example)
    _check_model(model, mode)
    entry = Entry(model, spec, loss, mode, precision)
    modes = {module: module.training for module in model.modules()}
    if mode == "train" and not model.training:
        model.train()
    elif mode != "train":
        model.eval()
    try:
        tensors = [cast_floats(t, working_dtype(precision)) for t in spec.flatten(example)]
        try:
            return _in_child(lambda: _export(entry, tensors, torch.device(device)))
        except _Untraced as error:
            reason = str(error)
            return attach(_in_child(lambda: _record(entry, tensors, reason)), entry)
    finally:
        for module, training in modes.items():
            module.training = training


class _Untraced(Exception):
    """torch.export gave up; the message says where and why."""


def _check_model(model: nn.Module, mode: Mode) -> None:
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(parameter):
            raise CaptureError(
                f"{name!r} is not initialised yet (a lazy module): run the model once on a batch before capture"
            )
    _refuse_hooks(model)
    if mode == "train" and not any(p.requires_grad for p in model.parameters()):
        found = "only frozen parameters" if any(True for _ in model.parameters()) else "no parameters"
        raise CaptureError(
            f"{type(model).__name__} has {found}, nothing to train; set requires_grad=True on some, or capture with mode='eval'"
        )


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks that would fire during capture only, or never, are refused by name."""
    kinds = {
        "_forward_hooks": "forward hook",
        "_forward_pre_hooks": "forward pre-hook",
        "_backward_hooks": "backward hook",
        "_backward_pre_hooks": "backward pre-hook",
    }
    for name, module in model.named_modules():
        for attribute, kind in kinds.items():
            for hook in getattr(module, attribute).values():
                if getattr(type(hook), "__module__", "").startswith("torch.nn.utils."):
                    continue  # weight_norm and spectral_norm compute in their hooks, which is traced like forward
                where = f"module {name!r}" if name else "the model"
                raise CaptureError(
                    f"{where} has a {kind} ({_hook_name(hook)}), which a graph cannot hold; remove it first"
                )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"parameter {name!r} has a gradient hook, which a graph cannot hold; remove it first")


def _hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def _export(entry: Entry, tensors: list[Tensor], device: torch.device) -> Graph:
    # Imported here: these modules load torch's tracing stack, which the caller's process should not carry.
    from packhorse.graph.export import export_graph
    from packhorse.graph.faithful import find_guards

    guards, packed = find_guards(entry.model, entry.spec, tensors)
    try:
        return export_graph(entry, guards, packed, device)
    except PackhorseError:
        raise
    except Exception as error:
        cause = _find_cause(error)
        if isinstance(cause, PackhorseError):
            raise cause from None
        raise _Untraced(f"{_first_line(cause)} (at {_user_line(error)})") from error


def _record(entry: Entry, tensors: list[Tensor], reason: str) -> Graph:
    from packhorse.graph.record import record_graph

    return record_graph(entry, tensors, reason)


def _in_child(make: Callable[[], Graph]) -> Graph:
    """Runs `make` in a forked child and brings its graph back.

    Where forking is not possible (no fork on this system, an accelerator already initialised, which a fork cannot share, or
    a daemonic process, which may have no children) it runs here, and the caller keeps the tracer's memory.

    A child forked while another thread has a lock of Python's own, as threads of torch.distributed may, waits for it for ever:
    it is ended, and another one forked.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    if not can_fork or torch.cuda.is_initialized() or multiprocessing.current_process().daemon:
        return make()
    for _ in range(ATTEMPTS):
        child, receiver = _start(make)
        if receiver.poll(STARTING):
            break
        receiver.close()
        child.kill()
        child.join()
    else:
        return make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, on unpickling a TreeSpec
            receiver.recv_bytes()
            outcome = pickle.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        raise CaptureError(
            f"capture ended without a result (exit code {child.exitcode}); if it was killed, memory may be short"
        ) from None
    finally:
        receiver.close()
        child.join()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _start(make: Callable[[], Graph]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """A child that says when it has started, and then sends its graph, or why there is none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child runs no kernel in parallel
        child = context.Process(target=_child, args=(make, sender), name="packhorse-capture")
        child.start()
    sender.close()
    return child, receiver


def _child(make: Callable[[], Graph], sender: Connection) -> None:
    sender.send_bytes(b"started")
    torch.set_num_threads(1)  # the parent's pool of threads does not exist here
    gc.disable()  # short-lived, and makes millions of objects
    warnings.simplefilter("ignore")
    silence = os.open(os.devnull, os.O_WRONLY)  # tracing prints every attempt; what matters comes back as an error
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.stdout = sys.stderr = open(silence, "w")  # noqa: SIM115  # notebooks replace these; it lives as long as the child
    try:
        outcome: Any = make()
    except (PackhorseError, _Untraced) as error:
        outcome = error.with_traceback(None)
    except Exception as error:
        outcome = CaptureError(f"capture failed: {_first_line(error)}\n{traceback.format_exc(limit=-6)}")
    try:
        message = pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        message = pickle.dumps(
            CaptureError(f"the model's output cannot leave the capturing process: {_first_line(error)}")
        )
    sender.send_bytes(message)


def _find_cause(error: BaseException) -> BaseException:
    """The first error in the chain that is ours, else the one that started it."""
    seen: BaseException = error
    while True:
        if isinstance(seen, PackhorseError):
            return seen
        earlier = seen.__cause__ or seen.__context__
        if earlier is None or earlier is seen:
            return seen
        seen = earlier


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 3 if "Constraint" in type(error).__name__ else 1  # there the first line says nothing yet
    return f"{type(error).__name__}: {' '.join(lines[:count])}".rstrip(": ")


def _user_line(error: BaseException) -> str:
    """The innermost line of the traceback that is neither torch's nor ours, as `file:line: code`."""
    from packhorse.graph.faithful import is_internal

    frames: list[traceback.FrameSummary] = []
    seen: BaseException | None = error
    while seen is not None and not frames:
        frames = [f for f in traceback.extract_tb(seen.__traceback__) if not is_internal(f.filename)]
        seen = seen.__cause__ or seen.__context__
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"

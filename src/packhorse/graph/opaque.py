"""The fallback for what cannot be traced: cuts at module boundaries, blocks run as they are.

In: an `Entry` whose model branches on data, and for each block call a `Step` (see `record`, which finds them). Out: a function
a node, which runs that call.

[Note: replay] A node must be pure, but the glue between two blocks is Python that cannot be taken apart. So node k runs the
model's own forward from the start, with every earlier block call answered by its stored outputs, runs call k for real and
stops there. The glue is run again by every node; the blocks, where the work is, once. Of the earlier outputs a node is given
only what it needs: the others are placeholders without data, and what glue computes from them has no data either. What is
needed is found by trial: first only what call k is given itself, then also the output just before it. Where glue reads data
(it branches), another batch may take another path, so all are given.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from packhorse.errors import CaptureError
from packhorse.graph.entry import Entry, keep_buffers
from packhorse.graph.graph import (
    Graph,
    Rng,
    Size,
    draw_as_it_comes,
)

Call = tuple[str, int]  # a block by name, and how often it was called before in this run

GLUE: Call = ("", 0)  # stands for what runs after the last block: the rest of forward, and the loss


@dataclass(frozen=True)
class Step:
    """What one node needs to know: which call it runs, on which state, and which earlier outputs it is given."""

    call: Call
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    previous: tuple[Call, ...]


@dataclass(frozen=True)
class Shape:
    """The structure of a call's outputs: `tensors` are the places of tensors among its leaves, `others` the other leaves."""

    tree: TreeSpec
    tensors: tuple[int, ...]
    others: tuple[Any, ...]
    sizes: tuple[tuple[tuple[int | Size, ...], torch.dtype], ...]  # of the tensors

    @classmethod
    def of(cls, output: Any) -> tuple["Shape", list[Tensor]]:
        leaves, tree = tree_flatten(output)
        at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        tensors = [leaves[i] for i in at]
        return cls(tree, at, others, tuple((tuple(t.shape), t.dtype) for t in tensors)), tensors

    @property
    def plain(self) -> tuple[Any, ...]:
        """The outputs that are numbers or the like; they are taken to be the same for every batch."""
        return tuple(leaf for leaf in self.others if leaf is None or isinstance(leaf, (bool, int, float, str)))

    def placeholders(self, rows: int) -> list[Tensor]:
        """Outputs without data, for a batch of `rows`."""
        return [
            torch.empty([s.at(rows) if isinstance(s, Size) else s for s in sizes], dtype=dtype, device="meta")
            for sizes, dtype in self.sizes
        ]

    def fit(self, other: "Shape | None", rows: int) -> "Shape":
        """The same with sizes that follow the rows, told from a run with one row more.

        Without one (it took another path) a dimension 0 of as many rows is taken to follow them.
        """

        def size(tensor: int, at: int, here: Any) -> int | Size:
            if other is None or len(other.sizes) != len(self.sizes) or len(other.sizes[tensor][0]) <= at:
                return Size("b") if at == 0 and here == rows else here
            slope = other.sizes[tensor][0][at] - here  # type: ignore[operator]  # numbers until fitted
            offset = here - slope * rows
            return Size(f"{slope}*b + {offset}" if offset or slope != 1 else "b") if slope else here

        fitted = tuple(
            (tuple(size(i, at, here) for at, here in enumerate(sizes)), dtype)
            for i, (sizes, dtype) in enumerate(self.sizes)
        )
        return replace(self, sizes=fitted)

    def fill(self, tensors: Sequence[Any]) -> list[Any]:
        """All leaves, with these where the tensors go."""
        leaves = list(self.others)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves.insert(i, tensor)
        return leaves

    def restore(self, tensors: list[Tensor]) -> Any:
        return tree_unflatten(self.fill(tensors), self.tree)


class _Done(BaseException):
    """Unwinds forward once the wanted call has run. No Exception, so that a model's own handlers let it pass."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


@dataclass
class Run:
    """One walk through forward. `answer` tells what a block call gets; it may raise _Done."""

    answer: Callable[[Call, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    counts: dict[str, int] = field(default_factory=dict)
    phase: str = "glue"


class Runtime:
    """A copy of the model without weights, whose blocks ask the current run what to do."""

    def __init__(self, entry: Entry):
        self.entry = _copy_without_weights(entry)
        self.run: Run | None = None
        names: dict[nn.Module, str] = {}  # a module that stands in two places is one block, by its first name
        for name, block in find_blocks(self.entry.model):
            names.setdefault(block, name)
        self.blocks = {name: block for block, name in names.items()}
        self.shapes: dict[Call, Shape] = {}
        self.draws_in_glue = False
        self.copies = False  # glue writes in place into what it is given, so it is given copies
        for name, block in self.blocks.items():
            block.forward = functools.partial(self._called, name, functools.partial(_run_block, block, block.forward))

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self.run
        assert run is not None, "blocks are only called during a walk"
        if run.phase != "glue":  # part of another block as well
            return forward(*args, **kwargs)
        call = (name, run.counts.get(name, 0))
        run.counts[name] = call[1] + 1
        run.phase = f"{name}:{call[1]}"
        try:
            return run.answer(call, forward, args, kwargs)
        finally:
            run.phase = "glue"

    def walk(self, run: Run, state: Mapping[str, Tensor], inputs: list[Tensor], rng: Rng = draw_as_it_comes) -> Any:
        """The entry's forward under a run, with parameters and buffers from `state`."""
        self.run = run
        keyed: AbstractContextManager[Any] = nullcontext() if rng is draw_as_it_comes else _Keyed(rng, run)
        try:
            with keyed:
                return functional_call(self.entry, {f"model.{name}": t for name, t in state.items()}, tuple(inputs))
        finally:
            self.run = None

    def hand_out(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.clone() for t in tensors] if self.copies else tensors

    def execute(
        self,
        step: Step,
        parameters: list[Tensor],
        buffers: list[Tensor],
        inputs: list[Tensor],
        previous: list[Any],
        rng: Rng,
    ) -> list[Tensor]:
        """One node, as [Note: replay] says: the tensors its call returns."""
        if self.draws_in_glue and rng is draw_as_it_comes:
            raise CaptureError(
                "this model draws random numbers between its blocks, which run again for every segment; pass rng=..., so that "
                "they draw the same each time"
            )
        spec = self.entry.spec
        rows = next(t.shape[0] for leaf, t in zip(spec.leaves, inputs, strict=True) if leaf.batched)
        known = dict(zip(step.previous, previous, strict=True))

        def answer(call: Call, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if call in known:
                return self.shapes[call].restore(self.hand_out(known[call]))
            if call == step.call:
                raise _Done(forward(*args, **kwargs))
            if call not in self.shapes:
                raise CaptureError(
                    f"block {call[0]!r} is called here, but was not on the example; capture again with an example that "
                    "takes this path"
                )
            if list(self.shapes).index(call) > list(self.shapes).index(step.call):
                raise _Done(None)  # forward went past the wanted call: this batch skips it
            return self.shapes[call].restore(self.shapes[call].placeholders(rows))

        state = dict(zip((*step.parameters, *step.buffers), [*parameters, *buffers], strict=True))
        run = Run(answer)
        try:
            with _Dataless(run):
                output = self.walk(run, state, self.hand_out(inputs), rng)
        except _Done as done:
            output = done.output
        if output is None and step.call != GLUE:
            return [inputs[0].new_empty(0) for _ in self.shapes[step.call].tensors]
        (found, tensors), expected = Shape.of(output), self.shapes[step.call]
        if (found.tensors, found.plain) != (expected.tensors, expected.plain):
            raise CaptureError(
                f"block {step.call[0]!r} returned {len(tensors)} tensors beside {found.plain}, but on the example "
                f"{len(expected.tensors)} beside {expected.plain}; only the values of tensors may vary with the batch"
            )
        return tensors


def _run_block(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with keep_buffers(block):
        return forward(*args, **kwargs)


class _Keyed(TorchDispatchMode):
    """Calls `rng` before every random operation, with the phase it happens in and its number there."""

    supports_higher_order_operators = True

    def __init__(self, rng: Rng, run: Run):
        super().__init__()
        self.rng, self.run = rng, run
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            number = self.counts.get(self.run.phase, 0)
            self.counts[self.run.phase] = number + 1
            self.rng(f"{self.run.phase}:{number}")
        return func(*args, **(kwargs or {}))


class _Dataless(TorchFunctionMode):
    """Between blocks, what is computed from a placeholder is a placeholder; reading its data raises."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any_dataless(func, args, kwargs):
            _refuse_dataless(self.run.phase)
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def asks_no_data(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride", "numel", "detach", "untyped_storage")


def any_dataless(func: Any, args: Any, kwargs: Any) -> bool:
    return not asks_no_data(func) and any(
        isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_flatten((args, kwargs))[0]
    )


def _refuse_dataless(phase: str) -> None:
    """Said aloud, because some kernels take a tensor without data and compute garbage."""
    if phase != "glue":
        raise CaptureError(f"block {phase.partition(':')[0]!r} reads a value or parameter that it was not given")


def _copy_without_weights(entry: Entry) -> Entry:
    model = entry.model
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        image = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(image, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else image
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be traced, and not be copied to run its blocks either: {error}"
        ) from error
    return Entry(copied, entry.spec, entry.loss[0], entry.mode, entry.precision)


def find_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules to cut at: items of the outermost lists and sequences, and whatever stands beside them."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or _holds_list(child):
            yield from find_blocks(child, f"{path}.")
        else:
            yield path, child


def _holds_list(module: nn.Module) -> bool:
    """Whether it holds a list of blocks that hold parameters of their own, several layers deep."""
    return any(
        isinstance(inner, (nn.ModuleList, nn.ModuleDict))
        and len(inner) > 1
        and any(list(item.children()) for item in inner.children())
        for inner in module.modules()
    )


def attach(graph: Graph, entry: Entry) -> Graph:
    """Gives an opaque graph, made in another process, the modules it runs."""
    runtime = Runtime(entry)
    runtime.shapes, runtime.draws_in_glue, runtime.copies = graph.blocks["runtime"]
    steps = graph.blocks["steps"]
    graph.blocks.clear()
    graph.blocks.update({target: functools.partial(runtime.execute, step) for target, step in steps.items()})
    return graph

"""Recording an opaque graph: which blocks the model calls on the example, and the least each of them needs.

In: an `Entry` that cannot be traced, and the example's tensors. Out: a `Graph` whose nodes are block calls, to be completed
by `opaque.attach` in the process that runs it. See [Note: replay] in `opaque`.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from packhorse.errors import CaptureError
from packhorse.graph.entry import Entry
from packhorse.graph.graph import (
    Buffer,
    Graph,
    Node,
    Operation,
    Parameter,
    Ref,
    Size,
    Stored,
    Type,
    Value,
    describe_state,
    input_name,
    nbytes,
)
from packhorse.graph.opaque import GLUE, Call, Run, Runtime, Shape, Step, any_dataless, asks_no_data
from packhorse.graph.table import NodeTable, ValueTable

T = TypeVar("T")


def record_graph(entry: Entry, inputs: list[Tensor], reason: str) -> Graph:
    """Records the model's block calls on the example and lays them out as nodes."""
    runtime = Runtime(entry)
    parameters, buffers = describe_state(entry.model, entry.precision)
    if not runtime.blocks:
        raise _cannot(reason, "it has no submodules to cut at")
    state = _State(entry.model, parameters)
    recorder = _Recorder(runtime, state, parameters, buffers)
    try:
        recorder.record(inputs)
        steps = [recorder.find_step(call, inputs) for call in recorder.calls]
    except CaptureError:
        raise
    except Exception as error:
        raise _cannot(reason, f"running its blocks one by one failed too: {type(error).__name__}: {error}") from error
    return recorder.layout(steps, inputs, reason)


def _cannot(reason: str, why: str) -> CaptureError:
    remedy = (
        "Replace the branch on data by torch.where, or move it into a submodule of its own"
        if "data-dependent" in reason or "Untraceable" in reason
        else "Check that the model runs on the example as it is"
    )
    return CaptureError(
        f"the model cannot be captured: {reason}; and it cannot be cut at module boundaries, because {why}. {remedy}"
    )


_READS_DATA = (Tensor.__bool__, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.tolist)


class _Watch(TorchFunctionMode):
    """Notes which parameters and buffers are read between blocks, and whether data decides what happens there."""

    def __init__(self, names: dict[int, str], originals: set[int], run: Run):
        super().__init__()
        self.names, self.originals, self.run = names, originals, run
        self.read: dict[str, None] = {}
        self.branches = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_dataless(func, args, kwargs):
            raise CaptureError("a parameter is read that belongs to another block")
        if not asks_no_data(func) and any(id(leaf) in self.originals for leaf in tree_flatten((args, kwargs))[0]):
            raise CaptureError(
                "the loss, or a function outside the model, reads the model's parameters directly, which blocks that run "
                "as they are cannot follow; make it part of the model's forward"
            )
        if self.run.phase == "glue":
            self.branches |= func in _READS_DATA
            self.read.update(
                dict.fromkeys(self.names[id(t)] for t in tree_flatten((args, kwargs))[0] if id(t) in self.names)
            )
        return func(*args, **(kwargs or {}))


class _State:
    """Parameters and buffers by name: as they are, or, where a model has no weights, made up, the same every time."""

    def __init__(self, model: nn.Module, parameters: dict[str, Parameter]):
        self.parameters = parameters
        self.tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self.originals = {id(tensor) for tensor in self.tensors.values()}

    def get(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._one(name) for name in names}

    def _one(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        dtype = self.parameters[name].working if name in self.parameters else tensor.dtype
        if not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes:
            # A copy: buffers may be advanced, and reads of the original are told from reads of this one.
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)
        made = torch.zeros(tensor.shape, dtype=dtype)
        if tensor.dtype.is_floating_point:  # any small values do; not drawn, since draws are counted
            steps = torch.arange(made.numel(), dtype=torch.float64).mul_(1 + zlib.crc32(name.encode()) % 97)
            made.copy_(steps.sin_().mul_(0.02).view(tensor.shape))
        return made.requires_grad_(tensor.requires_grad)


def _seed(key: int | str) -> None:
    """Recording and trials draw by key, so that they can be compared."""
    torch.default_generator.manual_seed(zlib.crc32(str(key).encode()))


class _Recorder:
    def __init__(self, runtime: Runtime, state: _State, parameters: dict[str, Parameter], buffers: dict[str, Buffer]):
        self.runtime, self.state = runtime, state
        self.parameters, self.buffers = parameters, buffers
        owned = {name for block in runtime.blocks for name in self._owned(block)}
        self.glue = [n for n in (*parameters, *buffers) if n not in owned]  # read between blocks, as far as known
        self.calls: dict[Call, list[Tensor]] = {}  # outputs, in order of calling
        self.given: dict[Call, list[Tensor]] = {}  # tensors among the arguments
        self.written: dict[Call, set[str]] = {}
        self.flops: dict[Call, int] = {}
        self.branches = False
        self.uncalled: set[Call] = set()

    def _owned(self, block: str) -> list[str]:
        stored: list[Stored] = [*self.parameters.values(), *self.buffers.values()]
        return [p.name for p in stored if any(name.startswith(f"{block}.") for name in p.names)]

    def record(self, inputs: list[Tensor]) -> None:
        """Runs the model on the example, and before on one row more, to learn which sizes follow the rows.

        Glue may read a block's parameter (a tied head): then with all of them. It may write in place into what it is given:
        then on copies.
        """
        spec = self.runtime.entry.spec
        more = [torch.cat([t, t[:1]]) if leaf.batched else t for leaf, t in zip(spec.leaves, inputs, strict=True)]
        others: dict[Call, Shape] = {}
        with contextlib.suppress(Exception):  # these rows may take a path of their own
            self._try_record(more)
            others = dict(self.runtime.shapes)
        self._try_record(inputs)
        self.runtime.shapes = {c: shape.fit(others.get(c), spec.rows) for c, shape in self.runtime.shapes.items()}

    def _try_record(self, inputs: list[Tensor]) -> None:
        everything = [*self.parameters, *self.buffers]
        failure: Exception | None = None
        for names, copies in ((self.glue, False), (everything, False), (self.glue, True), (everything, True)):
            self.runtime.copies = copies
            versions = [t._version for t in inputs]
            try:
                self._record(inputs, names)
                if copies or versions == [t._version for t in inputs]:
                    return
            except Exception as error:
                failure = failure or error
        raise failure or CaptureError("the model writes into its batch")

    def _record(self, inputs: list[Tensor], names: list[str]) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        runtime = self.runtime
        runtime.shapes, self.calls = {}, {}
        self.uncalled.clear()
        glue = self.state.get(names)
        versions = {name: t._version for name, t in glue.items()}

        def answer(call: Call, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = self.state.get(self._owned(call[0]))
            before = {name: t._version for name, t in state.items()}
            with FlopCounterMode(display=False) as counter, self._swapped(call[0], state):
                output = forward(*args, **kwargs)
            self.written[call] = {name for name, t in state.items() if t._version != before[name]}
            self.flops[call] = counter.get_total_flops()
            self.given[call] = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            runtime.shapes[call], tensors = Shape.of(output)
            self.calls[call] = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            return runtime.shapes[call].restore(runtime.hand_out(self.calls[call]))

        drawn: list[str] = []

        def rng(key: int | str) -> None:
            drawn.append(str(key))
            _seed(key)

        run = Run(answer)
        with torch.enable_grad(), _Watch({id(t): n for n, t in glue.items()}, self.state.originals, run) as watch:
            output = runtime.walk(run, glue, runtime.hand_out(inputs), rng)
        runtime.draws_in_glue = any(key.startswith("glue") for key in drawn)
        if any(t._version != versions[name] for name, t in glue.items()):
            raise CaptureError("the model writes into a buffer between its blocks, where it would run once a segment")
        self.branches = watch.branches
        self._add_uncalled()
        self.glue = list(dict.fromkeys([*self.glue, *watch.read]))
        runtime.shapes[GLUE], self.calls[GLUE] = Shape.of(output)
        self.flops[GLUE], self.given[GLUE], self.written[GLUE] = 0, [], set()

    def _add_uncalled(self) -> None:
        """Blocks that forward passed over this time (layers dropped at random) join where they stand, shaped like a sibling."""
        order = list(self.runtime.blocks)
        for name, block in self.runtime.blocks.items():
            twin = next((c for c in self.calls if type(self.runtime.blocks[c[0]]) is type(block)), None)
            if any(call[0] == name for call in self.calls) or twin is None or not self.branches:
                continue
            before = [at for at, call in enumerate(self.calls) if order.index(call[0]) < order.index(name)]
            call = (name, 0)
            self.calls = _insert(self.calls, before[-1] + 1 if before else 0, call, self.calls[twin])
            self.runtime.shapes = _insert(
                self.runtime.shapes, list(self.calls).index(call), call, self.runtime.shapes[twin]
            )
            self.given[call], self.flops[call] = [], self.flops[twin]
            self.written[call] = {w.replace(f"{twin[0]}.", f"{name}.", 1) for w in self.written[twin]}
            self.uncalled.add(call)

    @contextmanager
    def _swapped(self, block: str, state: dict[str, Tensor]) -> Iterator[None]:
        """The block with real parameters and buffers for the time of its call."""
        module = self.runtime.blocks[block]
        undo = []
        for path, inner in module.named_modules(prefix=block):
            for name in [*inner._parameters, *inner._buffers]:
                full = self._first_name(f"{path}.{name}")
                table = inner._parameters if name in inner._parameters else inner._buffers
                if full in state:
                    undo.append((table, name, table[name]))
                    table[name] = state[full]  # type: ignore[assignment]  # a tensor in a parameter's place
        try:
            yield
        finally:
            for table, name, tensor in undo:
                table[name] = tensor

    def _first_name(self, name: str) -> str:
        stored: list[Stored] = [*self.parameters.values(), *self.buffers.values()]
        return next((p.name for p in stored if name in p.names), name)

    def find_step(self, call: Call, inputs: list[Tensor]) -> Step:
        """The least a node needs, tried out: its outputs must be those of the recording."""
        earlier = list(self.calls)[: list(self.calls).index(call)]
        own = [*self.glue, *(self._owned(call[0]) if call != GLUE else ())]
        given = {id(t) for t in self.given[call]}
        direct = [c for c in earlier if any(id(t) in given for t in self.calls[c])]
        failure: Exception | None = None
        last = [c for c in earlier if c in direct or c == earlier[-1]]
        for previous in (earlier,) if self.branches else (direct, last, earlier):
            step = Step(
                call,
                tuple(n for n in self.parameters if n in own),
                tuple(n for n in self.buffers if n in own),
                tuple(previous),
            )
            try:
                if call in self.uncalled or self._reproduces(step, inputs):
                    return step
            except Exception as error:
                failure = error
        where = f"block {call[0]!r}" if call != GLUE else "what follows the last block"
        raise CaptureError(
            f"{where} gives other results when run on its own ({failure or 'its values differ'}): it depends on more than its "
            "inputs, parameters and buffers"
        )

    def _reproduces(self, step: Step, inputs: list[Tensor]) -> bool:
        state = self.state.get((*step.parameters, *step.buffers))
        outputs = self.runtime.execute(
            step,
            [state[n] for n in step.parameters],
            [state[n] for n in step.buffers],
            inputs,
            [self.calls[c] for c in step.previous],
            _seed,
        )
        return all(_same(a, b) for a, b in zip(outputs, self.calls[step.call], strict=True))

    def layout(self, steps: list[Step], inputs: list[Tensor], reason: str) -> Graph:
        spec = self.runtime.entry.spec
        outside = [
            *(Value(p.name, "parameter", _type(p.shape, p.working, p.trainable, 0)) for p in self.parameters.values()),
            *(Value(b.name, "buffer", _type(b.shape, b.dtype, False, 0)) for b in self.buffers.values()),
            *(
                Value(
                    input_name(leaf.path),
                    "input",
                    _type(leaf.shape, leaf.dtype, False, spec.rows if leaf.batched else 0),
                )
                for leaf in spec.leaves
            ),
        ]
        index: dict[Any, int] = {value.name: i for i, value in enumerate(outside)}
        made: list[Value] = []
        nodes: list[Node] = []
        blocks: dict[str, Step] = {}
        for number, step in enumerate(steps):
            target = f"opaque.{number}"
            blocks[target] = step
            results = []
            sizes = self.runtime.shapes[step.call].sizes
            for at, tensor in enumerate(self.calls[step.call]):
                index[(step.call, at)] = len(outside) + len(made)
                results.append(index[(step.call, at)])
                made.append(
                    Value("block", "node", Type(sizes[at][0], tensor.dtype, tensor.nbytes, tensor.requires_grad))
                )
            nodes.append(self._node(target, step, results, index))
        outputs = tuple(Ref(i) for i in nodes[-1].results)
        written = {name for names in self.written.values() for name in names}
        shape = self.runtime.shapes[GLUE]
        entry = self.runtime.entry
        return Graph(
            name=type(entry.model).__name__,
            mode=entry.mode,
            batch=spec,
            values=ValueTable(outside, made),
            nodes=NodeTable(nodes),
            outputs=tuple(shape.fill(outputs)),
            output_tree=shape.tree if entry.mode == "predict" else None,
            parameters=self.parameters,
            buffers={name: replace(b, written=name in written) for name, b in self.buffers.items()},
            constants={},
            precision=entry.precision,
            opaque=reason,
            blocks={
                "steps": blocks,
                "runtime": (self.runtime.shapes, self.runtime.draws_in_glue, self.runtime.copies),
            },
        )

    def _node(self, target: str, step: Step, results: list[int], index: dict[Any, int]) -> Node:
        operands: list[int] = []

        def ref(key: Any) -> Ref:
            if index[key] not in operands:
                operands.append(index[key])
            return Ref(operands.index(index[key]))

        args = (
            tuple(ref(name) for name in step.parameters),
            tuple(ref(name) for name in step.buffers),
            tuple(ref(input_name(leaf.path)) for leaf in self.runtime.entry.spec.leaves),
            tuple(tuple(ref((call, at)) for at in range(len(self.calls[call]))) for call in step.previous),
        )
        operation = Operation(
            target,
            args,
            picks=tuple(range(len(results))),
            writes=tuple(int(ref(name)) for name in sorted(self.written[step.call])),
            flops=self.flops[step.call],
            nbytes=sum(t.nbytes for t in self.calls[step.call]),
        )
        return Node(operation, tuple(operands), tuple(results), step.call[0])


def _insert(table: dict[Call, T], at: int, key: Call, value: T) -> dict[Call, T]:
    items = list(table.items())
    return dict([*items[:at], (key, value), *items[at:]])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not a.is_meta and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _type(shape: tuple[int, ...], dtype: torch.dtype, differentiable: bool, rows: int) -> Type:
    """`rows` > 0: a dimension 0 of that size is taken for the batch."""
    free: tuple[int | Size, ...] = (Size("b"), *shape[1:]) if rows and shape and shape[0] == rows else shape
    return Type(free, dtype, nbytes(shape, dtype), differentiable)

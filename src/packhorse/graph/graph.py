"""The captured computation as plain values: nodes in execution order, the values they read and make, and what they touch.

In: nothing but records (see `export` and `opaque`, which make them). Out: `Graph`, small, picklable, free of torch.fx.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from packhorse.batch import BatchSpec
from packhorse.errors import BatchError
from packhorse.precision import Precision, cast_floats, master_dtype, uncast_parameters, working_dtype

Mode = Literal["train", "eval", "predict"]

# Called before every random operation, with its ordinal in the graph (in an opaque block: the block's name and the number
# of the draw), so that the caller may set the generator.
Rng = Callable[[int | str], None]


def draw_as_it_comes(key: int | str) -> None:
    """The Rng that leaves the generator alone: random operations draw in order, as in the plain module."""


class Ref(int):
    """A value by its index; in an operation's arguments, the operand at this position."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{int(self)}"


# What an expression of sizes may call.
SIZE_NAMESPACE: dict[str, Any] = {
    "math": math,
    "torch": torch,
    "max": max,
    "min": min,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on the rows of the batch, as a Python expression in `b`. Derived anew in every segment."""

    expression: str

    def at(self, rows: int) -> Any:
        return eval(self.expression, {"__builtins__": {}, **SIZE_NAMESPACE}, {"b": rows})  # printed by sympy

    def __repr__(self) -> str:
        return self.expression


@dataclass(frozen=True, slots=True)
class Type:
    """What is known of a value before it exists. Repeated blocks share these."""

    shape: tuple[int | Size | None, ...]  # None: a size that depends on the data
    dtype: torch.dtype | None  # None: no tensor but a number read off the data; it never crosses a cut
    nbytes: int  # at the example's rows
    differentiable: bool


class Value(NamedTuple):
    """Something a node reads or makes.

    `kind` is where it comes from: a "parameter", "buffer" or "constant" (then `name` is its original name), an "input"
    of the batch, or a "node".
    """

    name: str
    kind: Literal["parameter", "buffer", "constant", "input", "node"]
    type: Type

    @property
    def nbytes(self) -> int:
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class Operation:
    """What a node does, without the values it does it to: repeated blocks share these."""

    target: str
    args: tuple[Any, ...]  # Ref(i) stands for operand i
    kwargs: tuple[tuple[str, Any], ...] = ()
    picks: tuple[int, ...] | None = None  # which items of the result tuple become results; None: the result is a tensor
    context: tuple[Any, ...] = ()  # regions around it: ("no_grad",), ("autocast", device, dtype, enabled, cache)
    writes: tuple[int, ...] = ()  # operands whose storage it changes
    aliases: tuple[tuple[int, int], ...] = ()  # (result, operand) that may share storage
    flops: int = 0
    nbytes: int = 0  # of its results; like flops and all bytes below, at the example's rows
    saved: tuple[int, ...] = ()  # operands that its backward reads
    saved_results: tuple[int, ...] = ()
    hidden: int = 0  # bytes its backward reads beside those
    forward_peak: int = 0  # bytes allocated at a time while it runs without gradients, results included
    building_peak: int = 0  # the same with gradients
    backward_peak: int = 0  # the same for its backward, gradients of operands included

    @property
    def name(self) -> str:
        return self.target.removeprefix("aten.").removesuffix(".default")


class Node(NamedTuple):
    """One operation at its place: which values it reads and makes, in which module."""

    operation: Operation
    operands: tuple[int, ...]
    results: tuple[int, ...]
    module: str
    ordinal: int | None = None  # its place among the graph's random operations
    region: int = 0  # which autocast region it is in, counted from 1; 0: none

    @property
    def flops(self) -> int:
        return self.operation.flops

    @property
    def nbytes(self) -> int:
        return self.operation.nbytes

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(self.operands[i] for i in self.operation.writes)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.results[r], self.operands[o]) for r, o in self.operation.aliases)

    def __str__(self) -> str:
        return f"{self.operation.name} in {self.module}" if self.module else self.operation.name


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the model by its first name; a tied one has others."""

    name: str
    others: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.others)

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Parameter(Stored):
    """`dtype` is its master's, `working` the one it runs in."""

    trainable: bool
    working: torch.dtype


@dataclass(frozen=True, slots=True)
class Buffer(Stored):
    """`written` ones change while the model runs (batch norm)."""

    persistent: bool
    written: bool


@dataclass(frozen=True, slots=True)
class Guard:
    """A fact about the values of one input that the capture relied on, checked on every batch."""

    input: str
    fact: Literal["all ones", "not packed"]

    def holds(self, tensor: Tensor) -> bool:
        if self.fact == "all ones":
            return bool((tensor == 1).all())
        return bool((tensor.diff(dim=-1) == 1).all())


@dataclass(frozen=True)
class Graph:
    """A model's computation from the batch to its loss (or its output, in mode "predict")."""

    name: str
    mode: Mode
    batch: BatchSpec
    values: Sequence[Value]
    nodes: Sequence[Node]
    outputs: tuple[Any, ...]  # Ref, or a constant the model returned
    output_tree: TreeSpec | None  # None: outputs are (loss,)
    parameters: dict[str, Parameter]  # all of the model's, used or not, in the order of model.parameters()
    buffers: dict[str, Buffer]
    constants: dict[str, Tensor]
    guards: tuple[Guard, ...] = ()
    precision: Precision = "fp32"
    single_row: str = ""  # why a batch of one row would take another path; empty: it would not
    opaque: str = ""  # why blocks run as they are; empty when the graph is whole
    blocks: dict[str, Any] = field(default_factory=dict)  # target -> callable of opaque nodes

    @cached_property
    def producers(self) -> "array[int]":
        """For each value the index of the node that makes it, -1 for what comes from outside."""
        producers = array("i", [-1]) * len(self.values)
        for i, node in enumerate(self.nodes):
            for result in node.results:
                producers[result] = i
        return producers

    @cached_property
    def last_uses(self) -> "array[int]":
        """For each value the index of the last node that reads it; len(nodes) if the graph returns it, -1 if unused."""
        uses = array("i", [-1]) * len(self.values)
        for i, node in enumerate(self.nodes):
            for operand in node.operands:
                uses[operand] = i
        for ref in refs(self.outputs):
            uses[ref] = len(self.nodes)
        return uses

    @cached_property
    def dependents(self) -> frozenset[int]:
        """Values that parameters, or chance, have a part in; all others follow from the batch alone."""
        found: set[int] = set()
        for node in self.nodes:
            if node.ordinal is not None or any(self.values[o].kind == "parameter" or o in found for o in node.operands):
                found.update(node.results)
        return frozenset(found)

    @cached_property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(p.nbytes for p in self.parameters.values()) + sum(b.nbytes for b in self.buffers.values())

    @cached_property
    def ties(self) -> dict[str, tuple[str, ...]]:
        return {p.name: p.names for p in self.parameters.values() if p.others}

    @property
    def num_parameters(self) -> int:
        return sum(numel(p.shape) for p in self.parameters.values())

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """The batch's tensors by the names of the graph's input values, after checking structure, rows and guards."""
        inputs = self.read(batch)
        self.check_rows(self.batch.count_rows(batch))
        return inputs

    def check_rows(self, rows: int) -> None:
        if self.single_row and rows == 1:
            raise BatchError(
                f"the batch has one row, for which {self.name} takes another path than captured ({self.single_row}); use "
                "microbatches of at least 2 rows"
            )

    def read(self, batch: Any) -> dict[str, Tensor]:
        """The same for a batch of rows that need not be run by themselves."""
        tensors = self.batch.flatten(batch)
        inputs = {input_name(leaf.path): t for leaf, t in zip(self.batch.leaves, tensors, strict=True)}
        for guard in self.guards:
            if not guard.holds(inputs[input_name(guard.input)]):
                raise BatchError(
                    f"batch value {guard.input} was {guard.fact} in the example, and the graph relies on it, but in this "
                    "batch it is not; capture again with this batch as the example"
                )
        working = working_dtype(self.precision)
        return {name: cast_floats(tensor, working) for name, tensor in inputs.items()}


def describe_state(model: nn.Module, precision: Precision = "fp32") -> tuple[dict[str, Parameter], dict[str, Buffer]]:
    """Parameters and buffers by first name; one tensor with several names is one entry."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    shapes: dict[
        tuple[int, ...], tuple[int, ...]
    ] = {}  # one object a shape: there are few, and thousands of parameters

    def describe(tensor: Tensor) -> tuple[str, tuple[str, ...], tuple[int, ...], torch.dtype]:
        (first, *others), shape = names[id(tensor)], tuple(tensor.shape)
        return first, tuple(others), shapes.setdefault(shape, shape), tensor.dtype

    persistent = set(model.state_dict(keep_vars=True))
    uncast, cast = uncast_parameters(model), working_dtype(precision)

    def describe_parameter(parameter: nn.Parameter) -> Parameter:
        name, others, shape, dtype = describe(parameter)
        keeps = id(parameter) in uncast or not dtype.is_floating_point
        working = dtype if keeps or cast is None else cast
        return Parameter(name, others, shape, master_dtype(dtype, precision), parameter.requires_grad, working)

    parameters = [describe_parameter(p) for p in model.parameters()]
    buffers = [Buffer(*describe(b), names[id(b)][0] in persistent, False) for b in model.buffers()]
    return {p.name: p for p in parameters}, {b.name: b for b in buffers}


def input_name(path: str) -> str:
    return f"batch:{path}"  # a colon, which parameters' names do not have


def refs(argument: Any) -> Iterator[Ref]:
    """All references in an argument, nested ones too."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from refs(item)


def move_refs(argument: Any, move: Callable[[Ref], Ref]) -> Any:
    """The argument with every reference replaced; parts without references are kept as they are, and so stay shared."""
    if isinstance(argument, Ref):
        return move(argument)
    if isinstance(argument, tuple) and any(True for _ in refs(argument)):
        return tuple(move_refs(a, move) for a in argument)
    return argument


def find_roots(nodes: Iterable[Node], num_values: int) -> list[int]:
    """For each value the one whose storage it may share: union-find over all aliases."""
    parent = list(range(num_values))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for node in nodes:
        for result, operand in node.aliases:
            a, b = find(result), find(operand)
            parent[max(a, b)] = min(a, b)
    return [find(i) for i in range(num_values)]


def numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return numel(shape) * dtype.itemsize

"""Compact storage: thousands of nodes and values as a few arrays, since a deep model has few distinct operations.

In: lists of `Node` and `Value`. Out: sequences that make the same records again on access, at a few bytes each.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from packhorse.graph.graph import Node, Value

T = TypeVar("T", bound=Hashable)


class NodeTable(Sequence[Node]):
    """Nodes in execution order."""

    def __init__(self, nodes: Iterable[Node]):
        nodes = list(nodes)
        # Equal operations are one object already; comparing them would take 1 for 1.0 and for Ref(1).
        distinct = {id(node.operation): node.operation for node in nodes}
        numbers = {key: number for number, key in enumerate(distinct)}
        self._operations = tuple(distinct.values())
        self._operation_ids = array("I", (numbers[id(node.operation)] for node in nodes))
        self._modules, self._module_ids = _index(node.module for node in nodes)
        self._operands, self._operand_ends = _concatenate(node.operands for node in nodes)
        self._results, self._result_ends = _concatenate(node.results for node in nodes)
        self._regions = array("I", (node.region for node in nodes))
        self._ordinals = array("i", (-1 if node.ordinal is None else node.ordinal for node in nodes))

    def __len__(self) -> int:
        return len(self._operation_ids)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Node, ...]: ...
    def __getitem__(self, index: int | slice) -> Node | tuple[Node, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        ordinal = self._ordinals[index]
        return Node(
            self._operations[self._operation_ids[index]],
            tuple(_slice(self._operands, self._operand_ends, index)),
            tuple(_slice(self._results, self._result_ends, index)),
            self._modules[self._module_ids[index]],
            None if ordinal < 0 else ordinal,
            self._regions[index],
        )

    def __iter__(self) -> Iterator[Node]:
        return (self[i] for i in range(len(self)))


class ValueTable(Sequence[Value]):
    """Values in order: first those from outside, by name; then those that nodes make, named after what makes them."""

    def __init__(self, outside: Iterable[Value], made: Iterable[Value]):
        outside, made = list(outside), list(made)
        self._outside = tuple(value.name for value in outside)
        self._sorts, self._sort_ids = _index((value.kind, value.type) for value in outside)
        self._names, self._name_ids = _index(value.name for value in made)
        self._types, self._type_ids = _index(value.type for value in made)

    def __len__(self) -> int:
        return len(self._outside) + len(self._name_ids)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Value, ...]: ...
    def __getitem__(self, index: int | slice) -> Value | tuple[Value, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index < len(self._outside):
            return Value(self._outside[index], *self._sorts[self._sort_ids[index]])
        at = index - len(self._outside)
        return Value(f"{self._names[self._name_ids[at]]}:{index}", "node", self._types[self._type_ids[at]])

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))


def _index(items: Iterable[T]) -> tuple[tuple[T, ...], "array[int]"]:
    """The distinct items, and for each item its number among them."""
    distinct: dict[T, int] = {}
    numbers = array("I", (distinct.setdefault(item, len(distinct)) for item in items))
    return tuple(distinct), numbers


def _concatenate(groups: Iterable[Iterable[int]]) -> tuple["array[int]", "array[int]"]:
    flat, ends = array("I"), array("I")
    for group in groups:
        flat.extend(group)
        ends.append(len(flat))
    return flat, ends


def _slice(flat: Any, ends: Any, index: int) -> Any:
    return flat[ends[index - 1] if index else 0 : ends[index]]

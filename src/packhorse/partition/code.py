"""Generated code: a range of nodes becomes one Python function, and equal ranges become the same function.

In: a graph and a range of its nodes. Out: `Code`, a compiled function of plain tensors, and the names that bind it.
Operations that are to run hollow say so in the text (hollow.py). Names inside the function are numbered by first use, so twins
(repeated blocks) print the same text and share one object.
"""

import functools
import linecache
import math
import operator
import re
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from packhorse.graph import Graph, Node, Ref, Size
from packhorse.graph.graph import SIZE_NAMESPACE
from packhorse.graph.lean import find_kernel
from packhorse.partition.hollow import Hollow


class Code:
    """One compiled function. Twins hold the same object."""

    def __init__(self, source: str):
        self.source = source
        self.name = f"<packhorse code {len(_CODES)}>"
        namespace = dict(_NAMESPACE)
        for target in set(re.findall(r"\b(op_\w+)\(", source)):
            namespace[target] = _resolve(_TARGETS[target])
        exec(compile(source, self.name, "exec"), namespace)
        linecache.cache[self.name] = (len(source), None, source.splitlines(keepends=True), self.name)  # for tracebacks
        self.function: Callable[..., tuple[Any, ...]] = namespace["segment"]

    def __repr__(self) -> str:
        return self.name


_CODES: dict[str, Code] = {}
_TARGETS: dict[str, str] = {}
_NAMESPACE: dict[str, Any] = {
    **SIZE_NAMESPACE,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "hollow": Hollow,
}


def get_code(source: str) -> Code:
    if source not in _CODES:
        _CODES[source] = Code(source)
    return _CODES[source]


@functools.cache
def _resolve(target: str) -> Any:
    path = target.split(".")
    if path[0] == "lean":
        return find_kernel(target)
    found: Any = {"operator": operator, "math": math, "torch": torch}.get(path[0], torch.ops)
    for part in path[1:] if found is not torch.ops else path:
        found = getattr(found, part)
    return find_kernel(target, found)


@dataclass
class Binding:
    """The text of a range of nodes, and which of the graph's values go in and out, in the order of the function's arguments."""

    source: str = ""
    parameters: "array[int]" = field(default_factory=lambda: array("I"))
    buffers: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    first_ordinal: int = 0


def write_code(
    graph: Graph, start: int, stop: int, hollow: Collection[int] = (), by_rows: Collection[int] = ()
) -> Binding:
    """Prints nodes `start` to `stop` as a function, in which those of `hollow` compute nothing.

    The gradients of the embeddings `by_rows` are sparse: only the rows that were looked up.
    """
    return _Writer(graph, start, stop, hollow, by_rows).write()


class _Writer:
    def __init__(self, graph: Graph, start: int, stop: int, hollow: Collection[int], by_rows: Collection[int]):
        self.graph, self.start, self.stop, self.hollow, self.by_rows = graph, start, stop, hollow, by_rows
        self.binding = Binding()
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        ordinals = [n.ordinal for n in graph.nodes[start:stop] if n.ordinal is not None]
        self.binding.first_ordinal = ordinals[0] if ordinals else 0

    def write(self) -> Binding:
        graph, binding = self.graph, self.binding
        body = self._body()
        binding.outputs = [
            result
            for node in graph.nodes[self.start : self.stop]
            for result in node.results
            if graph.last_uses[result] >= self.stop
        ]
        returned = "".join(f"{self.names[o]}, " for o in binding.outputs)
        groups = {"p": binding.parameters, "k": binding.buffers, "c": binding.constants, "x": binding.inputs}
        arguments = [f"{letter}{i}" for letter, group in groups.items() for i in range(len(group))]
        arguments += [f"block{i}" for i in range(len(binding.blocks))]
        header = f"def segment({', '.join([*arguments, 'b', 'rng'])}):"
        lines = [header, *(f"    {line}" for line in [*self._views(), *body, f"return ({returned})"])]
        binding.source = "\n".join(lines) + "\n"
        return binding

    def _body(self) -> list[str]:
        """Statements in order; neighbours in the same region (no_grad, autocast) share its `with`."""
        lines: list[str] = []
        context: tuple[Any, ...] = ()
        place: tuple[Any, ...] = ((), 0)
        for index in range(self.start, self.stop):
            node = self.graph.nodes[index]
            if (node.operation.context, node.region) != place:
                context, place = node.operation.context, (node.operation.context, node.region)
                lines += ["    " * depth + f"with {_region(region)}:" for depth, region in enumerate(context)]
            indent = "    " * len(context)
            lines += [indent + line for line in self._statement(node, index)]
        return lines

    def _views(self) -> list[str]:
        """Autocast keeps its casts of leaves; what a segment is handed as a leaf is none in the model, so it gets a view."""
        if not any(node.region for node in self.graph.nodes[self.start : self.stop]):
            return []
        return [f"x{i} = x{i}.view_as(x{i})" for i in range(len(self.binding.inputs))]

    def _statement(self, node: Node, index: int) -> list[str]:
        lines = []
        if node.ordinal is not None:
            lines.append(f"rng({node.ordinal - self.binding.first_ordinal})")
        call, around = self._call(node, index), "with hollow(): " if index in self.hollow else ""
        for result in node.results:
            self.names[result] = f"v{len(self.names)}"
        names = [self.names[r] for r in node.results]
        picks = node.operation.picks
        if picks is None:
            lines.append(f"{around}{names[0]} = {call}")
        else:
            lines.append(f"t = {call}")
            lines += [f"{name} = t[{pick}]" for name, pick in zip(names, picks, strict=True)]
            lines.append("del t")
        dead = {ref for ref in node.operands if self.graph.last_uses[ref] == index and self._is_local(ref)}
        dead |= {r for r in node.results if self.graph.last_uses[r] < 0}
        if dead:
            lines.append(f"del {', '.join(sorted(self.names[d] for d in dead))}")
        return lines

    def _is_local(self, ref: int) -> bool:
        return self.graph.producers[ref] >= self.start

    def _call(self, node: Node, index: int) -> str:
        operation = node.operation
        arguments = [self._print(a, node) for a in operation.args]
        arguments += [f"{name}={self._print(a, node)}" for name, a in operation.kwargs]
        arguments += ["sparse=True"] if index in self.by_rows else []
        if operation.target in self.graph.blocks:
            arguments.append("rng")
            if operation.target not in self.binding.blocks:
                self.binding.blocks.append(operation.target)
            return f"block{self.binding.blocks.index(operation.target)}({', '.join(arguments)})"
        name = "op_" + re.sub(r"\W", "_", operation.target)
        _TARGETS[name] = operation.target
        return f"{name}({', '.join(arguments)})"

    def _print(self, argument: Any, node: Node) -> str:
        if isinstance(argument, Ref):
            return self._name(node.operands[argument])
        if isinstance(argument, tuple):
            return f"[{', '.join(self._print(a, node) for a in argument)}]"
        if isinstance(argument, Size):
            return f"({argument.expression})" if not argument.expression.isidentifier() else argument.expression
        return repr(argument)

    def _name(self, ref: int) -> str:
        if ref not in self.names:
            kind = self.graph.values[ref].kind
            letter, group = {
                "parameter": ("p", self.binding.parameters),
                "buffer": ("k", self.binding.buffers),
                "constant": ("c", self.binding.constants),
            }.get(kind, ("x", self.binding.inputs))
            group.append(ref)
            self.names[ref] = f"{letter}{len(group) - 1}"
        return self.names[ref]


def _region(region: tuple[Any, ...]) -> str:
    if region[0] == "autocast":
        _, device, dtype, enabled = region
        return f"torch.autocast({device!r}, dtype={dtype!r}, enabled={enabled!r})"
    return "torch.no_grad()" if region[0] == "no_grad" else "torch.enable_grad()"

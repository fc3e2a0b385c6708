"""Running statistics that ranks advanced apart, on other samples, made one again: as if all had passed in order.

A batch norm does `r = (1 - m) * r + m * b` for each microbatch, so n of them make `f * r + c` of it, with `f = (1 - m) ** n`
and a `c` that a rank finds by beginning with 0. What all ranks found can be added up in the order of the microbatches, later.
A count, which grows by one each time, is the same with `f = 1`.
"""

from collections.abc import Sequence

from torch import Tensor

from packhorse.errors import RanksError
from packhorse.graph import Graph, Ref

MOMENTUM = 6  # its place among the arguments of aten.batch_norm


def find_momenta(graph: Graph) -> dict[str, float]:
    """For each buffer that training writes: how much of a microbatch's statistic it takes; of counts 0, they only grow."""
    found: dict[str, float] = {}
    written = {name for name, buffer in graph.buffers.items() if buffer.written}
    read = _find_read(graph)
    for node in graph.nodes:
        operation = node.operation
        touched = [graph.values[node.operands[i]] for i in operation.writes]
        for value in touched:
            if value.name not in written:
                continue
            momentum = operation.args[MOMENTUM] if operation.name == "batch_norm" else None
            if isinstance(momentum, float):
                found[value.name] = momentum
            elif graph.buffers[value.name].dtype.is_floating_point or isinstance(momentum, Ref) or value.name in read:
                raise RanksError(
                    f"{operation.name} in {node.module or 'the model'} changes the buffer {value.name} in a way that ranks "
                    "which see other samples cannot join; use ranks=ph.Ranks(pipeline=...), or a norm without running "
                    "statistics (or with a fixed momentum)"
                )
            else:
                found[value.name] = 0.0
    return found


def _find_read(graph: Graph) -> set[str]:
    """Buffers that something reads, as they are or as what a write to them made of them; writes themselves do not count."""
    names = {i: value.name for i, value in enumerate(graph.values) if value.kind == "buffer"}
    read: set[str] = set()
    for node in graph.nodes:
        names.update({result: names[operand] for result, operand in node.aliases if operand in names})
        others = [o for i, o in enumerate(node.operands) if i not in node.operation.writes]
        read.update(names[operand] for operand in others if operand in names)
    return read


def add_up(before: Tensor, found: Sequence[Tensor], counts: Sequence[int], kept: Tensor) -> Tensor:
    """What one rank would have made of `before`, from what ranks found in order, each in so many microbatches.

    `kept` is what a microbatch leaves of a statistic, 1 - m; of a count all, 1.
    """
    for own, count in zip(found, counts, strict=True):
        before = kept**count * before + own
    return before

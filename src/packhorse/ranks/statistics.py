"""Running statistics that ranks advanced apart, on other samples, made one again: as if all had passed in order.

A batch norm does `r = (1 - m) * r + m * b` for each microbatch, so what a rank did to `r` in n of them is `f * r + c` with
`f = (1 - m) ** n`. Such steps can be joined in the order of the microbatches: each rank began at the same `r`.
"""

from collections.abc import Sequence

from torch import Tensor

from packhorse.errors import RanksError
from packhorse.graph import Graph, Ref

MOMENTUM = 6  # its place among the arguments of aten.batch_norm


def find_momenta(graph: Graph) -> dict[str, float | None]:
    """For each buffer that training writes: how much of a microbatch's statistic it takes; None for counts."""
    found: dict[str, float | None] = {}
    written = {name for name, buffer in graph.buffers.items() if buffer.written}
    for node in graph.nodes:
        operation = node.operation
        touched = [graph.values[node.operands[i]] for i in operation.writes]
        for value in touched:
            if value.name not in written:
                continue
            momentum = operation.args[MOMENTUM] if operation.name == "batch_norm" else None
            if isinstance(momentum, float):
                found[value.name] = momentum
            elif graph.buffers[value.name].dtype.is_floating_point or isinstance(momentum, Ref):
                raise RanksError(
                    f"{operation.name} in {node.module or 'the model'} changes the buffer {value.name} in a way that ranks "
                    "which see other samples cannot join; use ranks=ph.Ranks(pipeline=...), or a norm without running "
                    "statistics (or with a fixed momentum)"
                )
            else:
                found[value.name] = None
    return found


def join(before: Tensor, after: Sequence[Tensor], counts: Sequence[int], momentum: float | None) -> Tensor:
    """What one rank would have made of it: `after` are those of the ranks in order, which saw so many microbatches."""
    joined = before
    for found, count in zip(after, counts, strict=True):
        if momentum is None:
            joined = joined + (found - before)
        elif count:
            joined = found + (1.0 - momentum) ** count * (joined - before)
    return joined

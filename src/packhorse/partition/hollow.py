"""Hollow operations: what a segment need not compute when it runs again only to have its graph.

In: a graph and a range of its nodes. Out: the nodes whose results no backward reads, such as the last product of a
residual block and the addition after it. They run hollow: autograd makes their nodes, and keeps what it would keep, but no
kernel computes, and their results have no values. Gradients are the same to the bit, since backward reads nothing of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from packhorse.graph import Graph, Node
from packhorse.graph.graph import Value, find_roots

aten = torch.ops.aten

# Operations that may run hollow, and the kernels below autograd that are then left out. What else such an operation does
# (views, the mask of a dropout) is done.
OPERATIONS = ("linear", "addmm", "mm", "add.Tensor", "sub.Tensor", "mul.Tensor", "embedding", "dropout")
KERNELS = frozenset(
    [
        aten.addmm.default,
        aten.mm.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.embedding.default,
    ]
)


def find_hollow(graph: Graph, start: int, stop: int) -> frozenset[int]:
    """Which of the nodes `start` to `stop` no backward reads the results of, at first hand or at second."""
    nodes = graph.nodes[start:stop]
    touched = sorted({v for node in nodes for v in (*node.operands, *node.results)})
    number = {value: i for i, value in enumerate(touched)}
    local = [
        n._replace(
            operands=tuple(map(number.__getitem__, n.operands)), results=tuple(map(number.__getitem__, n.results))
        )
        for n in nodes
    ]
    roots = find_roots(local, len(touched))
    needed: set[int] = set()  # storages that must have their values
    hollow = set()
    for i, node in reversed(list(enumerate(local, start))):
        if _is_view(node):
            continue  # shares its operand's storage, and with it whether that is needed
        makes_floats = all(_is_float(graph.values[r]) for r in graph.nodes[i].results)
        if makes_floats and _may_be_hollow(node) and not any(roots[r] in needed for r in node.results):
            hollow.add(i)
            needed.update(roots[node.operands[o]] for o in node.operation.saved)
        else:
            needed.update(roots[o] for o in node.operands)
    return frozenset(hollow)


def _is_float(value: Value) -> bool:
    return value.type.dtype is not None and value.type.dtype.is_floating_point


def _is_view(node: Node) -> bool:
    """Moves nothing. What is not known to allocate, and not to be a view either, is something else."""
    operation = node.operation
    viewed = {result for result, _ in operation.aliases}
    return not operation.writes and not operation.forward_peak and viewed == set(range(len(node.results)))


def _may_be_hollow(node: Node) -> bool:
    """One of those operations, outside of regions, of which it is known what backward reads."""
    operation = node.operation
    is_plain = not operation.context and not node.region and not operation.writes
    return is_plain and operation.name in OPERATIONS and operation.forward_peak > 0


class Hollow(TorchDispatchMode):
    """Below autograd: kernels answer with memory of the right shape that nobody wrote to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import it, 60 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        outlines = tree_map_only(Tensor, lambda tensor: make_blank(tensor, "meta"), args)
        return make_blank(func(*outlines, **(kwargs or {})), args[0].device)


def make_blank(like: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of that shape; nobody has written to it."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

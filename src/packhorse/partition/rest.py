"""A backward in two halves: gradients of inputs, which others wait for, and, later, those of parameters.

In: a segment's graph, as autograd has it, and the gradients of what the segment made. Out: the gradients that one
`autograd.grad` of all would give, to the same bits.

What leads to an input is walked first. Where a node on that way has a neighbour off it, through which it reaches
parameters, the gradient that comes to the node is kept; the second half starts from those, one node at a time, and goes only
to its parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packhorse.partition.segment import Segment


class Fork(NamedTuple):
    """Where the way to parameters parts from the way to inputs: gradients that come there, and the parameters behind."""

    edges: Sequence[GradientEdge]
    names: Sequence[str]


class Rest:
    """Of one microbatch. Where no input needs a gradient, nothing is done before the second half.

    Where a parameter is reached from several forks, as in a recurrent layer, nothing is left for the second half: a gradient
    on its way from one to the other would be counted twice.
    """

    def __init__(
        self,
        segment: Segment,
        parameters: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ):
        self._segment = segment
        self._weights = {n: parameters[n] for n in segment.parameters if parameters[n].requires_grad}
        self._whole: tuple[Any, ...] | None = (parameters, inputs, outputs, gradients)
        self._found: dict[str, Tensor] = {}  # of parameters
        self._left: list[tuple[Fork, Sequence[Tensor | None]]] = []

    def begin(self) -> dict[str, Tensor]:
        """Gradients of inputs."""
        assert self._whole is not None
        _, inputs, outputs, gradients = self._whole
        leaves = {n: inputs[n] for n in self._segment.inputs if inputs[n].requires_grad}
        roots = self._segment.find_roots(leaves, outputs, gradients)
        if not leaves or not roots:
            return {}
        forks = find_forks(roots.values(), leaves.values(), self._weights)
        if forks is None:
            self._found = self._segment.differentiate(*self._whole)
            self._whole = None
            return {name: self._found.pop(name) for name in leaves if name in self._found}
        edges = [edge for fork in forks for edge in fork.edges]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            list(roots.values()),
            [*leaves.values(), *edges],
            [gradients[name] for name in roots],
            retain_graph=True,
            allow_unused=True,
        )
        arrived = iter(found[len(leaves) :])
        self._left = [(fork, [next(arrived) for _ in fork.edges]) for fork in forks]
        self._whole = None
        return {name: gradient for name, gradient in zip(leaves, found, strict=False) if gradient is not None}

    def finish(self) -> dict[str, Tensor]:
        """Gradients of parameters."""
        if self._whole is not None:
            found = self._segment.differentiate(*self._whole)
            return {name: gradient for name, gradient in found.items() if name in self._weights}
        while self._left:
            fork, arrived = self._left.pop()
            seeds = {edge: gradient for edge, gradient in zip(fork.edges, arrived, strict=True) if gradient is not None}
            if seeds:
                weights = [self._weights[name] for name in fork.names]
                gradients = torch.autograd.grad(list(seeds), weights, list(seeds.values()), allow_unused=True)
                self._found |= {n: g for n, g in zip(fork.names, gradients, strict=True) if g is not None}
        return self._found


def find_forks(roots: Iterable[Tensor], leaves: Iterable[Tensor], weights: Mapping[str, Tensor]) -> list[Fork] | None:
    """None: a parameter is reached from several."""
    starts = [get_gradient_edge(root) for root in roots]
    names = {get_gradient_edge(weight).node: name for name, weight in weights.items()}
    order = _sort([edge.node for edge in starts])
    leads = {get_gradient_edge(leaf).node for leaf in leaves}  # nodes from which an input is reached
    behind: dict[Node, frozenset[str]] = {}  # parameters that are reached, from nodes off that way
    arriving: dict[Node, set[int]] = {}  # which of a node's gradients come from somewhere
    for node in order:
        following = [n for n, _ in node.next_functions if n is not None]
        if any(n in leads for n in following):
            leads.add(node)
        if node not in leads:
            own = {names[node]} if node in names else set()
            behind[node] = frozenset(own.union(*(behind[n] for n in following)))
        for n, i in node.next_functions:
            if n is not None:
                arriving.setdefault(n, set()).add(i)
    for edge in starts:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    forks: list[Fork] = []
    first = {edge.node for edge in starts}
    for node in order:
        reached: set[str] = set()
        if node in leads:
            reached = set().union(*(behind.get(n, frozenset()) for n, _ in node.next_functions if n is not None))
        elif node in first:
            reached = set(behind[node])
        if reached:
            forks.append(Fork([GradientEdge(node, i) for i in sorted(arriving[node])], sorted(reached)))
    found = [name for fork in forks for name in fork.names]
    return forks if len(found) == len(set(found)) else None


def _sort(starts: Iterable[Node]) -> list[Node]:
    """All nodes that are reached, each behind those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]
    return order

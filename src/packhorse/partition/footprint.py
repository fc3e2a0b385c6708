"""Footprints: the memory a segment takes while it runs, worked out from its nodes.

In: a segment and how many rows it runs. Out: `Footprint`: bytes beside its parameters and inputs, forward and backward. What
autograd keeps of each operation was found when the model was captured, so nothing is run.
"""

from dataclasses import dataclass

from packhorse.graph import Node, Size
from packhorse.graph.graph import Graph, Value, find_roots
from packhorse.partition.segment import Segment


@dataclass(frozen=True)
class Footprint:
    """Bytes at most at a time. Gradients of parameters are part of `backward`; inputs, and gradients that come in, of none."""

    forward: int  # without a graph, outputs included
    graph: int  # what stays between a forward that keeps its graph and the backward, outputs included
    building: int  # while such a forward runs
    backward: int  # the graph included, as it is used up
    rebuilt: int  # the same where the graph was built again: tables that are looked up get gradients by rows


def find_footprint(segment: Segment, rows: int) -> Footprint:
    share = rows / segment.graph.batch.rows
    walk = _Walk(segment, share)
    forward = walk.run(keep=False)[0]
    building, graph = walk.run(keep=True)
    backward, rebuilt = walk.differentiate(graph), walk.differentiate(graph, frozenset(segment.looked_up.values()))
    return Footprint(int(forward), int(graph), int(building), int(backward), int(rebuilt))


class _Walk:
    def __init__(self, segment: Segment, share: float):
        self.graph: Graph = segment.graph
        self.share, self.nodes, self.start, self.stop = share, list(segment.nodes), segment.start, segment.stop
        self.outputs = set(segment.outputs)
        self.roots = self._find_roots()
        self.last = self._find_last_uses()
        self.savers = self._find_savers()

    def _find_roots(self) -> dict[int, int]:
        """For each value that the segment touches the one whose storage it shares."""
        touched = sorted({v for node in self.nodes for v in (*node.operands, *node.results)})
        number = {value: i for i, value in enumerate(touched)}
        local = [
            node._replace(
                operands=tuple(number[o] for o in node.operands), results=tuple(number[r] for r in node.results)
            )
            for node in self.nodes
            if not node.operation.forward_peak  # what allocates is no view, although another time it may be
        ]
        return {touched[i]: touched[root] for i, root in enumerate(find_roots(local, len(touched)))}

    def _find_last_uses(self) -> dict[int, int]:
        """For each storage the last node here that reads it; beyond the end if it leaves the segment."""
        last: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for value in (*node.operands, *node.results):
                last[self.roots[value]] = i
        for node in self.nodes:
            for value in node.results:
                if self.graph.last_uses[value] >= self.stop:
                    last[self.roots[value]] = len(self.nodes)
        return last

    def _find_savers(self) -> dict[int, int]:
        """For each storage that a backward reads the first node whose backward does: the last one to run."""
        savers: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            saved = [node.operands[o] for o in node.operation.saved]
            saved += [node.results[r] for r in node.operation.saved_results]
            for value in saved:
                savers.setdefault(self.roots[value], i)
        return savers

    def _made(self, node: Node) -> list[int]:
        """The storages a node makes."""
        return [r for r in dict.fromkeys(self.roots[r] for r in node.results) if r in node.results]

    def _size(self, root: int) -> float:
        value = self.graph.values[root]
        return value.nbytes * (self.share if _grows(value) else 1.0)

    def _scale(self, node: Node, nbytes: int) -> float:
        """Bytes a node takes beside its results, for these rows."""
        return nbytes * (self.share if any(_grows(self.graph.values[r]) for r in node.results) else 1.0)

    def run(self, *, keep: bool) -> tuple[float, float]:
        """The peak of a forward, and what it leaves behind."""
        live = peak = 0.0
        alive: set[int] = set()
        for i, node in enumerate(self.nodes):
            made = self._made(node)
            size = sum(self._size(r) for r in made)
            working = node.operation.building_peak if keep else node.operation.forward_peak
            peak = max(peak, live + max(self._scale(node, working), size))
            live += size + (self._scale(node, node.operation.hidden) if keep else 0)
            alive.update(made)
            for root in [r for r in alive if self.last[r] <= i and not (keep and r in self.savers)]:
                alive.remove(root)
                live -= self._size(root)
            peak = max(peak, live)
        return peak, live

    def differentiate(self, graph_bytes: float, by_rows: frozenset[int] = frozenset()) -> float:
        """The peak of a backward, from the bytes of its graph; gradients of the embeddings `by_rows` have as many rows as
        their results."""
        values = self.graph.values
        live = peak = graph_bytes
        gradients: dict[int, float] = {}  # by storage; those of outputs come from outside
        made = {root for node in self.nodes for root in self._made(node)}
        for i, node in reversed(list(enumerate(self.nodes))):
            operation = node.operation
            if any(values[r].type.differentiable for r in node.results):
                working = 0.0 if self._touches_parameter(node) else self._scale(node, operation.backward_peak)
                parameters = [
                    o for o in node.operands if values[o].kind == "parameter" and values[o].type.differentiable
                ]
                fresh = sum(float(values[o].nbytes) for o in parameters)
                if self.start + i in by_rows:
                    fresh = sum(self._size(r) for r in node.results)
                passes_on = operation.backward_peak == 0
                new: dict[int, float] = {}
                for operand in node.operands:
                    root = self.roots[operand]
                    if values[operand].type.differentiable and operand not in parameters and root not in gradients:
                        new[root] = 0.0 if passes_on else self._size(operand)
                peak = max(peak, live + (working or sum(new.values()) + fresh))  # it may write over what it read
                for result in node.results:
                    gone = gradients.pop(result, 0.0) if self.roots[result] == result else 0.0
                    live -= 0.0 if passes_on else gone
                    if passes_on and gone and new:
                        first = next(iter(new))
                        new[first] += gone
                        live -= gone
                gradients.update(new)
                live += sum(new.values()) + fresh
            live -= self._scale(node, operation.hidden)
            for root in [r for r in made if self.savers.get(r) == i and self.last[r] < len(self.nodes)]:
                live -= self._size(root)
            peak = max(peak, live)
        return peak

    def _touches_parameter(self, node: Node) -> bool:
        """Then what its backward allocates does not all grow with the rows, and is added up from its parts."""
        return any(self.graph.values[o].kind == "parameter" for o in node.operands)


def _grows(value: Value) -> bool:
    """Whether it has rows. A loss has none and is small; a mask, or a parameter in another precision, has its full size."""
    return any(isinstance(size, Size) for size in value.type.shape) or value.nbytes < 4096

"""What may not be separated, and why; and what each place between two nodes would cost to cut.

In: a `Graph`. Out: `Constraint`s, each an interval of nodes with its reason, and one `Place` per position between nodes.
A place is a legal cut when no constraint straddles it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from packhorse.graph import Graph
from packhorse.graph.graph import find_roots


@dataclass(frozen=True, slots=True)
class Constraint:
    """Nodes `first` to `last` belong together: no cut between them."""

    kind: str  # "write", "buffer view", "data-dependent size", "shared cast"
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """The position before node `index`: the bytes alive there, and what forbids a cut (None: legal)."""

    index: int
    nbytes: int
    forbidden: Constraint | None

    @property
    def legal(self) -> bool:
        return self.forbidden is None


def find_constraints(graph: Graph) -> list[Constraint]:
    """All constraints of the graph, in order of their first node."""
    found = [*_writes(graph), *_data_dependent_sizes(graph), *_shared_casts(graph)]
    return sorted(found, key=lambda c: (c.first, c.last))


def _writes(graph: Graph) -> Iterator[Constraint]:
    """A value and a later in-place write to its storage; a view of a buffer that is written, and the view's uses.

    A segment's inputs must not change under it: it may run twice (recomputation), and autograd forbids writing a leaf.
    """
    roots = find_roots(graph.nodes, len(graph.values))
    producers, uses = graph.producers, graph.last_uses
    first: dict[int, int] = {}  # storage -> first node that makes a value in it
    for value, root in enumerate(roots):
        if producers[value] >= 0:
            first[root] = min(first.get(root, len(graph.nodes)), producers[value])
    written = {roots[w] for node in graph.nodes for w in node.writes}
    for i, node in enumerate(graph.nodes):
        for w in node.writes:
            if graph.values[roots[w]].kind == "node":
                start = first[roots[w]]
                reason = f"{node} writes in place into what {graph.nodes[start]} made"
                yield Constraint("write", start, i, reason)
    for value, root in enumerate(roots):
        owner = graph.values[root]
        if root in written and owner.kind != "node" and producers[value] >= 0 and uses[value] > producers[value]:
            last = min(uses[value], len(graph.nodes) - 1)
            reason = f"{graph.nodes[producers[value]]} is a view of {owner.kind} {owner.name}, which is written"
            yield Constraint("buffer view", producers[value], last, reason)


def _data_dependent_sizes(graph: Graph) -> Iterator[Constraint]:
    """A number or size read off the data, and all that depends on it: only tensors of known size cross a cut."""
    for i, value in enumerate(graph.values):
        made, last = graph.producers[i], min(graph.last_uses[i], len(graph.nodes) - 1)
        unknown = value.type.dtype is None or None in value.type.shape
        if unknown and made >= 0 and last > made:
            yield Constraint(
                "data-dependent size", made, last, f"the size of {value.name} ({graph.nodes[made]}) depends on the data"
            )


def _shared_casts(graph: Graph) -> Iterator[Constraint]:
    """A parameter used twice in one autocast region is cast once there, and its gradients are added before the cast back."""
    uses: dict[tuple[int, int], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for operand in node.operands if node.region else ():
            if graph.values[operand].kind == "parameter":
                uses.setdefault((node.region, operand), []).append(i)
    for (_, operand), at in uses.items():
        if len(at) > 1:
            reason = (
                f"{graph.values[operand].name} is cast once for both {graph.nodes[at[0]]} and {graph.nodes[at[-1]]}"
            )
            yield Constraint("shared cast", at[0], at[-1], reason)


def find_places(graph: Graph) -> list[Place]:
    """Every position between two nodes, with what is alive there and the constraint that forbids it, if any."""
    count = len(graph.nodes)
    blocking: list[Constraint | None] = [None] * (count + 1)
    for constraint in find_constraints(graph):
        for position in range(constraint.first + 1, constraint.last + 1):
            blocking[position] = blocking[position] or constraint
    changes = [0] * (count + 2)
    for i, value in enumerate(graph.values):
        made, last = graph.producers[i], graph.last_uses[i]
        if made >= 0 and last > made:
            changes[made + 1] += value.nbytes
            changes[last + 1] -= value.nbytes
    places, nbytes = [], 0
    for position in range(1, count):
        nbytes += changes[position]
        places.append(Place(position, nbytes, blocking[position]))
    return places


def find_live(graph: Graph, index: int) -> list[int]:
    """The values made before node `index` and read there or later. The batch's own are everywhere, and do not count."""
    producers, uses = graph.producers, graph.last_uses
    return [i for i in range(len(graph.values)) if 0 <= producers[i] < index <= uses[i]]

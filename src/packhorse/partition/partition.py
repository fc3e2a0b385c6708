"""Partitions: which of the legal cuts to use.

In: a `Graph` and what is wanted (a number of segments, a limit of bytes, pinned cuts, or nothing: one segment a repeated
block). Out: a `Partition`. The slowest segment decides the pace of a relay or a pipeline, so its time is minimised, by
dynamic programming over the legal cuts; among partitions as fast as the best, the one that carries the fewest bytes wins.
"""

import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from packhorse.errors import PartitionError
from packhorse.graph import Graph, Ref, Size
from packhorse.graph.graph import Rng
from packhorse.partition.code import Code
from packhorse.partition.constraints import Place, find_places
from packhorse.partition.segment import Segment

# Until a Machine gives measured rates: how many flops a device does while its link moves one byte (a processor of a few
# TFLOPS behind a link of tens of GB/s). A transfer hides behind compute, so a segment's time is the larger of the two.
FLOPS_PER_BYTE = 100.0

# What a segment takes to begin, to end and to be updated, a millisecond or two, shows beside less than this: flops forward.
SMALL_FLOPS = 500_000_000
SMALL_BYTES = 4 << 20  # of parameters: what joined segments hold of gradients at a time

# Partitions whose slowest segment is within this factor of the best are equal; then fewest bytes carried decides.
SLACK = 1.01


@dataclass(frozen=True)
class Partition:
    """Segments in order. Composed, they are the model."""

    graph: Graph
    cuts: tuple[Place, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        bounds = [0, *(place.index for place in self.cuts), len(self.graph.nodes)]
        return tuple(Segment(self.graph, i, start, stop) for i, (start, stop) in enumerate(itertools.pairwise(bounds)))

    @property
    def codes(self) -> tuple[Code, ...]:
        """The distinct codes of its segments."""
        return tuple(dict.fromkeys(segment.code for segment in self.segments))

    def compose(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, rng: Rng | None = None
    ) -> Any:
        """Runs all segments in order on a batch: the loss, or in mode "predict" the model's output."""
        values, rows = self.graph.inputs(batch), self.graph.batch.count_rows(batch)
        for segment in self.segments:
            values.update(segment(parameters, buffers, values, rng, rows=rows))
        return self.finish({**parameters, **buffers, **values}, rows)

    def finish(self, values: Mapping[str, Tensor], rows: int) -> Any:
        """What the model returns, from all that it may return: values of segments, inputs, parameters and buffers."""
        graph = self.graph

        def find(output: Any) -> Any:
            if isinstance(output, Ref):
                value = graph.values[output]
                return graph.constants[value.name] if value.kind == "constant" else values[value.name]
            return output.at(rows) if isinstance(output, Size) else output

        outputs = [find(output) for output in graph.outputs]
        return outputs[0] if graph.output_tree is None else tree_unflatten(outputs, graph.output_tree)


def partition(
    graph: Graph,
    segments: int | Literal["finest"] | None = None,
    *,
    max_bytes: int | None = None,
    cuts: Sequence[str] = (),
    flops_per_byte: float = FLOPS_PER_BYTE,
) -> Partition:
    """Cuts the graph.

    `segments` asks for that many ("finest": a cut at every legal place); `max_bytes` for as few as keep each segment's
    `nbytes` below it; `cuts` pins a cut after each of the named modules, and alone makes just those. With nothing asked,
    the repeated blocks of the model become the segments.
    """
    places = find_places(graph)
    pinned = [_find_pinned(graph, places, name) for name in cuts]
    if len({p.index for p in pinned}) < len(pinned):
        raise PartitionError(f"two of the pinned cuts {', '.join(cuts)} fall on the same place")
    if segments == "finest":
        return Partition(graph, tuple(p for p in places if p.legal))
    if segments is None and max_bytes is None:
        chosen = pinned if cuts else _block_cuts(graph, places)
        return Partition(graph, tuple(sorted(chosen, key=lambda p: p.index)))
    if segments is not None and (isinstance(segments, bool) or not isinstance(segments, int) or segments < 1):
        raise PartitionError(f"segments is {segments!r}, expected a number of at least 1, or 'finest'")
    search = _Search(graph, places, {p.index for p in pinned}, max_bytes, flops_per_byte)
    return Partition(graph, tuple(search.best(segments, SLACK)))


def balance(graph: Graph, segments: int, slacks: Sequence[float]) -> list[Partition]:
    """For each slack the partition whose slowest segment is at most so many times as slow as the best, with fewest bytes."""
    search = _Search(graph, find_places(graph), set(), None, FLOPS_PER_BYTE)
    return [Partition(graph, tuple(search.best(segments, slack))) for slack in slacks]


def join_small(part: Partition, least: int = 1) -> Partition:
    """Neighbours become one segment as long as they are small together; what has no parameters goes with what is before it.

    In all they make about so many segments at `least`, if there are as many.
    """
    return _join(part, min(SMALL_FLOPS, part.graph.flops // least), SMALL_BYTES)


def join_between(part: Partition, stays: Collection[int]) -> Partition:
    """All that is between cuts that stay becomes one segment."""
    return _join(part, math.inf, math.inf, stays)


def _join(part: Partition, most_flops: float, most_bytes: float, stays: Collection[int] = ()) -> Partition:
    """But for users of one parameter, whose gradients are added in the same order wherever the model is cut."""
    kept: list[Place] = []
    flops = nbytes = 0
    names: set[str] = set()
    for segment, place in zip(part.segments, [None, *part.cuts], strict=True):
        flops, nbytes = flops + segment.flops, nbytes + segment.parameter_nbytes
        is_small = flops <= most_flops and nbytes <= most_bytes and names.isdisjoint(segment.parameters)
        if place is not None and (place.index in stays or (segment.parameters and not is_small)):
            kept.append(place)
            flops, nbytes, names = segment.flops, segment.parameter_nbytes, set()
        names |= set(segment.parameters)
    return Partition(part.graph, tuple(kept))


def _find_pinned(graph: Graph, places: list[Place], name: str) -> Place:
    """The place right after the last node of a module."""
    inside = [i for i, n in enumerate(graph.nodes) if n.module == name or n.module.startswith(f"{name}.")]
    if not inside:
        known = dict.fromkeys(".".join(n.module.split(".")[:2]) for n in graph.nodes if n.module)
        raise PartitionError(
            f"no module named {name!r} runs in {graph.name}; modules that do: {', '.join(list(known)[:12])}"
        )
    if inside[-1] + 1 >= len(graph.nodes):
        raise PartitionError(
            f"module {name!r} ends the graph, so there is nothing after it to cut off; pin an earlier one"
        )
    place = places[inside[-1]]  # places[i] is the position before node i + 1
    if place.forbidden:
        legal = [p for p in places if p.legal]
        near = min(legal, key=lambda p: abs(p.index - place.index), default=None)
        hint = f"the nearest legal cut is after {graph.nodes[near.index - 1]}" if near else "the graph has no legal cut"
        raise PartitionError(f"no cut after {name!r}: {place.forbidden.reason}; {hint}")
    return place


def _block_cuts(graph: Graph, places: list[Place]) -> list[Place]:
    """Cuts around the repeated blocks: modules numbered in a container (`h.0`, `layer1.2`), outermost first.

    What runs between two blocks of one container stays with the first of them.
    """
    blocks = [_block_of(node.module) for node in graph.nodes]
    inside = [i for i, block in enumerate(blocks) if block]
    for i, j in itertools.pairwise(inside):
        if blocks[i].rpartition(".")[0] == blocks[j].rpartition(".")[0]:
            blocks[i + 1 : j] = [blocks[i]] * (j - i - 1)
    return [place for place in places if place.legal and blocks[place.index - 1] != blocks[place.index]]


def _block_of(module: str) -> str:
    """The module's path up to its first numbers: `h.3.mlp.0` belongs to `h.3`, `stages.0.2.conv1` to `stages.0.2`."""
    numbered = [part.isdigit() for part in module.split(".")]
    if True not in numbered:
        return ""
    first = numbered.index(True)
    end = numbered.index(False, first) if False in numbered[first:] else len(numbered)
    return ".".join(module.split(".")[:end])


class _Search:
    """The fastest partition with a given number of segments.

    Two steps. First the least possible time T of the slowest segment, by bisection: for a given T the cuts that carry no
    more than T's worth of bytes are allowed, and taking the farthest reachable one each time needs the fewest segments.
    Then, with every segment at most T (and a slack), dynamic programming finds the exact number of segments that carries
    the fewest bytes: best[k][j] = min over i of best[k-1][i] + bytes(j), where segment i..j fits. The i that fit form a
    window that only moves forward, so a queue of candidates makes each step constant.
    """

    def __init__(
        self, graph: Graph, places: list[Place], pinned: set[int], max_bytes: int | None, flops_per_byte: float
    ):
        self.graph = graph
        self.places = [p for p in places if p.legal]
        self.bounds = [0, *(p.index for p in self.places), len(graph.nodes)]
        self.pinned = pinned
        self.max_bytes = max_bytes
        self.flops_per_byte = flops_per_byte
        flops = [0]
        for node in graph.nodes:
            flops.append(flops[-1] + node.flops)
        self.flops = [float(flops[b]) for b in self.bounds]
        self.transfer = [0.0, *(p.nbytes * flops_per_byte for p in self.places), 0.0]
        self.earliest = self._earliest_starts()

    def best(self, segments: int | None, slack: float) -> list[Place]:
        most = len(self.places) + 1
        if segments is not None and segments > most:
            raise PartitionError(
                f"{segments} segments asked, but {self.graph.name} has {len(self.places)} legal cuts: at most {most} segments; "
                "ask for fewer, or see `packhorse inspect --cuts` for what forbids the other places"
            )
        if segments is not None and segments <= len(self.pinned):
            raise PartitionError(
                f"{segments} segments asked, but {len(self.pinned)} pinned cuts already make {len(self.pinned) + 1}"
            )
        fewest = self._fewest(float("inf"))
        wanted = fewest if segments is None else segments
        if wanted < fewest:
            raise PartitionError(
                f"{segments} segments of at most {self.max_bytes} bytes each cannot hold {self.graph.name}: it takes {fewest}; "
                "raise max_bytes or ask for more segments"
            )
        limit = self._least_time(wanted) * slack
        return self._fewest_bytes(wanted, limit)

    def _earliest_starts(self) -> list[int]:
        """For each bound j the earliest bound i with segment i..j within max_bytes and without a pinned cut inside."""
        earliest, i = [0] * len(self.bounds), 0
        window = _Window(self.graph)
        for j in range(1, len(self.bounds)):
            window.extend(self.bounds[j])
            while i < j and self.max_bytes is not None and window.nbytes > self.max_bytes:
                i += 1
                window.shrink(self.bounds[i])
            if i == j:
                self._refuse_bytes(j)
            earliest[j] = i
            if self.bounds[j] in self.pinned:
                i = j
                window.shrink(self.bounds[j])
        return earliest

    def _refuse_bytes(self, j: int) -> None:
        smallest = max(
            _Window(self.graph, self.bounds[k - 1], self.bounds[k]).nbytes for k in range(1, len(self.bounds))
        )
        what = self.graph.nodes[self.bounds[j] - 1]
        raise PartitionError(
            f"the piece that ends with {what} cannot be cut further and exceeds max_bytes={self.max_bytes}; "
            f"the largest such piece needs {smallest} bytes: raise max_bytes, or make the example's batch smaller"
        )

    def _starts(self, limit: float) -> list[int]:
        """For each bound j the earliest start of a segment that ends there and takes at most `limit`."""
        starts, at = [], 0
        for j, flops in enumerate(self.flops):
            at = max(at, self.earliest[j])
            while flops - self.flops[at] > limit:
                at += 1
            starts.append(at)
        return starts

    def _fewest(self, limit: float) -> int:
        """The fewest segments with none above `limit`; more than there are bounds if it cannot be done."""
        starts = self._starts(limit)
        allowed = [t <= limit or b in self.pinned for t, b in zip(self.transfer, self.bounds, strict=True)]
        end, count = len(self.bounds) - 1, 0
        while end > 0:  # from the end, each segment begins as early as it may
            start = starts[end]
            while start < end and not (allowed[start] or start == 0):
                start += 1
            if start == end:
                return len(self.bounds) + 1
            end, count = start, count + 1
        return count

    def _least_time(self, segments: int) -> float:
        """The least limit for which `segments` segments suffice, among the limits that can occur."""
        units = [b - a for a, b in zip(self.flops, self.flops[1:], strict=False)]
        low = max(max(units), self.flops[-1] / segments)
        high = max(self.flops[-1], max(self.transfer), 1.0)
        if self._count_allows(low, segments):
            return low
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            if self._count_allows(middle, segments):
                high = middle
            else:
                low = middle
        return high

    def _count_allows(self, limit: float, segments: int) -> bool:
        """Fewer suffice, and enough cuts are allowed to make that many (a further cut never slows a segment)."""
        allowed = sum(t <= limit or b in self.pinned for t, b in zip(self.transfer, self.bounds, strict=True)) - 2
        return self._fewest(limit) <= segments <= allowed + 1

    def _fewest_bytes(self, segments: int, limit: float) -> list[Place]:
        starts = self._starts(limit)
        count = len(self.bounds)
        never = float("inf")
        cost = [0.0] + [never] * (count - 1)
        origins: list[array[int]] = []
        price = [
            never if t > limit and b not in self.pinned else t for t, b in zip(self.transfer, self.bounds, strict=True)
        ]
        for _ in range(segments):
            following, origin = [never] * count, array("i", [-1]) * count
            window: deque[int] = deque()  # candidates for i, cheapest first
            for j in range(1, count):
                while window and cost[window[-1]] >= cost[j - 1]:
                    window.pop()
                window.append(j - 1)
                while window[0] < starts[j]:
                    window.popleft()
                if cost[window[0]] < never:
                    following[j], origin[j] = cost[window[0]] + price[j], window[0]
            cost = following
            origins.append(origin)
        chosen, j = [], count - 1
        for origin in reversed(origins):
            j = origin[j]
            if j > 0:
                chosen.append(self.places[j - 1])
        assert j == 0 and len(chosen) == segments - 1, "the limit admits a partition, so the search finds one"
        return chosen[::-1]


class _Window:
    """Bytes of a segment that grows at its end and shrinks at its start: the same sum as `Segment.nbytes`, kept up to date."""

    def __init__(self, graph: Graph, start: int = 0, stop: int = 0):
        self.graph, self.start, self.stop, self.nbytes = graph, start, start, 0
        self.reads: Counter[int] = Counter()
        self.extend(stop)

    def extend(self, stop: int) -> None:
        for node in self.graph.nodes[self.stop : stop]:
            for ref in node.operands:
                self.reads[ref] += 1
                if self.reads[ref] == 1 and self.graph.producers[ref] < self.start:
                    self.nbytes += self._outside(ref)
            self.nbytes += node.nbytes
        self.stop = max(self.stop, stop)

    def shrink(self, start: int) -> None:
        for node in self.graph.nodes[self.start : start]:
            for ref in node.operands:
                self.reads[ref] -= 1
                if self.reads[ref] == 0 and self.graph.producers[ref] < self.start:
                    self.nbytes -= self._outside(ref)
            self.nbytes -= node.nbytes
            for result in node.results:
                if self.reads[result] > 0:
                    self.nbytes += self._outside(result)
            self.start += 1

    def _outside(self, ref: int) -> int:
        return 0 if self.graph.values[ref].kind == "constant" else self.graph.values[ref].nbytes


def partition_like(graph: Graph, other: Partition) -> Partition:
    """Cuts another capture of the same model (evaluation, prediction) so that its segments use the same parameters and buffers.

    Operations differ between modes, so cuts are mapped by what is used before and after them. Where several
    places separate the same, the one that carries the fewest bytes is taken.
    """
    places = [p for p in find_places(graph) if p.legal]
    uses, wanted = _find_uses(graph), _find_uses(other.graph)
    chosen: list[Place] = []
    for cut in other.cuts:
        before = {name for name, (first, _) in wanted.items() if first < cut.index and name in uses}
        through = {name for name in before if wanted[name][1] >= cut.index}  # used behind it, too
        low = max((uses[name][0 if name in through else 1] for name in before), default=-1)
        high = min((first for name, (first, _) in uses.items() if name not in before), default=len(graph.nodes) - 1)
        start = max(low + 1, chosen[-1].index if chosen else 1)
        rest = [p for p in places if p.index >= start] or [
            Place(len(graph.nodes), 0, None)
        ]  # the end: nothing comes after
        window = [p for p in rest if p.index <= high] or rest[:1]
        chosen.append(min(window, key=lambda p: (p.nbytes, p.index)))
    return Partition(graph, tuple(chosen))


def find_first_uses(graph: Graph) -> dict[str, int]:
    """Of every parameter that is used, the first node that reads it."""
    return {name: first for name, (first, _) in _find_uses(graph).items() if name in graph.parameters}


def _find_uses(graph: Graph) -> dict[str, tuple[int, int]]:
    """Of every parameter and buffer that is used, the first and the last node that reads it."""
    found: dict[str, tuple[int, int]] = {}
    for i, node in enumerate(graph.nodes):
        for ref in node.operands:
            value = graph.values[ref]
            if value.kind in ("parameter", "buffer"):
                found[value.name] = (found.get(value.name, (i, i))[0], i)
    return found

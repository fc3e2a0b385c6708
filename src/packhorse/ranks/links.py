"""What one rank of a pipeline has to do with the others, segment by segment.

In: which rank runs which segment. Out: `Links`: who sends and receives what, for values and their gradients (`Traffic`), and
for parameters that several ranks use: the first segment that adds to the gradient of such a one is where it is updated; the
others' gradients come there, each added to those behind it, and what becomes of the parameter goes back to them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from packhorse.errors import RanksError
from packhorse.partition import Partition
from packhorse.ranks.traffic import Traffic


@dataclass(frozen=True)
class Tie:
    """A parameter and a rank that it, or its gradient, goes to or comes from."""

    parameter: str
    number: int  # among all parameters
    place: int


@dataclass(frozen=True)
class Links:
    """Of the rank at `place`. `updated` are the parameters that the optimizer has."""

    partition: Partition
    owners: tuple[int, ...]
    place: int
    updated: frozenset[str]

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(self.partition, self.owners)

    def moved_to(self, place: int) -> "Links":
        """Those of another rank of the same pipeline."""
        moved = replace(self, place=place)
        moved.__dict__["traffic"] = self.traffic  # found once for all
        return moved

    def traffic_of(self, partition: Partition) -> Traffic:
        """For another graph of the same model, cut at the same places."""
        return self.traffic if partition is self.partition else Traffic(partition, self._owners_in(partition))

    def _owners_in(self, partition: Partition) -> tuple[int, ...]:
        """Where evaluation has other segments, or uses more in one, those run where their parameters and buffers are; others
        go with the one before."""
        holders: dict[str, set[int]] = defaultdict(set)
        for segment in self.partition.segments:
            for name in (*segment.parameters, *segment.buffers):
                holders[name].add(self.owners[segment.index])
        is_alike = len(partition.segments) == len(self.owners)
        owners: list[int] = []
        for segment in partition.segments:
            usual = self.owners[segment.index] if is_alike else owners[-1] if owners else 0
            held = [holders[name] for name in (*segment.parameters, *segment.buffers) if holders[name]]
            able = set.intersection(*held) if held else {usual}
            if not able:
                raise RanksError(
                    f"segment {segment.index} of {partition.graph.name} in evaluation uses parameters or buffers of several "
                    "ranks; use ranks that see other samples only"
                )
            owners.append(usual if usual in able else min(able))
        return tuple(owners)

    @cached_property
    def local(self) -> frozenset[int]:
        return frozenset(s for s, owner in enumerate(self.owners) if owner == self.place)

    def owner_of(self, name: str) -> int:
        """The rank, of the first replica, that has a parameter or buffer: of several the one that updates it."""
        users = [s for s in self.partition.segments if name in s.parameters or name in s.buffers]
        adding = [s for s in users if s.is_differentiable] or users
        return self.owners[adding[0].index] if adding else 0

    @property
    def stages(self) -> list[list[int]]:
        """All of the pipeline, in order: neighbours on one rank are one."""
        found: list[list[int]] = []
        for s, owner in enumerate(self.owners):
            if found and self.owners[found[-1][0]] == owner:
                found[-1].append(s)
            else:
                found.append([s])
        return found

    # -- parameters that several ranks use

    @cached_property
    def _ties(self) -> list[tuple[str, int, list[int], set[int]]]:
        """(name, number, segments that add to its gradient, places that use it)."""
        found = []
        for number, name in enumerate(self.partition.graph.parameters):
            users = [s for s in self.partition.segments if name in s.parameters]
            places = {self.owners[s.index] for s in users}
            adding = [s.index for s in users if s.is_differentiable]
            if len(places) > 1 and name in self.updated and adding:
                found.append((name, number, adding, places))
        return found

    @cached_property
    def passes(self) -> dict[int, list[Tie]]:
        """Segment -> gradients that it adds to and hands on to another rank."""
        hops = [(n, i, a, b) for n, i, adding, _ in self._ties for a, b in pairwise(adding)]
        return self._collect((b, Tie(n, i, self.owners[a])) for n, i, a, b in hops if self._is_leaving(b, a))

    @cached_property
    def takes(self) -> dict[int, list[Tie]]:
        """Segment -> gradients that another rank hands on to it."""
        hops = [(n, i, a, b) for n, i, adding, _ in self._ties for a, b in pairwise(adding)]
        return self._collect((a, Tie(n, i, self.owners[b])) for n, i, a, b in hops if self._is_leaving(a, b))

    @cached_property
    def waits(self) -> frozenset[int]:
        """Segments whose gradients of such parameters wait here for an earlier segment's."""
        hops = [(a, b) for _, _, adding, _ in self._ties for a, b in pairwise(adding)]
        return frozenset(b for a, b in hops if self.owners[a] == self.owners[b] == self.place)

    @cached_property
    def tells(self) -> dict[int, list[Tie]]:
        """Segment -> ranks that have to know the parameters updated after it."""
        return self._collect(
            (adding[0], Tie(name, number, place))
            for name, number, adding, places in self._ties
            if self.owners[adding[0]] == self.place
            for place in sorted(places - {self.place})
        )

    @cached_property
    def hears(self) -> dict[int, list[Tie]]:
        """Segment, the first here that uses them -> parameters that another rank updates."""
        found = []
        for name, number, adding, places in self._ties:
            home = self.owners[adding[0]]
            if home != self.place and self.place in places:
                first = min(s.index for s in self.partition.segments if name in s.parameters and s.index in self.local)
                found.append((first, Tie(name, number, home)))
        return self._collect(found)

    def _is_leaving(self, here: int, there: int) -> bool:
        return self.owners[here] == self.place != self.owners[there]

    def _collect(self, found: Iterable[tuple[int, Tie]]) -> dict[int, list[Tie]]:
        collected: dict[int, list[Tie]] = defaultdict(list)
        for s, tie in found:
            collected[s].append(tie)
        return dict(collected)

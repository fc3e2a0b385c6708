"""What goes between the stages of a pipeline.

In: a partition, and which rank runs which segment. Out: `Traffic`: for each segment the values it sends and receives, forward,
and the gradients of them, backward. A value goes once from the rank that makes it to each that reads it. Its gradient goes
back along those that read it, from the last to the first, each adding its own: in the order in which autograd adds them in one
process, so that the sum is the same to the last bit.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from packhorse.errors import RanksError
from packhorse.graph import Size
from packhorse.partition import Partition
from packhorse.ranks.parcel import Parcel


@dataclass(frozen=True)
class Message:
    """Values, or gradients of them, that go together from one segment to another on another rank, for each microbatch."""

    names: tuple[str, ...]
    sender: int  # segments
    receiver: int
    backward: bool = False


@dataclass(frozen=True)
class Traffic:
    """`owners` are the places in the pipeline that run each segment of the partition."""

    partition: Partition
    owners: tuple[int, ...]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All of them, in an order that every rank finds."""
        values: dict[tuple[int, int], list[str]] = {}
        gradients: dict[tuple[int, int], list[str]] = {}
        made_by = {name: s.index for s in self.partition.segments for name in s.outputs}
        for name, maker in made_by.items():
            users = [s for s in self.partition.segments if name in s.inputs and s.index != maker]
            seen = {self.owners[maker]}
            for user in users:
                if self.owners[user.index] not in seen:
                    seen.add(self.owners[user.index])
                    values.setdefault((maker, user.index), []).append(name)
            holders = [maker, *(u.index for u in users if name in u.differentiable_inputs)]
            for before, behind in pairwise(holders):
                if self.owners[before] != self.owners[behind]:
                    gradients.setdefault((behind, before), []).append(name)
        self._refuse_unknown_sizes({name for names in values.values() for name in names})
        found = [Message(tuple(names), *way) for way, names in sorted(values.items())]
        found += [Message(tuple(names), *way, backward=True) for way, names in sorted(gradients.items(), reverse=True)]
        return tuple(found)

    def parcel(self, number: int, rows: int) -> Parcel:
        """What a message looks like for a microbatch of so many rows."""
        if (number, rows) not in self._parcels:
            names = self.messages[number].names
            types = {value.name: value.type for value in self.partition.graph.values if value.name in names}
            shapes = [
                tuple(int(n.at(rows)) if isinstance(n, Size) else int(n or 0) for n in types[name].shape)
                for name in names
            ]
            dtypes = [types[name].dtype or torch.int64 for name in names]  # those without one are refused
            self._parcels[number, rows] = Parcel(names, tuple(shapes), tuple(dtypes))
        return self._parcels[number, rows]

    @cached_property
    def _parcels(self) -> dict[tuple[int, int], Parcel]:
        return {}

    def sent_by(self, s: int, *, backward: bool) -> list[int]:
        """Numbers of the messages that leave after a segment has run."""
        return [i for i, m in enumerate(self.messages) if m.sender == s and m.backward == backward]

    def received_by(self, s: int, *, backward: bool) -> list[int]:
        return [i for i, m in enumerate(self.messages) if m.receiver == s and m.backward == backward]

    def receivers(self) -> tuple[frozenset[int], frozenset[int]]:
        """The segments that wait for messages, forward and backward."""
        return self._ends("receiver")

    def senders(self) -> tuple[frozenset[int], frozenset[int]]:
        return self._ends("sender")

    def _ends(self, end: str) -> tuple[frozenset[int], frozenset[int]]:
        found = [frozenset(getattr(m, end) for m in self.messages if m.backward == back) for back in (False, True)]
        return found[0], found[1]

    def segments_of(self, place: int) -> list[int]:
        return [s for s, owner in enumerate(self.owners) if owner == place]

    def _refuse_unknown_sizes(self, names: set[str]) -> None:
        for value in self.partition.graph.values:
            if value.name in names and (value.type.dtype is None or any(n is None for n in value.type.shape)):
                raise RanksError(
                    f"{value.name}, whose size depends on the data, would go from one stage to another; cut elsewhere, or use "
                    "ranks that see other samples only"
                )

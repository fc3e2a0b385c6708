"""Which segment runs, and what becomes of memory that lies idle when another takes over.

What a segment leaves there is of use to a twin, and to no other.
"""

from collections.abc import Callable

from packhorse.memory import IDLE, Heap, Pool, never
from packhorse.partition import Segment


class Running:
    """`find_need` says what a segment takes at most while it runs, with or without a graph; None: not known."""

    def __init__(self, heap: Heap, find_need: Callable[[Segment, bool], int | None], pool: Pool | None = None):
        self.heap, self._find_need, self.pool = heap, find_need, pool
        self.segment: Segment | None = None
        self._needed: int | None = None
        if pool is not None:
            pool.has_room = self.has_room

    def close(self) -> None:
        """Nothing runs any more."""
        if self.pool is not None:
            self.pool.has_room = never
        self.segment = self.pool = None

    def turn_to(self, segment: Segment, share: float, building: bool) -> None:
        """Compute goes to a segment, for `share` of the example's rows, `building` a graph or not."""
        before, self.segment = self.segment, segment
        if before is segment:
            return
        self._needed, is_twin = self._find_need(segment, building), are_twins(before, segment)
        if self.pool is not None and not self.has_room():
            self.pool.shrink(IDLE if is_twin else 0)  # a twin takes buffers of the same sizes
        reusable = segment.parameter_nbytes + int(2 * share * segment.made_nbytes) if is_twin else 0
        self.heap.tidy(reusable, needed=self._needed)

    def has_room(self) -> bool:
        """For all that the segment takes that runs, as if it had nothing yet."""
        return self._needed is not None and self.heap.has_room(self._needed)

    def tidy_after(self, owner: Segment | None) -> None:
        """What worked for a segment beside compute is done: who would use again what it leaves?"""
        if not are_twins(owner, self.segment):
            self.heap.tidy(needed=self._needed, computing=True)


def are_twins(a: Segment | None, b: Segment | None) -> bool:
    return a is not None and b is not None and a.code is b.code

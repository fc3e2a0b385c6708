"""Which segment runs, and what becomes of the heap when another takes over.

What a segment leaves there is of use to a twin, and to no other.
"""

from packhorse.memory import Heap
from packhorse.partition import Segment


class Running:
    def __init__(self, heap: Heap):
        self.heap = heap
        self.segment: Segment | None = None

    def turn_to(self, segment: Segment, share: float) -> None:
        """Compute goes to a segment, for `share` of the example's rows."""
        before, self.segment = self.segment, segment
        if not are_twins(before, segment):
            self.heap.tidy()
        elif before is not segment:
            self.heap.tidy(segment.parameter_nbytes + int(2 * share * sum(node.nbytes for node in segment.nodes)))

    def tidy_after(self, owner: Segment | None) -> None:
        """What worked for a segment beside compute is done: who would use again what it leaves?"""
        if not are_twins(owner, self.segment):
            self.heap.tidy(computing=True)


def are_twins(a: Segment | None, b: Segment | None) -> bool:
    return a is not None and b is not None and a.code is b.code

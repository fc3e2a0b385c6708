"""Updates in a walk: one thread takes them, the first segment first, beside compute.

In: blocks with their gradients. Out: when each is written, and what waiting for that takes: bytes, and the time of others.
"""

import heapq
from collections import deque
from collections.abc import Iterable

from packhorse.case import Case
from packhorse.estimate.lanes import Lanes
from packhorse.estimate.tally import Tally
from packhorse.store import GRADIENT, Block
from packhorse.store.blocks import UNIT
from packhorse.store.disk import THREADS

CROWDED = 1.5  # times as long as if nothing else used the disk and the cores


class Updates:
    """As many may wait, or be under way, as `ahead` says."""

    def __init__(self, case: Case, lanes: Lanes, tally: Tally, ahead: int):
        self.case, self.lanes, self.tally, self.ahead = case, lanes, tally, ahead
        self.is_away = case.on_disk or case.is_slowed  # the model, behind a link
        self.pending: dict[str, float] = {}  # block -> when its update is written
        self._jobs: list[tuple[int, int, str, Block, int, float]] = []  # that wait, a heap
        self._under_way: list[float] = []  # when those are written
        self._free = 0.0  # when the thread is
        self._parked: dict[str, int] = {}  # block -> bytes of its gradient that wait
        # When the last ones could begin, and are done, and bytes of their gradients.
        self._lagging: deque[tuple[float, float, int]] = deque(maxlen=ahead if case.ranks.size == 1 else 1)

    def when(self, block: Block) -> float:
        """When a block can be read as its last update leaves it, which is begun if it waits."""
        while any(job[2] == block.name for job in self._jobs):
            self._step()
        return max(self.lanes.now, self.pending.get(block.name, 0.0))

    def add(self, s: int, block: Block, own: int, start: float) -> None:
        """An update after segment `s`, whose gradient of so many bytes is there then."""
        order = -s if self.case.rolls and self.case.update == "eager" else s
        heapq.heappush(self._jobs, (order, len(self.pending), block.name, block, own, start))
        self.advance()
        self._make_room()

    def park(self, block: Block, nbytes: int, done: float) -> None:
        """A gradient waits, for those of other segments or for the end of the step."""
        if GRADIENT in block.kinds:
            done = self.lanes.move("write", done, block.nbytes(GRADIENT))
            self.tally.later(done, "host", "gradients", nbytes)
        else:
            self.tally.later(done, "host", "gradients", self._parked.get(block.name, 0))  # both take one place
            self._parked[block.name] = nbytes
        self.pending[block.name] = max(done, self.pending.get(block.name, 0.0))
        self._make_room([done])

    def advance(self) -> None:
        """Those that have begun by now."""
        while self._jobs and self._free <= self.lanes.now:
            self._step()

    def end(self) -> None:
        """Waits for all."""
        while self._jobs:
            self._step()
        self.lanes.now = max([self.lanes.now + self.lanes.debt, *self.pending.values()])
        self.lanes.debt = 0.0

    def lagging_bytes(self) -> int:
        """Gradients that should be gone by now, but are not if updates take longer, as they do where it is crowded."""
        if not self.case.on_disk:
            return 0
        now = self.lanes.now
        return sum(n for start, done, n in self._lagging if done <= now < start + CROWDED * (done - start))

    def catch_up(self) -> None:
        """Compute goes forward again: nothing lags behind."""
        self._lagging.clear()

    def _step(self) -> None:
        """The thread takes its next job."""
        lanes, tally = self.lanes, self.tally
        _, _, name, block, own, given = heapq.heappop(self._jobs)
        start = max(given, self._free)
        seconds = self.case.price_update(block, lanes.machine)
        waiting = block.nbytes(GRADIENT) if GRADIENT in block.kinds else 0
        read, is_next = start, block.users[:1] == (0,)  # the first segment's, which the next step begins with
        if self.is_away:
            read = lanes.move("read", start, block.state_nbytes + waiting, urgent=is_next)
        if lanes.on_cpu:  # beside compute, from which it takes its time
            lanes.debt += seconds
            lanes.busy["update"] += seconds
            stepped = max(start + 2 * seconds, read)
        else:
            stepped = lanes.work("update", read, seconds)
        done = self._free = stepped
        if self.is_away:
            done = lanes.move("write", stepped, block.all_nbytes - waiting)
        tally.later(
            done, "host", "gradients", own + self._parked.pop(name, 0)
        )  # crowded, steps end hardly before writes
        self._lagging.append((given, done, own))
        if self.case.on_disk:
            pieces = block.all_nbytes
            if not block.whole:
                pieces = min(THREADS * pieces * UNIT // block.numel, pieces)
            tally.add("host", "update", pieces)
            tally.later(done, "host", "update", pieces)
        self.pending[name] = done
        self._under_way.append(done)

    def _make_room(self, parked: Iterable[float] = ()) -> None:
        """Waits until no more than planned are waiting or under way."""
        self._under_way = [*(moment for moment in self._under_way if moment > self.lanes.now), *parked]
        while len(self._under_way) + len(self._jobs) > self.ahead:
            if self._under_way:
                self.lanes.wait(min(self._under_way))
                self._under_way.remove(min(self._under_way))
                self.advance()
            else:
                self._step()

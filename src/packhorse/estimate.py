"""The estimate: walks the very list that will run, on a machine, without running it.

In: a `Case` (partition, layout, precision, where the model lives), a plan's choices, a list of actions, a `Machine`. Out:
`Estimate`: seconds a step, bytes of each tier by kind at the peak, bytes over each link, and what a step waits for most.
Lanes are clocks: each knows when it is free; an action starts jobs on lanes and waits for others, as the executor does.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from packhorse.layout import Layout
from packhorse.machine import Machine
from packhorse.memory import IDLE, LEEWAY, Tier
from packhorse.partition import Footprint, Partition, Segment, find_footprint
from packhorse.precision import Cast, Precision
from packhorse.price import price_node, price_update
from packhorse.schedule import Action
from packhorse.store import GRADIENT, MASTER, Block
from packhorse.store.blocks import UNIT
from packhorse.update import AHEAD


@dataclass(frozen=True)
class Case:
    """What is to be trained, whatever the plan."""

    partition: Partition
    layout: Layout
    batch_rows: int
    precision: Precision
    update: str
    on_disk: bool
    base_bytes: int  # of the process before training
    versions: int = 1  # of each block on disk
    casts: tuple[Cast, ...] = ()

    @cached_property
    def weights(self) -> dict[int, int]:
        """Bytes a segment's FETCH brings, in working precision."""
        return {s.index: self.fetch_bytes(s) for s in self.partition.segments}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Of those, what takes host memory beside the store's own: all from disk, from RAM what is cast."""
        return {
            s.index: sum(b.working_nbytes for b in self.blocks_of(s.index) if self.on_disk or b.is_cast)
            for s in self.partition.segments
        }

    def fetch_bytes(self, segment: Segment) -> int:
        return sum(block.working_nbytes for block in self.layout.blocks_of(segment))

    def blocks_of(self, s: int) -> list[Block]:
        return self._blocks[s]

    @cached_property
    def _blocks(self) -> list[list[Block]]:
        return [self.layout.blocks_of(s) for s in self.partition.segments]

    @cached_property
    def homes(self) -> dict[int, list[Block]]:
        """Segment -> the blocks that are updated after its backward."""
        homes: dict[int, list[Block]] = defaultdict(list)
        for block in self.layout.blocks:
            home = self.layout.home(block)
            if home is not None:
                homes[home].append(block)
        return homes

    @cached_property
    def backward(self) -> frozenset[int]:
        return frozenset(s.index for s in self.partition.segments if s.is_differentiable)

    @cached_property
    def parks(self) -> frozenset[int]:
        """Segments that use an updated block which an earlier one uses too."""
        layout = self.layout
        return frozenset(s for b in layout.blocks if layout.home(b) is not None for s in layout.users[b.name][1:])

    @cached_property
    def _footprints(self) -> dict[tuple[int, int], Footprint]:
        return {}

    def footprint(self, s: int, rows: int) -> Footprint:
        """Twins are worked out once."""
        segment = self.partition.segments[s]
        key = (id(segment.code), rows)
        if key not in self._footprints:
            self._footprints[key] = find_footprint(segment, rows)
        return self._footprints[key]

    @cached_property
    def _prices(self) -> dict[tuple[int, str], tuple[float, float]]:
        return {}

    def seconds(self, s: int, rows: int, machine: Machine) -> tuple[float, float]:
        """Forward and backward of a segment."""
        segment = self.partition.segments[s]
        key = (id(segment.code), machine.name)
        if key not in self._prices:
            prices = [price_node(segment.graph, node, machine) for node in segment.nodes]
            self._prices[key] = (sum(p.forward for p in prices), sum(p.backward for p in prices))
        forward, backward = self._prices[key]
        share = rows / segment.graph.batch.rows
        return forward * share, backward * share

    def gradient_bytes(self, s: int) -> int:
        """What the sums of a segment's gradients take."""
        blocks = [b for b in self.blocks_of(s) if self.layout.home(b) is not None]
        return sum(b.numel * b.kinds[MASTER].itemsize for b in blocks)

    def boundary_bytes(self, s: int, rows: int) -> int:
        segment = self.partition.segments[s]
        return segment.output_nbytes * rows // segment.graph.batch.rows


@dataclass(frozen=True)
class Estimate:
    """What a step will take. `peak` is by tier; on a machine without accelerator `host` is the whole process."""

    seconds: float = 0.0
    peak: dict[Tier, int] = field(default_factory=dict)
    kinds: dict[Tier, dict[str, int]] = field(default_factory=dict)  # what the peak is made of
    moved: dict[str, int] = field(default_factory=dict)  # bytes a step over each link
    busy: dict[str, float] = field(default_factory=dict)  # seconds each lane works
    bottleneck: str = ""


def estimate(
    case: Case,
    actions: Sequence[Action],
    machine: Machine,
    *,
    rows: int,
    resident: bool,
    kept: frozenset[int],
    stash_bytes: int,
) -> Estimate:
    return _Walk(case, machine, rows, resident, kept, stash_bytes).run(actions)


@dataclass
class _Walk:
    case: Case
    machine: Machine
    rows: int
    resident: bool
    kept: frozenset[int]
    stash_limit: int
    now: float = 0.0  # of the thread that computes
    free: Counter[str] = field(default_factory=Counter)  # lane -> when it is free
    busy: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    live: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    totals: Counter[Tier] = field(default_factory=Counter)
    peak: dict[Tier, int] = field(default_factory=dict)
    at_peak: dict[Tier, dict[str, int]] = field(default_factory=dict)
    releases: list[tuple[float, Tier, str, int]] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)  # segment -> when its parameters are there
    restored: dict[tuple[str, int, int], float] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)  # block -> when its update is written
    in_flight: deque[float] = field(default_factory=deque)
    sums: dict[int, int] = field(default_factory=dict)
    stash_in_memory: int = 0
    parked: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_cpu = self.machine.device == "cpu"
        self.device: Tier = "host" if self.on_cpu else "device"

    def run(self, actions: Sequence[Action]) -> Estimate:
        case = self.case
        self._add("host", "base", case.base_bytes)
        self._add("host", "slack", LEEWAY if self.on_cpu else 0)
        if case.on_disk:
            stored = sum(
                b.nbytes(k) * (1 if k == GRADIENT else case.versions) for b in case.layout.blocks for k in b.kinds
            )
            self._add("disk", "store", stored)
            largest = max((b.numel for b in case.layout.blocks if case.layout.home(b) is not None), default=0)
            kinds = max((len(b.kinds) for b in case.layout.blocks), default=0)
            self._add("host", "update", 4 * kinds * min(UNIT, largest) * 3 * AHEAD)
            self._add("host", "idle buffers", min(IDLE, 2 * max(case.copies.values(), default=0)))
        else:
            self._add("host", "store", sum(block.all_nbytes for block in case.layout.blocks))
        for action in actions:
            getattr(self, f"_{action.kind.lower()}")(action.segment, action.microbatch)
            self._release()
        self.now = max([self.now, *self.pending.values()])
        return self._finish()

    def _finish(self) -> Estimate:
        waiting = max(self.busy, key=lambda lane: self.busy[lane]) if self.busy else "compute"
        return Estimate(self.now, dict(self.peak), dict(self.at_peak), dict(self.moved), dict(self.busy), waiting)

    # -- memory

    def _add(self, tier: Tier, kind: str, nbytes: int) -> None:
        self.live[tier, kind] += nbytes
        self.totals[tier] += nbytes
        self._note(tier)

    def _note(self, tier: Tier, working: int = 0) -> None:
        """Takes note of a peak, with so many bytes in use for a moment."""
        if self.totals[tier] + working > self.peak.get(tier, 0):
            self.peak[tier] = self.totals[tier] + working
            found = {kind: n for (where, kind), n in self.live.items() if where == tier and n}
            self.at_peak[tier] = found | ({"activations": found.get("activations", 0) + working} if working else {})

    def _later(self, moment: float, tier: Tier, kind: str, nbytes: int) -> None:
        heapq.heappush(self.releases, (moment, tier, kind, nbytes))

    def _release(self) -> None:
        while self.releases and self.releases[0][0] <= self.now:
            _, tier, kind, nbytes = heapq.heappop(self.releases)
            self._add(tier, kind, -nbytes)

    # -- time

    def _work(self, lane: str, start: float, seconds: float) -> float:
        """A job on a lane: when it is done."""
        begins = max(start, self.free[lane])
        self.free[lane] = begins + seconds
        self.busy[lane] += seconds
        return self.free[lane]

    def _move(self, link: str, start: float, nbytes: int) -> float:
        """Bytes over a link. Reads and writes share the disk."""
        if not nbytes:
            return start
        self.moved[link] += nbytes
        lane = {"read": "disk", "write": "disk", "up": "host to device", "down": "device to host"}[link]
        rate = self.machine.bandwidth["link" if link in ("up", "down") else link]
        return self._work(lane, start, nbytes / rate)

    def _bring(self, start: float, nbytes: int) -> float:
        return start if self.on_cpu else self._move("up", start, nbytes)

    def _take_home(self, start: float, nbytes: int) -> float:
        return start if self.on_cpu else self._move("down", start, nbytes)

    # -- actions

    def _fetch(self, s: int, _: None) -> None:
        ready = self.now
        for block in self.case.blocks_of(s):
            start = max(self.now, self.pending.get(block.name, 0.0))
            if self.case.on_disk:
                start = self._move("read", start, block.nbytes(MASTER))
            ready = max(ready, self._bring(start, block.working_nbytes))
        self.ready[s] = ready
        self._add("host", "weights", self.case.copies[s])
        if not self.on_cpu:
            self._add("device", "weights", self.case.weights[s])

    def _evict(self, s: int, _: None) -> None:
        self._add("host", "weights", -self.case.copies[s])
        if not self.on_cpu:
            self._add("device", "weights", -self.case.weights[s])

    def _compute(self, s: int, k: int, seconds: float) -> None:
        waits = [self.ready[s], *(self.restored.pop((kind, s, k), 0.0) for kind in ("value", "gradient"))]
        self.now = self._work("compute", max(self.now, *waits), seconds)

    def _f(self, s: int, k: int) -> None:
        footprint, (forward, _) = self.case.footprint(s, self.rows), self.case.seconds(s, self.rows, self.machine)
        self._compute(s, k, forward)
        if self._keeps(s):
            self._note(self.device, footprint.building)
            self._add(self.device, "graphs", footprint.graph)
        else:
            self._note(self.device, footprint.forward)

    def _keeps(self, s: int) -> bool:
        last = len(self.case.partition.segments) - 1
        return s in self.case.backward and (self.resident or s in self.kept or s == last)

    def _r(self, s: int, k: int) -> None:
        footprint, (forward, _) = self.case.footprint(s, self.rows), self.case.seconds(s, self.rows, self.machine)
        self._compute(s, k, forward)
        self._note(self.device, footprint.building)
        self._add(self.device, "graphs", footprint.graph)

    def _b(self, s: int, k: int) -> None:
        footprint, (_, backward) = self.case.footprint(s, self.rows), self.case.seconds(s, self.rows, self.machine)
        self._compute(s, k, backward)
        self._add(self.device, "graphs", -footprint.graph)
        self._note(self.device, footprint.backward)
        if s not in self.sums:
            self.sums[s] = self.case.gradient_bytes(s)
            self._add(self.device, "gradients", self.sums[s])

    def _stash(self, s: int, k: int) -> None:
        self._put("value", s, k, self.case.boundary_bytes(s, self.rows))

    def _stashg(self, s: int, k: int) -> None:
        self._put("gradient", s - 1, k, self.case.boundary_bytes(s - 1, self.rows))

    def _put(self, what: str, s: int, k: int, nbytes: int) -> None:
        moment = self._take_home(self.now, nbytes)
        if not self.case.on_disk or self.stash_in_memory + nbytes <= self.stash_limit:
            self.stash_in_memory += nbytes
            self._add("host", "stash", nbytes)
            return
        self._add("host", "stash", nbytes)  # until it is written
        self._later(self._move("write", moment, nbytes), "host", "stash", nbytes)
        self._add("disk", "stash", nbytes)

    def _restore(self, s: int, k: int) -> None:
        self._get("value", s, k, self.case.boundary_bytes(s - 1, self.rows) if s else 0)

    def _restoreg(self, s: int, k: int) -> None:
        self._get("gradient", s, k, self.case.boundary_bytes(s, self.rows))

    def _get(self, what: str, s: int, k: int, nbytes: int) -> None:
        """What was stashed first was kept in memory; how much of it is there tells where the rest is."""
        start = self.now
        if self.live["disk", "stash"] > 0 and self.stash_in_memory < self.stash_limit:
            start = self._move("read", start, nbytes)
        self.restored[what, s, k] = self._bring(start, nbytes)

    def _park(self, s: int, _: None) -> None:
        for block in self.case.blocks_of(s):
            home = self.case.layout.home(block)
            if home is None or (home == s and self.case.update != "deferred"):
                continue
            nbytes = block.numel * block.kinds[MASTER].itemsize
            self.sums[s] -= nbytes
            done = self._take_home(self.now, nbytes)
            if GRADIENT in block.kinds:
                done = self._move("write", done, nbytes)
                self._later(done, self.device, "gradients", nbytes)
            else:
                self.parked[block.name] = self.parked.get(block.name, 0) + nbytes
            self._submit(block, done)

    def _norm(self, *_: None) -> None:
        self.now = max([self.now, *self.pending.values()])

    def _update(self, s: int, _: None) -> None:
        for block in self.case.homes.get(s, []):
            own = self.sums.pop(s, 0) if block is self.case.homes[s][-1] else 0
            start = self._take_home(self.now, own)
            seconds = price_update(block, self.machine)
            if self.on_cpu:  # it takes its time from what computes
                self.now = self._work("compute", self.now, seconds)
                self.busy["update"] += seconds
                stepped = self.now
            else:
                stepped = self._work("update", start, seconds)
            done = stepped
            if self.case.on_disk:
                done = max(done, self._move("read", start, block.all_nbytes))
                kept = block.nbytes(GRADIENT) if GRADIENT in block.kinds else 0
                done = max(done, self._move("write", stepped, block.all_nbytes - kept))
            self._later(stepped, self.device, "gradients", own + self.parked.pop(block.name, 0))
            self._submit(block, done)

    def _submit(self, block: Block, done: float) -> None:
        self.pending[block.name] = max(done, self.pending.get(block.name, 0.0))
        self.in_flight.append(done)
        while len(self.in_flight) > 1:
            self.now = max(self.now, self.in_flight.popleft())

    def _commit(self, *_: None) -> None:
        """The end of the walk waits for what is pending."""

"""The estimate: walks the very list that will run, on a machine, without running it.

In: a `Case`, a list of actions, a `Machine`. Out: `Estimate`: seconds a step, bytes of each tier by kind at the peak, bytes
over each link, and what a step waits for most. Lanes are clocks: each knows when it is free; an action starts jobs on lanes
and waits for others, as the executor does. The ranks of a pipeline are walked side by side, each as far as it has its mail.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.case import Case, count_uses, master_bytes, summed_bytes
from packhorse.machine import Machine
from packhorse.memory import IDLE, Tier
from packhorse.partition import Segment
from packhorse.price import Price, price_update
from packhorse.ranks.links import Links, Tie
from packhorse.running import are_twins
from packhorse.schedule import Action
from packhorse.store import GRADIENT, MASTER, WORKING, Block
from packhorse.store.blocks import UNIT
from packhorse.store.disk import THREADS

KEPT = "kept by malloc and kernels"  # a kind of host memory, on machines without accelerator
MOST_MICROBATCHES = 8  # that are walked one by one; of more, each stands for several


@dataclass(frozen=True)
class Estimate:
    """What a step will take. `peak` is by tier; on a machine without accelerator `host` is the whole process."""

    seconds: float = 0.0
    peak: dict[Tier, int] = field(default_factory=dict)
    kinds: dict[Tier, dict[str, int]] = field(default_factory=dict)  # what the peak is made of
    moved: dict[str, int] = field(default_factory=dict)  # bytes a step over each link
    busy: dict[str, float] = field(default_factory=dict)  # seconds each lane works
    bottleneck: str = ""

    def extended(self, before: "Estimate", times: float, seconds: float, seconds_before: float) -> "Estimate":
        """By so many times what it takes more than the one `before`, whose step is as long as all ranks' together."""

        def extend(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
            return {key: n + type(n)(times * (n - then.get(key, 0))) for key, n in now.items()}

        return replace(
            self,
            seconds=seconds + times * (seconds - seconds_before),
            moved=extend(self.moved, before.moved),
            busy=extend(self.busy, before.busy),
        )


@dataclass(frozen=True)
class Choices:
    """What of a plan the walk has to know beside its list."""

    rows: int  # of a microbatch
    times: float  # microbatches that each one of the list stands for
    resident: bool
    kept: frozenset[int]
    stash_bytes: int
    updates_ahead: int = 1
    overlap: bool = True  # of what ranks exchange with compute


Mail = dict[Hashable, float]  # what ranks send each other -> when it is there


def estimate(
    case: Case,
    actions: Sequence[Action],
    machine: Machine,
    choices: Choices,
    limits: Mapping[Tier, int] | None = None,
) -> Estimate:
    """With `limits` the walk ends where one is exceeded: by how much is not known then, nor how long a step takes."""
    return _Walk(case, machine, choices, limits or {}).run(actions)


def estimate_together(
    cases: Sequence[Case],
    lists: Sequence[Sequence[Action]],
    machine: Machine,
    choices: Choices,
    limits: Mapping[Tier, int] | None = None,
) -> list[Estimate]:
    """Of all ranks of one replica, which wait for each other. Where one exceeds a limit all end."""
    mail: Mail = {}
    walks = [_Walk(case, machine, choices, limits or {}, mail) for case in cases]
    under_way = {i: walk.walk(actions) for i, (walk, actions) in enumerate(zip(walks, lists, strict=True))}
    waits: dict[int, Hashable] = {}
    while under_way and not any(walk.is_over for walk in walks):
        before = dict(waits)
        for i, walk in list(under_way.items()):
            try:
                waits[i] = next(walk)
            except StopIteration:
                del under_way[i]
                waits.pop(i, None)
        assert waits != before or not waits, f"all ranks wait for each other: {waits}"
    return [walk.result for walk in walks]


def estimate_standing(case: Case, machine: Machine, choices: Choices) -> Estimate:
    """What is there before a step begins, and stays."""
    return _Walk(case, machine, choices, {}).run([])


def estimate_plain(case: Case, machine: Machine, microbatches: int = 1, *, checkpointed: bool = False) -> Estimate:
    """The ordinary loop in which all is on the device: parameters, gradients, optimizer states and every graph.

    `checkpointed`: of each segment only the input is kept, and it runs again before its backward.
    """
    rows = -(-case.batch_rows // microbatches)
    tier: Tier = "host" if machine.device == "cpu" else "device"
    segments = range(len(case.partition.segments))
    footprints = [case.footprint(s, rows) for s in segments]
    prices = [case.price(s, rows, machine, resident=True) for s in segments]
    states = sum(b.state_nbytes for b in case.layout.blocks)
    gradients = sum(master_bytes(b) for b in case.layout.blocks if case.layout.home(b) is not None)
    boundaries = sum(case.bytes_of(name, rows) for stashed, _, _ in case.crossing for name in stashed)
    graphs = boundaries if checkpointed else sum(f.graph for f in footprints)
    working = max(f.backward if checkpointed else f.backward - f.graph for f in footprints)
    kinds = {"states": states, "gradients": gradients, "graphs": graphs, "activations": working}
    kinds["weights"] = sum(b.working_nbytes for b in case.layout.blocks if b.is_cast)  # as autocast keeps them
    if tier == "host":
        kinds["base"] = case.base_bytes
    again = sum(p.forward for p in prices) if checkpointed else 0.0
    compute = microbatches * (again + sum(p.building + p.backward for p in prices))
    update = sum(price_update(b, machine, on_device=True) for blocks in case.homes.values() for b in blocks)
    busy = {"compute": compute, "update": update}
    return Estimate(compute + update, {tier: sum(kinds.values())}, {tier: kinds}, {}, busy, "compute")


@dataclass
class _Walk:
    case: Case
    machine: Machine
    choices: Choices
    limits: Mapping[Tier, int]
    mail: Mail = field(default_factory=dict)
    now: float = 0.0  # of the thread that computes
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # lane -> when it is free
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: Counter[str] = field(default_factory=Counter)
    live: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    totals: Counter[Tier] = field(default_factory=Counter)
    peak: dict[Tier, int] = field(default_factory=dict)
    at_peak: dict[Tier, dict[str, int]] = field(default_factory=dict)
    releases: list[tuple[float, Tier, str, int]] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)  # segment -> when its parameters are there
    arrivals: dict[tuple[str, int, int], float] = field(default_factory=dict)  # what was restored, and when it is there
    used: dict[tuple[int, int], list[tuple[Tier, str, int]]] = field(default_factory=dict)  # goes when compute is done
    stash: dict[tuple[str, str, int], tuple[int, bool]] = field(default_factory=dict)  # bytes, and whether on disk
    in_memory: int = 0  # of the stash
    most_used: int = 0  # of the buffers that serve again
    running: Segment | None = None
    lagging: deque[tuple[float, int]] = field(init=False)  # when updates are done, and bytes of their gradients
    pending: dict[str, float] = field(default_factory=dict)  # block -> when its update is written
    urgent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # when a lane is free for those
    jobs: list[tuple[int, int, str, Block, int, float]] = field(default_factory=list)  # updates that wait, a heap
    under_way: list[float] = field(default_factory=list)  # when updates are written
    updater_free: float = 0.0
    debt: float = 0.0  # seconds that updates took from the cores that compute
    sums: dict[int, int] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    remaining: dict[tuple[str, int], int] = field(default_factory=dict)  # uses of a value that are to come
    summed: dict[str, float] = field(default_factory=dict)  # block -> when its gradient is that of all ranks
    unsummed: dict[int, int] = field(default_factory=dict)  # segment -> pieces of its gradients that are not begun
    held: set[int] = field(default_factory=set)  # segments that will be updated when they are summed
    step: int = 0
    started: tuple[float, dict[str, int], dict[str, float]] = (0.0, {}, {})  # the last step: when, and what was done

    def __post_init__(self) -> None:
        self.on_cpu = self.machine.device == "cpu"
        self.device: Tier = "host" if self.on_cpu else "device"
        self.is_over = False
        most = self.choices.updates_ahead
        self.lagging = deque(maxlen=most if self.case.ranks.size == 1 else 1)
        self.is_away = self.case.on_disk or self.case.is_slowed  # the model, behind a link

    def run(self, actions: Sequence[Action]) -> Estimate:
        """Of a rank that waits for no other."""
        walk = self.walk(actions)
        try:
            waits_for = next(walk)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{waits_for} will never come")

    def walk(self, actions: Sequence[Action]) -> Generator[Hashable, None, Estimate]:
        """Yields what it waits for where that has not been sent yet; returns the estimate of the last step."""
        self._begin()
        forwards = Counter(s for kind, s, k in actions if kind in ("F", "R") and k == 0)
        self.uses = count_uses(forwards, self.case.crossing)  # type: ignore[arg-type]  # each has a segment
        handlers = {kind: getattr(self, f"_{kind.lower()}") for kind in {action.kind for action in actions}}
        self.recomputed = {s for kind, s, _ in actions if kind == "R"}
        self.split = {s for kind, s, _ in actions if kind == "W"}
        self.pieces = Counter(s for kind, s, _ in actions if kind == "SUM")
        has_others = self.case.ranks.size > 1
        for step in range(2 if self.is_away or has_others else 1):  # what one leaves to do, the next waits for
            self.step, self.started = step, self._snapshot()
            for kind, s, k in actions:
                if self.is_over:
                    return self.result
                self._advance()
                for key in self._awaited(kind, s, k):
                    while key not in self.mail:
                        yield key
                handlers[kind](s, k)
                self._release()
            if not self.case.on_disk and not has_others:
                self._end_updates()
        return self.result

    def _snapshot(self) -> tuple[float, dict[str, int], dict[str, float]]:
        return self.now, dict(self.moved), dict(self.busy)

    def _begin(self) -> None:
        case = self.case
        self._add("host", "base", case.base_bytes)
        if self.on_cpu:
            kept = case.kept_bytes(self.choices.rows, resident=self.choices.resident)
            self._add("host", KEPT, kept)
        if case.on_disk:
            self._add("disk", "store", case.disk_bytes)
            self._note("host", case.model_bytes, "the model as it was given")
        else:
            masters = sum(master_bytes(b) for b in case.layout.blocks)
            self._add("host", "store", masters)
            self._note("host", case.model_bytes, "the model as it was given")
            self._add("host", "store", case.state_bytes - masters)

    @property
    def result(self) -> Estimate:
        """Of the last step."""
        started, moved, busy = self.started
        moved = {link: n - moved.get(link, 0) for link, n in self.moved.items()}
        busy = {lane: seconds - busy.get(lane, 0.0) for lane, seconds in self.busy.items()}
        waiting = max(busy, key=lambda lane: busy[lane], default="compute")
        return Estimate(self.now - started, dict(self.peak), dict(self.at_peak), moved, busy, waiting)

    # -- memory

    def _add(self, tier: Tier, kind: str, nbytes: int) -> None:
        self.live[tier, kind] += nbytes
        self.totals[tier] += nbytes
        if nbytes > 0:
            self._note(tier)

    def _note(self, tier: Tier, working: int = 0, kind: str = "activations") -> None:
        """Takes note of a peak, with so many bytes in use for a moment."""
        idle = self._idle_bytes() if tier == "host" else 0
        if self.totals[tier] + working + idle > self.peak.get(tier, 0):
            self.peak[tier] = self.totals[tier] + working + idle
            self.is_over = self.is_over or self.peak[tier] > self.limits.get(tier, self.peak[tier])
            found = {name: n for (where, name), n in self.live.items() if where == tier and n}
            self.at_peak[tier] = found | {k: n for k, n in ((kind, working), ("idle buffers", idle)) if n}

    def _idle_bytes(self) -> int:
        """Of the buffers that serve again: what is not in use, but was for segments like this, up to what may wait."""
        used = sum(self.live["host", kind] for kind in ("weights", "update", "stash")) if self.case.on_disk else 0
        self.most_used = max(self.most_used, used)
        return min(IDLE, self.most_used - used)

    def _later(self, moment: float, tier: Tier, kind: str, nbytes: int) -> None:
        heapq.heappush(self.releases, (moment, tier, kind, nbytes))

    def _release(self) -> None:
        while self.releases and self.releases[0][0] <= self.now:
            _, tier, kind, nbytes = heapq.heappop(self.releases)
            self._add(tier, kind, -nbytes)

    # -- time

    def _work(self, lane: str, start: float, seconds: float, *, urgent: bool = False) -> float:
        """A job on a lane: when it is done. The urgent pass those that wait."""
        self.busy[lane] += seconds
        if urgent:
            self.urgent[lane] = max(start, self.urgent[lane]) + seconds
            self.free[lane] = max(self.free[lane] + seconds, self.urgent[lane])
            return self.urgent[lane]
        self.free[lane] = max(start, self.free[lane]) + seconds
        return self.free[lane]

    def _move(self, link: str, start: float, nbytes: int, *, urgent: bool = False) -> float:
        """Bytes over a link. Reads and writes share the disk."""
        if not nbytes:
            return start
        self.moved[link] += nbytes
        if link in ("read", "write"):
            self.debt += nbytes / self.machine.kernels.get("beside disk", math.inf)
        lane = {"read": "disk", "write": "disk", "up": "host to device", "down": "device to host"}.get(link, link)
        rate = self.machine.bandwidth["link" if link in ("up", "down") else link]
        return self._work(lane, start, nbytes / rate, urgent=urgent)

    def _bring(self, start: float, nbytes: int) -> float:
        return start if self.on_cpu else self._move("up", start, nbytes)

    def _take_home(self, start: float, nbytes: int) -> float:
        return start if self.on_cpu else self._move("down", start, nbytes)

    def _open_mail(self, kind: str, s: int, k: int) -> None:
        arrived = [self.mail[key] for key in self._awaited(kind, s, k)]
        if arrived:
            self.arrivals["mail", s, k] = max(arrived)

    def _compute(self, s: int, k: int, seconds: float) -> None:
        segment = self.case.partition.segments[s]
        if not are_twins(self.running, segment):
            self.most_used = 0  # where there is no room for what comes, idle buffers go
        self.running = segment
        arrived = max(self.arrivals.pop((kind, s, k), 0.0) for kind in ("value", "gradient", "mail"))
        start = max(self.now, self.ready[s], arrived)
        self.now = self._work("compute", start + self.debt, seconds * self.choices.times)
        self.debt = 0.0

    # -- parameters

    def _fetch(self, s: int, _: None) -> None:
        ready = self.now
        for block in self.case.blocks[s]:
            self._end_update_of(block)
            start = max(self.now, self.pending.get(block.name, 0.0))
            if self.is_away:
                start = self._move(
                    "read", start, block.nbytes(WORKING if WORKING in block.kinds else MASTER), urgent=True
                )
            elif block.is_cast:  # by the thread that asks
                seconds = (block.nbytes(MASTER) + block.working_nbytes) / self.machine.bandwidth["host"]
                start = self._work("compute" if self.on_cpu else "cast", start, seconds)
                self.now = start if self.on_cpu else self.now
            if self.case.layout.shards:
                start = self._exchange(start, self._share_of_others(block.working_nbytes))
            ready = max(ready, self._bring(start, block.working_nbytes))
        self.ready[s] = ready
        self._add("host", "weights", self.case.copies[s])
        if not self.on_cpu:
            self._add("device", "weights", self.case.weights[s])

    def _evict(self, s: int, _: None) -> None:
        self._add("host", "weights", -self.case.copies[s])
        if not self.on_cpu:
            self._add("device", "weights", -self.case.weights[s])

    # -- compute

    def _f(self, s: int, k: int) -> None:
        footprint = self.case.footprint(s, self.choices.rows)
        price, keeps = self._price(s), self._keeps(s)
        self._open_mail("F", s, k)
        self.lagging.clear()
        self._compute(s, k, price.building if keeps else price.forward)
        if keeps:
            self._note(self.device, footprint.building)
            self._add(self.device, "graphs", self._graph_bytes(s))
        else:
            self._note(self.device, footprint.forward)
            self._let_go(s, k)

    def _price(self, s: int) -> Price:
        return self.case.price(s, self.choices.rows, self.machine, resident=self.choices.resident)

    def _keeps(self, s: int) -> bool:
        return s in self.case.layout.differentiable and s not in self.recomputed

    def _graph_bytes(self, s: int) -> int:
        """Of the graphs alive at a time that a microbatch of the list stands for: where kept, those of all."""
        times = self.choices.times if s in self.choices.kept else 1.0
        return int(self.case.footprint(s, self.choices.rows).graph * times)

    def _r(self, s: int, k: int) -> None:
        self._compute(s, k, self._price(s).rebuilding)
        self._note(self.device, self.case.footprint(s, self.choices.rows).building)
        self._add(self.device, "graphs", self._graph_bytes(s))

    def _b(self, s: int, k: int) -> None:
        self._open_mail("B", s, k)
        if s not in self.split:
            self._differentiate(s, k, 1.0)
            return
        self._compute(s, k, self._price(s).backward / 2)
        self._note(self.device, self.case.footprint(s, self.choices.rows).backward)

    def _w(self, s: int, k: int) -> None:
        self._differentiate(s, k, 0.5)

    def _differentiate(self, s: int, k: int, share: float) -> None:
        """Backward, or what of it is left, to the end of the graph."""
        case, times = self.case, self.choices.times
        rebuilt = not self._keeps(s)
        summed, lagging = case.gradient_bytes(s, rebuilt=rebuilt), self._lagging_bytes()
        adding = 3 * summed / self.machine.rate("elementwise")
        adds = times if s in self.sums else times - 1  # the first gradient becomes the sum
        self._compute(s, k, share * self._price(s).backward + adding * adds / times)
        footprint = case.footprint(s, self.choices.rows)
        backward = footprint.rebuilt if rebuilt else footprint.backward
        self._add(self.device, "graphs", -self._graph_bytes(s))
        if s not in self.sums and times > 1:
            self._note(self.device, backward + summed + lagging)
        else:
            self._note(self.device, backward + lagging)
        if s not in self.sums:
            self.sums[s] = summed
            self._add(self.device, "gradients", summed)
        self._let_go(s, k)

    def _lagging_bytes(self) -> int:
        """Gradients of the last updates, as many as may wait, if they should be gone by now: crowded, they still wait."""
        return sum(nbytes for done, nbytes in self.lagging if done <= self.now) if self.case.on_disk else 0

    def _let_go(self, s: int, k: int) -> None:
        """What a segment read, once it is not needed again."""
        for tier, kind, nbytes in self.used.pop((s, k), ()):
            self._add(tier, kind, -nbytes)

    # -- the stash

    def _stash(self, s: int, k: int) -> None:
        for name in self.case.crossing[s][0]:
            self.remaining[name, k] = self.uses[name]
            self._put(("value", name, k), int(self.case.bytes_of(name, self.choices.rows) * self.choices.times))

    def _stashg(self, s: int, k: int) -> None:
        for name in self.case.crossing[s][2]:
            self._put(("gradient", name, k), int(self.case.bytes_of(name, self.choices.rows) * self.choices.times))

    def _put(self, key: tuple[str, str, int], nbytes: int) -> None:
        moment = self._take_home(self.now, nbytes)
        lasts = key[0] == "gradient" and self.case.rolls and self.case.update == "eager"
        on_disk = self.case.on_disk and (lasts or self.in_memory + nbytes > self.choices.stash_bytes)
        self.stash[key] = (nbytes, on_disk)
        if on_disk:
            self.now += self._fill(nbytes)
            self._add("disk", "stash", nbytes)
            waiting = min(nbytes, int(2 * nbytes / self.choices.times))  # it is written in pieces
            self._add("host", "stash", waiting)
            self._later(self._move("write", moment, nbytes), "host", "stash", waiting)
        else:
            self._add("host", "stash", nbytes)
            self.in_memory += nbytes

    def _fill(self, nbytes: int) -> float:
        """Seconds of a core until a buffer that is new has been filled: the system hands out pages one by one."""
        return nbytes / self.machine.kernels.get("fresh", math.inf)

    def _restore(self, s: int, k: int) -> None:
        for name in self.case.crossing[s][1]:
            if (name, k) not in self.remaining:
                continue  # another rank made it
            self.remaining[name, k] -= 1
            self._get("value", ("value", name, k), s, k, last=self.remaining[name, k] == 0)

    def _restoreg(self, s: int, k: int) -> None:
        names = dict.fromkeys((*self.case.crossing[s][0], *self.case.crossing[s][1]))
        for name in names:
            if ("gradient", name, k) in self.stash:
                self._get("gradient", ("gradient", name, k), s, k, last=True)

    def _get(self, what: str, key: tuple[str, str, int], s: int, k: int, *, last: bool) -> None:
        nbytes, on_disk = self.stash[key]
        used = self.used.setdefault((s, k), [])
        one = int(nbytes / self.choices.times)  # of those it stands for, one is in use at a time
        start = self.now
        if on_disk:
            self.debt += self._fill(nbytes)
            start = self._move("read", start, nbytes, urgent=True)
            self._add("host", "restored", one)  # in memory of its own, not in a buffer that serves again
            used.append(("host", "restored", one))
        elif last:
            self.in_memory -= nbytes
            used.append(("host", "stash", nbytes))
        if last:
            del self.stash[key]
            if on_disk:
                self._add("disk", "stash", -nbytes)
        if not self.on_cpu:
            self._add("device", "stash", one)
            used.append(("device", "stash", one))
        arrival = self._bring(start, nbytes)
        self.arrivals[what, s, k] = max(arrival, self.arrivals.get((what, s, k), 0.0))

    # -- gradients and update

    def _park(self, s: int, _: None) -> None:
        for block in self.case.blocks[s]:
            home = self.case.layout.home(block)
            if home is None or (home == s and self.case.update != "deferred"):
                continue
            nbytes = self.case.gradient_of(block, s, rebuilt=not self._keeps(s))
            self.sums[s] -= nbytes
            done = self._take_home(self.now, nbytes)
            if not self.on_cpu:
                self._later(done, "device", "gradients", nbytes)
                self._add("host", "gradients", nbytes)
            if GRADIENT in block.kinds:
                done = self._move("write", done, master_bytes(block))
                self._later(done, "host", "gradients", nbytes)
            else:
                before = self.parked.get(block.name, 0)  # the sum of both takes one place
                self._later(done, "host", "gradients", before)
                self.parked[block.name] = nbytes
            self.pending[block.name] = max(done, self.pending.get(block.name, 0.0))
            self._make_room(done)

    def _norm(self, *_: None) -> None:
        self._end_updates()

    def _update(self, s: int, _: None) -> None:
        if s in self.unsummed:
            self.held.add(s)
            return
        summed = self.sums.pop(s, 0)
        for block in self.case.homes.get(s, []):
            own = self.case.gradient_of(block, s, rebuilt=not self._keeps(s)) if summed else 0
            summed -= own
            start = max(self._take_home(self.now, own), self.summed.pop(block.name, 0.0))
            if not self.on_cpu:
                self._later(start, "device", "gradients", own)
                self._add("host", "gradients", own)
            order = -s if self.case.rolls and self.case.update == "eager" else s
            heapq.heappush(self.jobs, (order, len(self.pending), block.name, block, own, start))
            self._advance()
            self._make_room()

    def _step(self) -> None:
        """The update thread takes its next job, the first segment first."""
        _, _, name, block, own, start = heapq.heappop(self.jobs)
        start = max(start, self.updater_free)
        seconds = self.case.price_update(block, self.machine)
        waiting = block.nbytes(GRADIENT) if GRADIENT in block.kinds else 0
        read, is_next = start, block.users[:1] == (0,)  # the first segment's, which the next step begins with
        if self.is_away:
            read = self._move("read", start, block.state_nbytes + waiting, urgent=is_next)
        if self.on_cpu:  # beside compute, from which it takes its time
            self.debt += seconds
            self.busy["update"] += seconds
            stepped = max(start + 2 * seconds, read)
        else:
            stepped = self._work("update", read, seconds)
        done = self.updater_free = stepped
        if self.is_away:
            done = self._move("write", stepped, block.all_nbytes - waiting)
        freed = own + self.parked.pop(name, 0)
        self._later(done, "host", "gradients", freed)  # crowded, steps end hardly before writes
        self.lagging.append((done, own))
        if self.case.on_disk:
            pieces = block.all_nbytes
            if not block.whole:
                pieces = min(THREADS * pieces * UNIT // block.numel, pieces)
            self._add("host", "update", pieces)
            self._later(done, "host", "update", pieces)
        self.pending[name] = done
        self.under_way.append(done)

    def _advance(self) -> None:
        """Updates that have begun by now."""
        while self.jobs and self.updater_free <= self.now:
            self._step()

    def _end_update_of(self, block: Block) -> None:
        while any(job[2] == block.name for job in self.jobs):
            self._step()

    def _end_updates(self) -> None:
        while self.jobs:
            self._step()
        self.now = max([self.now + self.debt, *self.pending.values()])
        self.debt = 0.0

    def _make_room(self, *parked: float) -> None:
        """Waits until no more updates than planned are waiting or under way."""
        self.under_way = [*(moment for moment in self.under_way if moment > self.now), *parked]
        while len(self.under_way) + len(self.jobs) > self.choices.updates_ahead:
            if self.under_way:
                self.now = max(self.now, min(self.under_way))
                self.under_way.remove(min(self.under_way))
                self._advance()
            else:
                self._step()

    # -- other ranks

    def _awaited(self, kind: str, s: int | None, k: int | None) -> list[Hashable]:
        """What other ranks must have sent before an action can be done."""
        links = self.case.links
        if links is None or s is None:
            return []
        if kind in ("F", "B"):
            return [self._letter(n, k) for n in links.traffic.received_by(s, backward=kind == "B")]
        ties = {"TAKE": links.takes, "HEAR": links.hears}.get(kind, {}).get(s, [])
        return [self._letter(kind, tie.number) for tie in ties]

    def _letter(self, *what: Hashable) -> Hashable:
        return (self.step, *what)

    def _exchange(self, start: float, nbytes: int, messages: int = 1) -> float:
        """Bytes that leave this rank, while as many may come: when the last of them is there."""
        done = self._move("network", start, nbytes) + messages * self.machine.latency
        self.now = self.now if self.choices.overlap else max(self.now, done)
        return done

    def _share_of_others(self, nbytes: int) -> int:
        """In a ring each sends, of what all have, all but its own part."""
        replicas = self.case.ranks.data
        return nbytes * (replicas - 1) // replicas

    @property
    def _links(self) -> Links:
        assert self.case.links is not None, "who has something to exchange has others"
        return self.case.links

    def _recv(self, s: int, k: int) -> None:
        """Posted; it comes when it comes."""

    _recvg = _recv

    def _send(self, s: int, k: int) -> None:
        self._post(s, k, backward=False)

    def _sendg(self, s: int, k: int) -> None:
        self._post(s, k, backward=True)

    def _post(self, s: int, k: int, *, backward: bool) -> None:
        traffic = self._links.traffic
        for number in traffic.sent_by(s, backward=backward):
            nbytes = int(traffic.parcel(number, self.choices.rows).nbytes * self.choices.times)
            self.mail[self._letter(number, k)] = self._exchange(self.now, nbytes)

    def _loss(self, *_: None) -> None:
        """A number."""

    def _reduce(self, s: int, _: None) -> None:
        if self.pieces[s]:
            self.unsummed[s] = self.pieces[s]

    def _sum(self, s: int, _: int) -> None:
        """An equal part of what the segment has to sum; with the last of them its update can begin."""
        blocks = self.case.summed_at(s)
        nbytes = master_bytes if self.case.layout.shards else summed_bytes
        ring = self._share_of_others(sum(nbytes(b) for b in blocks))
        rounds = 1 if self.case.layout.shards else 2  # parts are summed, and, if all want all, told
        done = self._exchange(self.now, rounds * ring // self.pieces[s], rounds * (self.case.ranks.data - 1))
        self.unsummed[s] -= 1
        if not self.unsummed[s]:
            del self.unsummed[s]
            self.summed.update({block.name: done for block in blocks})
            if s in self.held:
                self.held.remove(s)
                self._update(s, None)

    def _pass(self, s: int, _: None) -> None:
        for tie in self._links.passes[s]:
            self.mail[self._letter("TAKE", tie.number)] = self._exchange(self.now, summed_bytes(self._block(tie)))

    def _take(self, s: int, _: None) -> None:
        for tie in self._links.takes[s]:
            arrived = self.mail[self._letter("TAKE", tie.number)]
            name = self._block(tie).name
            self.summed[name] = max(arrived, self.summed.get(name, 0.0))

    def _tell(self, s: int, _: None) -> None:
        for tie in self._links.tells[s]:
            block = self._block(tie)
            self._end_update_of(block)
            start = max(self.now, self.pending.get(block.name, 0.0))
            self.mail[self._letter("HEAR", tie.number)] = self._exchange(start, master_bytes(block))

    def _hear(self, s: int, _: None) -> None:
        for tie in self._links.hears[s]:
            self.pending[self._block(tie).name] = self.mail[self._letter("HEAR", tie.number)]

    def _block(self, tie: Tie) -> Block:
        return self.case.layout.places[tie.parameter][0]

    def _intent(self, *_: None) -> None:
        """The batch is small beside the model."""

    def _commit(self, *_: None) -> None:
        """The end of the walk waits for what is pending."""

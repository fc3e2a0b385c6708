"""The walk: a list of actions, one by one, on clocks and tallies instead of tensors.

In: a `Case`, a list of actions, a machine. Out: what of it the estimate tells. An action starts jobs on lanes and waits for
others, as the executor does; what other ranks must have sent before is waited for by yielding it.
"""

from collections import Counter
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass

from packhorse.case import Case, count_uses, master_bytes, summed_bytes
from packhorse.estimate.lanes import Lanes
from packhorse.estimate.tally import Tally
from packhorse.estimate.updates import Updates
from packhorse.machine import Machine
from packhorse.memory import Tier
from packhorse.partition import Segment
from packhorse.price import Price
from packhorse.ranks.links import Links, Tie
from packhorse.running import are_twins
from packhorse.schedule import Action
from packhorse.store import MASTER, WORKING, Block

SPLITTING = 1e-4  # seconds for each parameter of a backward in two halves: each starts the engine once more
HANDLING = 1.5e-4  # seconds of Python around each run of a segment, which only a device that works ahead hides
BEGINNING = 2e-4  # likewise, to cut a gradient into pieces of a sum, and to begin one of them
KEPT = "kept by malloc and kernels"  # a kind of host memory, on machines without accelerator

Mail = dict[Hashable, float]  # what ranks send each other -> when it is there


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


class Walk:
    """Of one rank; those that exchange something share their `mail`."""

    def __init__(
        self, case: Case, machine: Machine, choices: Choices, limits: Mapping[Tier, int], mail: Mail | None = None
    ):
        self.case, self.machine, self.choices = case, machine, choices
        self.mail: Mail = {} if mail is None else mail
        self.lanes = Lanes(machine)
        self.tally = Tally(limits, pools=case.on_disk)
        self.updates = Updates(case, self.lanes, self.tally, choices.updates_ahead)
        self.device: Tier = "host" if self.lanes.on_cpu else "device"
        self.running: Segment | None = None
        self.ready: dict[int, float] = {}  # segment -> when its parameters are there
        self.arrivals: dict[tuple[str, int, int], float] = {}  # what was restored, and when it is there
        self.used: dict[tuple[int, int], list[tuple[Tier, str, int]]] = {}  # goes when compute is done
        self.stash: dict[tuple[str, str, int], tuple[int, bool, int]] = {}  # bytes, whether on disk, and of host memory
        self.in_memory = 0  # of the stash
        self.sums: dict[int, int] = {}  # segment -> bytes of its gradients
        self.remaining: dict[tuple[str, int], int] = {}  # uses of a value that are to come
        self.summed: dict[str, float] = {}  # block -> when its gradient is that of all ranks
        self.unsummed: dict[int, int] = {}  # segment -> pieces of its gradients that are not begun
        self.held: set[int] = set()  # segments that will be updated when they are summed
        self.step = 0
        self.started: tuple[float, dict[str, int], dict[str, float]] = (0.0, {}, {})  # the step: when, what was done

    def walk(self, actions: Sequence[Action]) -> Generator[Hashable, None, None]:
        """Yields what it waits for where that has not been sent yet."""
        self._begin()
        forwards = Counter(s for kind, s, k in actions if s is not None and kind in ("F", "R") and k == 0)
        self.uses = count_uses(forwards, self.case.crossing)
        handlers = {kind: getattr(self, f"_{kind.lower()}") for kind in {action.kind for action in actions}}
        self.recomputed = {s for kind, s, _ in actions if kind == "R"}
        self.split = {s for kind, s, _ in actions if kind == "W"}
        self.pieces = Counter(s for kind, s, _ in actions if kind == "SUM")
        has_others = self.case.ranks.size > 1
        for step in range(2 if self.updates.is_away or has_others else 1):  # what one leaves to do, the next waits for
            self.step, self.started = step, (self.lanes.now, dict(self.lanes.moved), dict(self.lanes.busy))
            for kind, s, k in actions:
                if self.tally.is_over:
                    return
                self.updates.advance()
                for key in self._awaited(kind, s, k):
                    while key not in self.mail:
                        yield key
                handlers[kind](s, k)
                self.tally.release(self.lanes.now)
            if not self.case.on_disk and not has_others:
                self.updates.end()

    def _begin(self) -> None:
        case, tally = self.case, self.tally
        tally.add("host", "base", case.base_bytes)
        if self.lanes.on_cpu:
            tally.add("host", KEPT, case.kept_bytes(self.choices.rows, resident=self.choices.resident))
        if case.on_disk:
            tally.add("disk", "store", case.disk_bytes)
            tally.note("host", case.model_bytes, "the model as it was given")
        else:
            masters = sum(master_bytes(b) for b in case.layout.blocks)
            tally.add("host", "store", masters)
            tally.note("host", case.model_bytes, "the model as it was given")
            tally.add("host", "store", case.state_bytes - masters)

    # -- parameters

    def _fetch(self, s: int, _: None) -> None:
        lanes = self.lanes
        ready = lanes.now
        for block in self.case.blocks[s]:
            start = self.updates.when(block)
            if self.updates.is_away:
                kind = WORKING if WORKING in block.kinds else MASTER
                start = lanes.move("read", start, block.nbytes(kind), urgent=True)
            elif block.is_cast:  # by the thread that asks
                seconds = (block.nbytes(MASTER) + block.working_nbytes) / self.machine.bandwidth["host"]
                start = lanes.work("compute" if lanes.on_cpu else "cast", start, seconds)
                lanes.now = start if lanes.on_cpu else lanes.now
            if self.case.layout.shards:
                start = self._exchange(start, self._share_of_others(block.working_nbytes))
            ready = max(ready, lanes.bring(start, block.working_nbytes))
        self.ready[s] = ready
        self.tally.add("host", "weights", self.case.copies[s])
        if not lanes.on_cpu:
            self.tally.add("device", "weights", self.case.weights[s])

    def _evict(self, s: int, _: None) -> None:
        self.tally.add("host", "weights", -self.case.copies[s])
        if not self.lanes.on_cpu:
            self.tally.add("device", "weights", -self.case.weights[s])

    # -- compute

    def _compute(self, s: int, k: int, seconds: float) -> None:
        segment = self.case.partition.segments[s]
        if not are_twins(self.running, segment):
            self.tally.drop_idle()
        self.running = segment
        arrived = max(self.arrivals.pop((kind, s, k), 0.0) for kind in ("value", "gradient", "mail"))
        handling = HANDLING if self.lanes.on_cpu else 0.0
        self.lanes.compute(max(self.ready[s], arrived), (seconds + handling) * self.choices.times)

    def _f(self, s: int, k: int) -> None:
        footprint = self.case.footprint(s, self.choices.rows)
        price, keeps = self._price(s), self._keeps(s)
        self._open_mail("F", s, k)
        self.updates.catch_up()
        self._compute(s, k, price.building if keeps else price.forward)
        if keeps:
            self.tally.note(self.device, footprint.building)
            self.tally.add(self.device, "graphs", self._graph_bytes(s))
        else:
            self.tally.note(self.device, footprint.forward)
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
        self.tally.note(self.device, self.case.footprint(s, self.choices.rows).building)
        self.tally.add(self.device, "graphs", self._graph_bytes(s))

    def _b(self, s: int, k: int) -> None:
        self._open_mail("B", s, k)
        if s not in self.split:
            self._differentiate(s, k, 1.0)
            return
        self._compute(s, k, (1.0 - self._rest_of(s)) * self._price(s).backward + self._splitting(s) / 2)
        self.tally.note(self.device, self.case.footprint(s, self.choices.rows).backward)

    def _w(self, s: int, k: int) -> None:
        self._differentiate(s, k, self._rest_of(s), self._splitting(s) / 2)

    def _rest_of(self, s: int) -> float:
        """The share of a backward that is left for later."""
        return 0.5 if self.case.partition.segments[s].differentiable_inputs else 1.0

    def _splitting(self, s: int) -> float:
        """Seconds that two halves of a backward take more than a whole one."""
        segment = self.case.partition.segments[s]
        return SPLITTING * len(segment.parameters) if segment.differentiable_inputs else 0.0

    def _differentiate(self, s: int, k: int, share: float, more: float = 0.0) -> None:
        """Backward, or what of it is left, to the end of the graph."""
        case, times = self.case, self.choices.times
        rebuilt = not self._keeps(s)
        summed, lagging = case.gradient_bytes(s, rebuilt=rebuilt), self.updates.lagging_bytes()
        price = self._price(s)
        summing = price.adding if s in self.sums else (price.first + (times - 1) * price.adding) / times
        self._compute(s, k, share * price.backward + summing + more)
        footprint = case.footprint(s, self.choices.rows)
        backward = footprint.rebuilt if rebuilt else footprint.backward
        self.tally.add(self.device, "graphs", -self._graph_bytes(s))
        if s not in self.sums and times > 1:
            self.tally.note(self.device, backward + summed + lagging)
        else:
            self.tally.note(self.device, backward + lagging)
        if s not in self.sums:
            self.sums[s] = summed
            self.tally.add(self.device, "gradients", summed)
        self._let_go(s, k)

    def _let_go(self, s: int, k: int) -> None:
        """What a segment read, once it is not needed again."""
        for tier, kind, nbytes in self.used.pop((s, k), ()):
            self.tally.add(tier, kind, -nbytes)

    # -- the stash

    def _stash(self, s: int, k: int) -> None:
        shared = self.lanes.on_cpu and self._keeps(s)  # the graph has it too
        for name in self.case.crossing[s][0]:
            self.remaining[name, k] = self.uses[name]
            nbytes = int(self.case.bytes_of(name, self.choices.rows) * self.choices.times)
            self._put(("value", name, k), nbytes, shared=shared)

    def _stashg(self, s: int, k: int) -> None:
        for name in self.case.crossing[s][2]:
            self._put(("gradient", name, k), int(self.case.bytes_of(name, self.choices.rows) * self.choices.times))

    def _put(self, key: tuple[str, str, int], nbytes: int, *, shared: bool = False) -> None:
        lanes, tally = self.lanes, self.tally
        moment = lanes.take_home(lanes.now, nbytes)
        lasts = key[0] == "gradient" and self.case.rolls and self.case.update == "eager"
        on_disk = self.case.on_disk and (lasts or self.in_memory + nbytes > self.choices.stash_bytes)
        self.stash[key] = (nbytes, on_disk, counted := 0 if shared else nbytes)
        if on_disk:
            lanes.now += lanes.fill(nbytes)
            tally.add("disk", "stash", nbytes)
            waiting = min(nbytes, int(2 * nbytes / self.choices.times))  # it is written in pieces
            tally.add("host", "stash", waiting)
            tally.later(lanes.move("write", moment, nbytes), "host", "stash", waiting)
        else:
            tally.add("host", "stash", counted)
            self.in_memory += nbytes

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
        lanes, tally = self.lanes, self.tally
        nbytes, on_disk, counted = self.stash[key]
        used = self.used.setdefault((s, k), [])
        one = int(nbytes / self.choices.times)  # of those it stands for, one is in use at a time
        start = lanes.now
        if on_disk:
            lanes.debt += lanes.fill(nbytes)
            start = lanes.move("read", start, nbytes, urgent=True)
            tally.add("host", "restored", one)  # in memory of its own, not in a buffer that serves again
            used.append(("host", "restored", one))
        elif last:
            self.in_memory -= nbytes
            used.append(("host", "stash", counted))
        if last:
            del self.stash[key]
            if on_disk:
                tally.add("disk", "stash", -nbytes)
        if not lanes.on_cpu:
            tally.add("device", "stash", one)
            used.append(("device", "stash", one))
        arrival = lanes.bring(start, nbytes)
        self.arrivals[what, s, k] = max(arrival, self.arrivals.get((what, s, k), 0.0))

    # -- gradients and update

    def _park(self, s: int, _: None) -> None:
        for block in self.case.blocks[s]:
            home = self.case.layout.home(block)
            if home is None or (home == s and self.case.update != "deferred"):
                continue
            nbytes = self.case.gradient_of(block, s, rebuilt=not self._keeps(s))
            self.sums[s] -= nbytes
            self.updates.park(block, nbytes, self._bring_home(self.lanes.now, nbytes))

    def _bring_home(self, start: float, nbytes: int) -> float:
        """Gradients, to the host."""
        done = self.lanes.take_home(self.lanes.now, nbytes)
        if not self.lanes.on_cpu:
            self.tally.later(max(start, done), "device", "gradients", nbytes)
            self.tally.add("host", "gradients", nbytes)
        return max(start, done)

    def _norm(self, *_: None) -> None:
        self.updates.end()

    def _update(self, s: int, _: None) -> None:
        if s in self.unsummed:
            self.held.add(s)
            return
        summed = self.sums.pop(s, 0)
        for block in self.case.homes.get(s, []):
            own = self.case.gradient_of(block, s, rebuilt=not self._keeps(s)) if summed else 0
            summed -= own
            self.updates.add(s, block, own, self._bring_home(self.summed.pop(block.name, 0.0), own))

    def _intent(self, *_: None) -> None:
        """The batch is small beside the model."""

    def _commit(self, *_: None) -> None:
        """The end of the walk waits for what is pending."""

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

    def _open_mail(self, kind: str, s: int, k: int) -> None:
        arrived = [self.mail[key] for key in self._awaited(kind, s, k)]
        if arrived:
            self.arrivals["mail", s, k] = max(arrived)

    def _exchange(self, start: float, nbytes: int, messages: int = 1) -> float:
        """Bytes that leave this rank, while as many may come: when the last of them is there."""
        done = self.lanes.move("network", start, nbytes) + messages * self.machine.latency
        if not self.choices.overlap:
            self.lanes.wait(done)
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
            self.mail[self._letter(number, k)] = self._exchange(self.lanes.now, nbytes)

    def _loss(self, *_: None) -> None:
        """A number."""

    def _reduce(self, s: int, _: None) -> None:
        self._begin_sums()
        if self.pieces[s]:
            self.unsummed[s] = self.pieces[s]

    def _sum(self, s: int, _: int) -> None:
        """An equal part of what the segment has to sum; with the last of them its update can begin."""
        self._begin_sums()
        blocks = self.case.summed_at(s)
        nbytes = master_bytes if self.case.layout.shards else summed_bytes
        ring = self._share_of_others(sum(nbytes(b) for b in blocks))
        rounds = 1 if self.case.layout.shards else 2  # parts are summed, and, if all want all, told
        messages = rounds * (self.case.ranks.data - 1)
        done = self._exchange(self.lanes.now, rounds * ring // self.pieces[s], messages)
        self.unsummed[s] -= 1
        if not self.unsummed[s]:
            del self.unsummed[s]
            self.summed.update({block.name: done for block in blocks})
            if s in self.held:
                self.held.remove(s)
                self._update(s, None)

    def _begin_sums(self) -> None:
        if self.lanes.on_cpu:
            self.lanes.debt += BEGINNING

    def _pass(self, s: int, _: None) -> None:
        for tie in self._links.passes[s]:
            done = self._exchange(self.lanes.now, summed_bytes(self._block(tie)))
            self.mail[self._letter("TAKE", tie.number)] = done

    def _take(self, s: int, _: None) -> None:
        for tie in self._links.takes[s]:
            arrived = self.mail[self._letter("TAKE", tie.number)]
            name = self._block(tie).name
            self.summed[name] = max(arrived, self.summed.get(name, 0.0))

    def _tell(self, s: int, _: None) -> None:
        for tie in self._links.tells[s]:
            block = self._block(tie)
            self.mail[self._letter("HEAR", tie.number)] = self._exchange(self.updates.when(block), master_bytes(block))

    def _hear(self, s: int, _: None) -> None:
        for tie in self._links.hears[s]:
            self.updates.pending[self._block(tie).name] = self.mail[self._letter("HEAR", tie.number)]

    def _block(self, tie: Tie) -> Block:
        return self.case.layout.places[tie.parameter][0]

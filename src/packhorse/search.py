"""The search for a plan: candidates are lists of actions, each is estimated, and the fastest that fits is taken.

In: a graph, what the user fixed, a budget, a machine, and a way to make a `Case` of a partition. Out: the case and its `Plan`,
with the reasons; or a refusal that names the smallest budget that works and the cheapest change that makes it fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from packhorse.case import Case
from packhorse.errors import BudgetError, PackhorseError, PlanError
from packhorse.estimate import (
    MOST_MICROBATCHES,
    Choices,
    Estimate,
    estimate,
    estimate_plain,
    estimate_standing,
    estimate_together,
)
from packhorse.graph import Graph
from packhorse.machine import Machine, free_bytes
from packhorse.memory import TYPICAL, Memory, Tier, available_bytes
from packhorse.partition import Partition, find_places, join_small, partition
from packhorse.plan import Plan, find_fingerprint
from packhorse.ranks.shape import ALONE, Ranks
from packhorse.rehearse import Rehearsed
from packhorse.units import format_bytes, format_seconds

UNLIMITED = 1 << 62
ROOM = 0.9  # of a budget is spent on what only makes it faster
WORTH = 0.97  # of the time, for what costs memory that need not be spent
LONG = 0.1  # seconds of a step from which on it is worth running its segments beforehand
REHEARSALS = 3
OVERLAPPING = 16  # segments, about, that replicas need for sums of gradients to hide behind backward
PIECE_SECONDS = 0.03  # of sums over replicas: long beside what beginning one takes, short beside a step
EAGER = 1.25  # the network must not wait for compute: that more is begun than has passed costs less
LEAST_PIECE, MOST_PIECE = 256 << 10, 32 << 20
MOST_WAITING = 4  # updates that may wait for the disk
EQUAL = 0.99  # a plan must beat another by that to be preferred to one that was tried before

CaseOf = Callable[[Partition], Case]


@dataclass(frozen=True)
class Wish:
    """What the user fixed; None: to be chosen."""

    strategy: str = "auto"
    microbatches: int | None = None
    cuts: tuple[int, ...] | None = None
    kept: frozenset[int] | None = None
    prefetch_bytes: int | None = None
    updates_ahead: int | None = None
    stash_bytes: int | None = None
    ranks: Ranks = ALONE
    piece_bytes: int = 0  # of sums over replicas; 0: to be chosen, as is `pace`
    pace: tuple[float, ...] = ()
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", "resident", "relay", "pipeline"):
            raise PackhorseError(f"strategy is {self.strategy!r}, expected 'auto', 'resident', 'relay' or 'pipeline'")
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise PackhorseError(f"microbatches is {count!r}, expected a number of at least 1")

    def pinned_to(self, plan: Plan) -> "Wish":
        """With what a plan pins; what the user fixed beside it must not be another."""
        pins = {name: getattr(plan, name) for name in plan.pinned}
        if pins.get("kept") and "cuts" not in pins:
            raise PlanError("the plan pins 'kept', which names segments, without the 'cuts' that make them; pin both")
        if pins.get("kept") and max(pins["kept"]) >= plan.num_segments:
            raise PlanError(f"the plan keeps segment {max(pins['kept'])}, but has only {plan.num_segments}")
        for name, given in (("strategy", self.strategy), ("microbatches", self.microbatches)):
            if given not in (None, "auto") and name in pins and pins[name] != given:
                raise PlanError(
                    f"the plan pins {name} to {pins[name]!r}, but {given!r} is asked; take one of them away"
                )
        return replace(self, **pins)


def choose(
    graph: Graph,
    case_of: CaseOf,
    wish: Wish,
    memory: Memory,
    machine: Machine,
    rehearsed: Rehearsed | None = None,
    *,
    explain: bool = True,
) -> tuple[Case, Plan]:
    """The fastest plan that fits. Without a budget a relay keeps nothing it need not keep.

    To `explain` a refusal takes as long as to find a plan.

    On this machine, where steps take long, the chosen plan's segments are run, and the choice is made anew with what is
    known then, until it stands. What was `rehearsed` before counts.
    """
    rehearsed = Rehearsed() if rehearsed is None else rehearsed
    cases = _Remembered(make_cases(graph, case_of, wish, memory))
    case, plan = choose_with(cases, wish, memory, machine, rehearsed, explain=explain)
    for _ in range(REHEARSALS):
        if plan.ranks.size > 1 or not run_beforehand(case, plan, memory, machine):
            break  # ranks that do it at once would measure each other
        try:
            case, plan = choose_with(cases, wish, memory, machine, rehearsed, explain=False)
        except BudgetError:
            found = "run beforehand, its segments took more memory than reckoned: it may take more than planned"
            return case, replace(plan, reasons=(*plan.reasons, found))
    return case, plan


def run_beforehand(case: Case, plan: Plan, memory: Memory, machine: Machine) -> bool:
    """Runs segments, in a process of their own: not for short steps, nor without room. False: nothing was learned by it."""
    if not machine.is_here or plan.estimate.seconds < LONG:
        return False
    room, needed = min(_find_limits(case, memory, machine)["host"], available_bytes()) - TYPICAL, 0
    if machine.device == "cpu":
        needed = case.rehearsal_bytes(plan.rows, machine, resident=plan.is_resident)
    return needed <= room and case.rehearse(plan.rows, machine, resident=plan.is_resident, room=room)


def make_cases(graph: Graph, case_of: CaseOf, wish: Wish, memory: Memory) -> Iterator[Case]:
    """In the order in which they are tried.

    Small segments are one where all may stay in memory, and nobody asked to have less of it there; of replicas not all of
    them, which sum the gradients of one while others still compute.
    """
    stays = wish.strategy in ("auto", "resident") and not _has_budget(memory)
    if stays and wish.cuts is None and not graph.opaque:
        blocks = partition(graph)
        joined = join_small(blocks, least=1 if wish.ranks.data == 1 else OVERLAPPING)
        if joined.cuts != blocks.cuts and not (case := case_of(joined)).on_disk:
            yield case
    yield from (case_of(part) for part in _partitions(graph, wish))


class _Remembered(Iterable[Case]):
    """Cases that are made when they are first asked for, and then kept: of a deep model each takes megabytes."""

    def __init__(self, cases: Iterator[Case]):
        self._coming, self._made = cases, list[Case]()

    def __iter__(self) -> Iterator[Case]:
        yield from self._made
        for case in self._coming:
            self._made.append(case)
            yield case


def choose_with(
    cases: Iterable[Case], wish: Wish, memory: Memory, machine: Machine, rehearsed: Rehearsed, *, explain: bool
) -> tuple[Case, Plan]:
    """With what is known of segments that were run."""
    tried: list[_Search] = []
    for made in cases:
        case = replace(made, rehearsed=rehearsed)
        search = _Search(case, wish, machine, _find_limits(case, memory, machine), _has_budget(memory))
        found = search.run()
        if found is None and case.may_roll and any(search.lacks_disk(plan) for plan in search.refused):
            case = case.rolling()
            search = replace(search, case=case, refused=[])
            found = search.run()
        if found is not None:
            plain, count = search.estimate_plain()
            fits = _excess(plain, search.limits) <= 0
            found = replace(found, plain=plain, plain_microbatches=count, plain_fits=fits)
            return case, replace(found, reasons=search.explain(found))
        tried.append(search)
    if not explain:
        raise BudgetError(f"{tried[0].case.partition.graph.name} does not fit")
    closest = [(search.case, search.find_least()) for search in tried]
    case, least = min(closest, key=lambda pair: _excess(pair[1].estimate, _find_limits(pair[0], memory, machine)))
    raise BudgetError(_refuse(case, least, wish, memory, machine))


def _has_budget(memory: Memory) -> bool:
    return any(memory.limit(tier) is not None for tier in ("host", "device"))


def _find_limits(case: Case, memory: Memory, machine: Machine) -> dict[Tier, int]:
    limits: dict[Tier, int] = {}
    for tier in ("host", "disk") if machine.device == "cpu" else ("device", "host", "disk"):
        limit = memory.limit(tier)
        if limit is None and tier == "host":
            here = case.base_bytes + case.model_bytes if machine.is_here else 0
            limit = here + free_bytes(machine)
        if limit is None:
            limit = machine.memory.get(tier)
        if limit is not None:
            limits[tier] = limit
    return limits


def _partitions(graph: Graph, wish: Wish) -> Iterator[Partition]:
    """The repeated blocks; if they do not fit, cuts wherever they are legal."""
    if wish.cuts is not None:
        places = {place.index: place for place in find_places(graph) if place.legal}
        for index in wish.cuts:
            if index not in places:
                raise PackhorseError(f"the plan cuts before node {index}, where {graph.name} cannot be cut")
        yield Partition(graph, tuple(places[index] for index in sorted(wish.cuts)))
        return
    yield partition(graph)
    yield partition(graph, "finest")


@dataclass
class _Search:
    case: Case
    wish: Wish
    machine: Machine
    limits: Mapping[Tier, int]
    has_budget: bool
    refused: list[Plan] = field(default_factory=list)

    @cached_property
    def fingerprint(self) -> str:
        return find_fingerprint(self.case.partition.graph)

    def run(self) -> Plan | None:
        best: Plan | None = None
        for plan in self._candidates():
            if not self._fits(plan):
                self.refused.append(plan)
                continue
            if self.has_budget or self.wish.strategy == "auto":
                plan = self._spend(plan)
            plan = self._let_updates_wait(plan)
            if best is None or plan.estimate.seconds < EQUAL * best.estimate.seconds:
                best = plan
        return best

    def lacks_disk(self, plan: Plan) -> bool:
        return _scarcest(plan.estimate, self.limits) == "disk"

    def find_least(self) -> Plan:
        """Of those that do not fit the one that comes closest: with as many microbatches as may be."""
        most = max(plan.microbatches for plan in self.refused)
        walked = (self._price(plan, to_the_end=True) for plan in self.refused if plan.microbatches == most)
        return min(walked, key=self._excess)

    def _candidates(self) -> Iterator[Plan]:
        case, wish = self.case, self.wish
        if case.rolls and case.update == "eager" and wish.strategy == "resident":
            raise PackhorseError(
                "strategy='resident' with one version on disk could not finish an interrupted step, since gradients of all "
                "segments are summed before the first update; use strategy='relay', or update='deferred'"
            )
        wanted = [min(wish.microbatches, case.batch_rows)] if wish.microbatches else _halvings(case.batch_rows)
        counts = dict.fromkeys(count_microbatches(case.partition.graph, case.batch_rows, n)[0] for n in wanted)
        for strategy in self._strategies() if wish.strategy == "auto" else (wish.strategy,):
            for count in counts:
                if count < min(case.ranks.data, case.batch_rows):
                    continue
                plan = self._make(strategy, count)
                yield plan
                if strategy == "relay" and not self._fits(plan) and wish.prefetch_bytes is None:
                    yield self._price(replace(plan, prefetch_bytes=0))

    def _strategies(self) -> tuple[str, ...]:
        if self.case.ranks.pipeline > 1:
            return ("pipeline",)
        return ("relay",) if self.case.on_disk else ("resident", "relay")

    def _make(self, strategy: str, microbatches: int) -> Plan:
        case, wish = self.case, self.wish
        rows = count_microbatches(case.partition.graph, case.batch_rows, microbatches)[1]
        piece_bytes, pace = self._pace_sums(strategy, rows)
        plan = Plan(
            case.partition.graph.name,
            self.fingerprint,
            self.machine.name,
            strategy,
            microbatches,
            case.batch_rows,
            rows,
            tuple(place.index for place in case.partition.cuts),
            case.layout.differentiable,
            case.precision,
            case.update,
            case.on_disk,
            case.rolls,
            parks=case.layout.parks() | (case.links.waits if case.links is not None else frozenset()),
            ranks=case.ranks,
            piece_bytes=piece_bytes,
            pieces=case.find_pieces(piece_bytes) if case.ranks.data > 1 else (),
            pace=pace,
            overlap=wish.overlap,
            casts=case.casts,
            state_bytes=case.state_bytes,
            kept=wish.kept or frozenset(),
            prefetch_bytes=self._reach_ahead() if wish.prefetch_bytes is None else wish.prefetch_bytes,
            updates_ahead=(1 if case.ranks.size == 1 else UNLIMITED)
            if wish.updates_ahead is None
            else wish.updates_ahead,
            stash_bytes=(0 if case.on_disk else UNLIMITED) if wish.stash_bytes is None else wish.stash_bytes,
        )
        return self._price(plan)

    def _pace_sums(self, strategy: str, rows: int) -> tuple[int, tuple[float, ...]]:
        """Bytes of a piece of sums over replicas, and how many pass while each segment runs backward.

        On devices streams wait for sums in the order in which they are begun, so there is no pace to keep.
        """
        case, machine, wish = self.case, self.machine, self.wish
        if case.ranks.data == 1 or strategy == "relay" or machine.device != "cpu":
            return 0, ()
        if wish.pace:
            return wish.piece_bytes, wish.pace
        rate, others = machine.bandwidth["network"], case.ranks.data - 1
        nbytes = min(max(int(PIECE_SECONDS * rate), LEAST_PIECE), MOST_PIECE)
        seconds = 2 * others * (nbytes / case.ranks.data / rate + machine.latency)
        prices = [case.price(s, rows, machine, resident=True) for s in range(len(case.partition.segments))]
        return nbytes, tuple(EAGER * price.backward / seconds for price in prices)

    def _reach_ahead(self) -> int:
        """Bytes fetched at a time: a segment and its neighbour, unless fetching is but a cast, by the thread that computes."""
        case = self.case
        is_here = self.machine.device == "cpu" and not (case.on_disk or case.is_slowed or case.layout.shards)
        return 0 if is_here else _two_largest_neighbours(case.weights)

    def _price(self, plan: Plan, *, to_the_end: bool = False) -> Plan:
        """With its estimate; if it does not fit, only as far as that shows."""
        own = -(-plan.microbatches // plan.ranks.data)  # of this rank's replica
        walked = min(own, MOST_MICROBATCHES)
        choices = Choices(
            plan.rows,
            own / walked,
            plan.is_resident,
            plan.kept,
            plan.stash_bytes,
            plan.updates_ahead,
            plan.overlap,
        )
        limits = None if to_the_end else self.limits
        found = estimate_standing(self.case, self.machine, choices)
        if to_the_end or _excess(found, self.limits) <= 0:
            if plan.ranks.pipeline > 1:
                found = self._price_pipeline(plan, own, replace(choices, times=1.0), limits)
            else:
                actions = plan.actions(walked, self.case.weights, self.case.links)
                found = estimate(self.case, actions, self.machine, choices, limits)
        return replace(plan, estimate=found)

    def _price_pipeline(
        self, plan: Plan, microbatches: int, choices: Choices, limits: Mapping[Tier, int] | None
    ) -> Estimate:
        """Of a few microbatches for each stage, and what every further one adds; of one rank that exceeds a limit, if any."""
        fewer, more = (min(microbatches, rounds * plan.ranks.num_stages) for rounds in (2, 3))

        def walk(count: int) -> list[Estimate]:
            lists = [plan.actions(count, case.weights, case.links) for case in self._cases]
            return estimate_together(self._cases, lists, self.machine, choices, limits)

        found = walk(more)
        worst = max(found, key=lambda e: _excess(e, self.limits))
        if _excess(worst, self.limits) > 0 and limits is not None:
            return worst
        place = 0 if self.case.links is None else self.case.links.place
        seconds = max(e.seconds for e in found)
        if more == microbatches:
            return replace(found[place], seconds=seconds)
        before = walk(fewer)
        further = (microbatches - more) / (more - fewer)
        # While a pipeline still fills, a further microbatch seems to take less than it takes the busiest rank to compute.
        least = max(e.busy["compute"] - b.busy["compute"] for e, b in zip(found, before, strict=True))
        added = further * max(seconds - max(e.seconds for e in before), least)
        return found[place].extended(before[place], further, seconds + added)

    @cached_property
    def _cases(self) -> list[Case]:
        """Of all places in the pipeline."""
        here, at = self.case.links.place if self.case.links is not None else 0, self.case.at
        assert at is not None, "who plans a pipeline can make the case of every place"
        return [
            self.case if place == here else replace(at(place), rehearsed=self.case.rehearsed)
            for place in range(self.case.ranks.pipeline)
        ]

    def _fits(self, plan: Plan) -> bool:
        return self._excess(plan) <= 0

    def _has_room(self, plan: Plan) -> bool:
        """Whether it fits with something to spare: an estimate is not exact, and what it adds could be done without."""
        return _excess(plan.estimate, {tier: int(ROOM * limit) for tier, limit in self.limits.items()}) <= 0

    def _excess(self, plan: Plan) -> int:
        return _excess(plan.estimate, self.limits)

    def _spend(self, plan: Plan) -> Plan:
        """What the budget leaves goes to kept graphs, from the last segment on, and then to the stash."""
        if plan.is_resident:
            return plan
        best = plan
        if self.wish.kept is None:
            order = sorted(self.case.layout.differentiable, reverse=True)[1:]
            fewest, most = 0, len(order)
            while fewest < most:
                count = (fewest + most + 1) // 2
                tried = self._price(replace(plan, kept=frozenset(order[:count])))
                if self._has_room(tried):
                    fewest, best = count, tried
                else:
                    most = count - 1
        if self.case.on_disk and self.wish.stash_bytes is None:
            left = int(ROOM * self.limits["host"]) - best.estimate.peak["host"]
            tried = self._price(replace(best, stash_bytes=max(left, 0)))
            best = tried if self._has_room(tried) else best
        return best if best.estimate.seconds <= plan.estimate.seconds else plan

    def _let_updates_wait(self, plan: Plan) -> Plan:
        """Updates may wait for each other, and, where the disk is slow, for forward, which leaves it idle.

        Their gradients take memory. A second one is let wait wherever there is room: an update that now and then takes
        longer than the backward beside it, which no estimate tells, holds nothing up then.
        """
        if not self.case.on_disk or self.wish.updates_ahead is not None or plan.ranks.size > 1:
            return plan  # with others all may wait: who waited for one could hold up the sum it waits for
        for count, worth in ((2, 1.0), (MOST_WAITING, WORTH)):
            tried = self._price(replace(plan, updates_ahead=count))
            if self._has_room(tried) and tried.estimate.seconds <= worth * plan.estimate.seconds:
                plan = tried
        return plan

    # -- why

    def estimate_plain(self) -> tuple[Estimate, int]:
        """The ordinary loop with the fewest microbatches that fit, or, if none do, with one row each."""
        for count in _halvings(self.case.batch_rows):
            found = estimate_plain(self.case, self.machine, count)
            if _excess(found, self.limits) <= 0:
                break
        return found, count

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """Why this plan, and what would make it faster."""
        case, found = self.case, plan.estimate
        tier = "device" if "device" in found.peak else "host"
        reasons: list[str] = []
        if case.ranks.size == 1:
            reasons.append(self._compare_with_plain(plan, tier))
        fewer = [p for p in self.refused if p.strategy == plan.strategy and p.microbatches < plan.microbatches]
        if fewer:
            closest = self._price(max(fewer, key=lambda p: p.microbatches), to_the_end=True)
            scarce = _scarcest(closest.estimate, self.limits)
            more = format_bytes(closest.estimate.peak[scarce])
            reasons.append(f"{closest.microbatches} microbatches would take {more} of {scarce} memory")
        if plan.kept:
            all_kept = len(plan.kept) >= len(case.layout.differentiable) - 1
            reasons.append(
                "all graphs are kept from forward to backward: there is room"
                if all_kept
                else f"graphs of {len(plan.kept)} segments are kept, the others computed again: there is room for no more"
            )
        if case.rolls:
            two = replace(case, versions=2, rolls=False).disk_bytes
            reasons.append(f"the disk keeps one version and a spare; two versions would take {format_bytes(two)}")
        if case.partition.graph.opaque:
            reasons.append(
                "blocks that could not be traced run as they are: what they take inside is not known, only more"
            )
        if case.rehearsed:
            reasons.append("its segments were run on this machine, alone, to see how long they take")
        if found.bottleneck != "compute":
            reasons.append(f"a step waits most for {found.bottleneck}; more rows a step would hide it")
        if plan.strategy == "relay" and found.bottleneck == "compute":
            faster = self._with_all_graphs(plan)
            if faster is not None:
                reasons.append(
                    f"with {format_bytes(faster.peak[tier])} of {tier} memory all graphs could be kept: "
                    f"{format_seconds(faster.seconds)} a step"
                )
        return tuple(reasons)

    def _compare_with_plain(self, plan: Plan, tier: Tier) -> str:
        needed, there = plan.plain.peak[tier], self.limits[tier]
        return (
            f"plain PyTorch would take {format_bytes(needed)} of {tier} memory "
            + (f"and {format_seconds(plan.plain.seconds)} a step " if needed <= there else "")
            + f"with {plan.plain_microbatches} microbatches"
            + (f"; there are {format_bytes(there)}" if needed > there else "")
        )

    def _with_all_graphs(self, plan: Plan) -> Estimate | None:
        everything = frozenset(sorted(self.case.layout.differentiable)[:-1])
        if plan.kept == everything:
            return None
        found = self._price(replace(plan, kept=everything), to_the_end=True).estimate
        return found if found.seconds < 0.95 * plan.estimate.seconds else None


def _excess(found: Estimate, limits: Mapping[Tier, int]) -> int:
    return max(found.peak.get(tier, 0) - limit for tier, limit in limits.items())


def _scarcest(found: Estimate, limits: Mapping[Tier, int]) -> Tier:
    return max(limits, key=lambda tier: found.peak.get(tier, 0) - limits[tier])


def count_microbatches(graph: Graph, rows: int, wanted: int) -> tuple[int, int]:
    """How many microbatches a batch makes if so many are wanted, and the rows of the largest."""
    size = -(-rows // min(wanted, rows))
    size = max(size, 2) if graph.single_row and rows > 1 else size
    return -(-rows // size), size


def _halvings(rows: int) -> list[int]:
    """1, 2, 4, ... microbatches, and at last one row each."""
    return [*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows]


def _two_largest_neighbours(sizes: Mapping[int, int]) -> int:
    return max(sizes[s] + sizes.get(s + 1, 0) for s in sizes)


# -- refusing


def _refuse(case: Case, least: Plan, wish: Wish, memory: Memory, machine: Machine) -> str:
    limits = _find_limits(case, memory, machine)
    tier = _scarcest(least.estimate, limits)
    kinds = least.estimate.kinds[tier]
    kind = max(kinds, key=lambda k: kinds[k])
    name = "disk space" if tier == "disk" else f"{tier} memory"
    there = name if memory.limit(tier) is not None else f"the {name} there is"
    needed = f"the smallest budget that works is {format_bytes(least.estimate.peak[tier])}"
    if memory.limit(tier) is None:
        needed = f"it takes at least {format_bytes(least.estimate.peak[tier])}"
    if tier == "host" and limits[tier] < case.base_bytes:
        needed = f"this process alone has {format_bytes(case.base_bytes)} before any training, {needed}"
    changes = []
    if wish.microbatches is not None and wish.microbatches < case.batch_rows:
        count = _first_that_fits(case, replace(wish, microbatches=None), machine, limits)
        if count is not None:
            changes.append(f"allow {count.microbatches} microbatches")
    if wish.strategy == "resident":
        found = _first_that_fits(case, replace(wish, strategy="relay"), machine, limits)
        if found is not None:
            changes.append("use strategy='relay'")
    if not case.on_disk and not changes:
        found = _first_that_fits(replace(case, on_disk=True), replace(wish, strategy="relay"), machine, limits)
        if found is not None:
            changes.append("give store=DIRECTORY to keep the model on disk")
    if not changes and tier == "disk":
        changes.append("make room there, or take a lighter optimizer")
    if not changes:
        changes.append("give it more memory" if memory.limit(tier) is not None else "take a larger machine")
    return (
        f"{least.model} does not fit {there}, {format_bytes(limits[tier])}: {needed} ({least.strategy}, {least.microbatches} "
        f"microbatches), most of it for {kind}; the cheapest change: {', or '.join(changes)}"
    )


def _first_that_fits(case: Case, wish: Wish, machine: Machine, limits: Mapping[Tier, int]) -> Plan | None:
    return _Search(case, wish, machine, limits, has_budget=False).run()

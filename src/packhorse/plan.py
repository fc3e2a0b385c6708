"""The plan: how a model will be run, decided before anything is allocated.

In: a partition, a layout, a budget. Out: `Plan`: strategy, microbatches, what is kept and what is recomputed, where the stash
goes, and a bound on the memory it takes. Until machines are measured the bound is simple: it sums what may be alive at once.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from packhorse import lowering, schedule
from packhorse.errors import BudgetError, PackhorseError
from packhorse.layout import Layout
from packhorse.memory import Memory
from packhorse.partition import Partition, Segment
from packhorse.precision import Cast, Precision
from packhorse.schedule import Action
from packhorse.store import GRADIENT, MASTER
from packhorse.store.blocks import UNIT
from packhorse.units import format_bytes
from packhorse.update import AHEAD

Strategy = Literal["auto", "resident", "relay", "pipeline"]


@dataclass(frozen=True)
class Plan:
    """Decisions, and the reasons for them."""

    strategy: str
    microbatches: int
    rows: int  # of the largest microbatch, at the example's number of rows
    num_segments: int
    backward: frozenset[int]
    precision: Precision
    update: str
    kept: frozenset[int] = frozenset()  # segments whose graph is kept from forward to backward
    prefetch_bytes: int = 0
    stash_bytes: int = 0  # how much of the stash stays in host memory; the rest goes to disk
    parks: frozenset[int] = frozenset()
    casts: tuple[Cast, ...] = ()
    state_bytes: int = 0  # masters and optimizer states
    traffic: dict[str, int] = field(
        default_factory=dict
    )  # with a store on disk: bytes it takes, reads and writes a step
    peak: dict[str, int] = field(default_factory=dict)  # bound of host memory by kind
    reasons: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def actions(self, num_microbatches: int, sizes: dict[int, int]) -> list[Action]:
        """The list that trains on a batch of so many microbatches; `sizes` are the bytes a segment's FETCH brings."""
        resident = self.strategy == "resident"
        generate = schedule.resident if resident else schedule.relay
        actions = generate(self.num_segments, num_microbatches, self.backward)
        if not resident:
            actions = lowering.stash(lowering.recompute(actions, self.kept))
        actions = lowering.update(actions, num_microbatches, deferred=self.update == "deferred", parks=self.parks)
        stays = range(self.num_segments) if resident else self.kept
        actions = lowering.fetch(actions, stays)
        actions = lowering.prefetch(actions, sizes, self.prefetch_bytes + sum(sizes[s] for s in stays))
        schedule.check(actions, self.num_segments, num_microbatches, self.backward)
        return actions

    def forward_actions(self, num_segments: int, num_microbatches: int, sizes: dict[int, int]) -> list[Action]:
        """The list that evaluates or predicts."""
        actions = lowering.fetch(lowering.stash(schedule.forward(num_segments, num_microbatches)))
        actions = lowering.prefetch(actions, sizes, self.prefetch_bytes)
        schedule.check(actions, num_segments, num_microbatches, frozenset())
        return actions

    def __str__(self) -> str:
        kept = f"{len(self.kept)} kept, the others recomputed" if self.kept else "all recomputed"
        graphs = "" if self.strategy == "resident" else f"; graphs: {kept}"
        lines = [
            f"{self.strategy}: {self.num_segments} segments, {self.microbatches} microbatches of at most {self.rows} rows, "
            f"{self.precision}, {self.update} update{graphs}",
            f"memory: at most {format_bytes(self.peak_bytes)} ("
            + ", ".join(f"{kind} {format_bytes(n)}" for kind, n in self.peak.items() if n)
            + ")",
        ]
        if self.traffic:
            space, read, written = (format_bytes(self.traffic[key]) for key in ("space", "read", "written"))
            lines.append(f"disk: {space} of space; a step reads {read} and writes {written}")
        return "\n".join([*lines, *self.reasons])


@dataclass(frozen=True)
class Case:
    """What a plan is made for."""

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
    def activations(self) -> tuple[int, ...]:
        """Bytes a segment makes, at the example's rows, views not counted twice."""
        return tuple(_made_bytes(segment) for segment in self.partition.segments)

    @cached_property
    def weights(self) -> dict[int, int]:
        return {s.index: self.fetch_bytes(s) for s in self.partition.segments}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Of those, what takes memory beside the store's own: all from disk, from RAM what is cast."""
        blocks = {s.index: self.layout.blocks_of(s) for s in self.partition.segments}
        return {s: sum(b.working_nbytes for b in found if self.on_disk or b.is_cast) for s, found in blocks.items()}

    def fetch_bytes(self, segment: Segment) -> int:
        return sum(block.working_nbytes for block in self.layout.blocks_of(segment))

    @cached_property
    def backward(self) -> frozenset[int]:
        return frozenset(s.index for s in self.partition.segments if s.is_differentiable)


def choose(case: Case, strategy: str, microbatches: int | None, memory: Memory, available: int) -> Plan:
    """The first that fits: graphs kept before recomputed, few microbatches before many."""
    if strategy == "pipeline":
        raise PackhorseError(
            "strategy='pipeline' needs several processes, which this version does not run; use 'relay'"
        )
    if strategy not in ("auto", "resident", "relay"):
        raise PackhorseError(f"strategy is {strategy!r}, expected 'auto', 'resident', 'relay' or 'pipeline'")
    if microbatches is not None and (isinstance(microbatches, bool) or microbatches < 1):
        raise PackhorseError(f"microbatches is {microbatches!r}, expected a number of at least 1")
    limit = memory.limit("host")
    budget = limit if limit is not None else case.base_bytes + available
    counts = _halvings(case.batch_rows) if microbatches is None else [min(microbatches, case.batch_rows)]
    strategies = {"auto": ("relay",) if case.on_disk else ("resident", "relay")}.get(strategy, (strategy,))
    least: Plan | None = None
    for name in strategies:
        for count in counts:
            plan = _make(case, name, count)
            if plan.peak_bytes <= budget:
                return _spend(case, plan, budget if limit is not None else 0)
            if least is None or plan.peak_bytes < least.peak_bytes:
                least = plan
    assert least is not None
    found = "memory" if limit is not None else "the memory available here"
    kind = max(least.peak, key=lambda k: least.peak[k])
    raise BudgetError(
        f"{case.partition.graph.name} does not fit {found}, {format_bytes(budget)}: the smallest budget that works is "
        f"{format_bytes(least.peak_bytes)} ({least.strategy}, {least.microbatches} microbatches), most of it for {kind}; "
        + ("raise memory" if case.on_disk else "raise memory, or give store=DIRECTORY to keep the model on disk")
        + ("" if microbatches is None else f", or allow more than {microbatches} microbatches")
    )


def _halvings(rows: int) -> list[int]:
    """1, 2, 4, ... microbatches, and at last one row each."""
    return [*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows]


def _make(case: Case, strategy: str, microbatches: int) -> Plan:
    rows = math.ceil(case.batch_rows / microbatches)
    plan = Plan(
        strategy,
        microbatches,
        rows,
        len(case.partition.segments),
        case.backward,
        case.precision,
        case.update,
        parks=case.layout.parks(),
        casts=case.casts,
        state_bytes=sum(block.all_nbytes for block in case.layout.blocks),
        prefetch_bytes=_two_largest_neighbours(case.weights),
    )
    return replace(plan, peak=_bound(case, plan))


def _two_largest_neighbours(sizes: dict[int, int]) -> int:
    return max(sizes[s] + sizes.get(s + 1, 0) for s in sizes)


def _bound(case: Case, plan: Plan) -> dict[str, int]:
    """Host memory by kind, at most. What a segment makes is counted twice: once forward, once as gradients."""
    layout, share = case.layout, plan.rows / case.partition.graph.batch.rows
    resident = plan.strategy == "resident"
    made = [n * share for n in case.activations]
    store = 0 if case.on_disk else sum(block.all_nbytes for block in layout.blocks)
    sums = [
        sum(b.numel * b.kinds["master"].itemsize for b in layout.blocks_of(s) if layout.home(b) is not None)
        for s in case.partition.segments
    ]
    fresh = [
        sum(b.working_nbytes for b in layout.blocks_of(s) if layout.home(b) is not None)
        for s in case.partition.segments
    ]
    boundaries = [s.output_nbytes * share for s in case.partition.segments]
    if resident:
        gradients = sum(sums) + max(fresh)
        activations = sum(made) + max(made)
        weights = sum(case.copies.values())
        stash = 0.0
    else:
        # Of two neighbours one is summed while the other is updated. On disk, deferred gradients wait there.
        pairs = [a + b for a, b in zip(sums, [0, *sums], strict=False)]
        waiting = sum(sums) if plan.update == "deferred" and not case.on_disk else 0
        gradients = max(pairs) + max(fresh) + waiting
        activations = 2 * max(made)
        weights = _two_largest_neighbours(case.copies)
        stash = 4 * max(boundaries) if case.on_disk else (sum(boundaries) + max(boundaries)) * plan.microbatches
    kinds = max((len(b.kinds) for b in layout.blocks), default=0)
    largest = max((b.numel for b in layout.blocks if GRADIENT in b.kinds or layout.home(b) is not None), default=0)
    update = 4 * kinds * min(UNIT, largest) * 3 * AHEAD if case.on_disk else 0
    return {
        "base": case.base_bytes,
        "store": store,
        "weights": weights,
        "gradients": gradients,
        "activations": int(activations),
        "stash": int(stash),
        "update": update,
    }


def _spend(case: Case, plan: Plan, budget: int) -> Plan:
    """What the budget leaves goes to kept graphs, from the last segment on, and then to the stash."""
    if plan.strategy == "resident":
        return plan
    left, share = budget - plan.peak_bytes, plan.rows / case.partition.graph.batch.rows
    kept: list[int] = []
    for s in sorted(case.backward, reverse=True)[1:]:
        cost = int(case.activations[s] * share * plan.microbatches) + case.copies[s]
        if cost > left:
            break
        kept.append(s)
        left -= cost
    stash = max(left, 0) if case.on_disk else 1 << 62
    peak = {**plan.peak, "graphs": max(budget - plan.peak_bytes - left, 0), "stash": plan.peak["stash"] + stash}
    if not case.on_disk:
        peak["stash"] = plan.peak["stash"]
    reasons = (f"graphs of {len(kept)} segments are kept: the budget leaves room",) if kept else ()
    plan = replace(plan, kept=frozenset(kept), stash_bytes=stash, peak=peak, reasons=reasons)
    return replace(plan, traffic=_find_traffic(case, plan)) if case.on_disk else plan


def _find_traffic(case: Case, plan: Plan) -> dict[str, int]:
    """What the list of a step moves between disk and memory, in bytes."""
    layout, segments = case.layout, case.partition.segments
    boundaries = [s.output_nbytes * plan.rows // case.partition.graph.batch.rows for s in segments]
    stashed = max(sum(boundaries) * plan.microbatches - plan.stash_bytes, 0)
    read = written = stashed
    for kind, s, _ in plan.actions(plan.microbatches, case.weights):
        for block in layout.blocks_of(segments[s]) if s is not None else []:
            if kind == "FETCH":
                read += block.nbytes(MASTER)
            elif kind == "UPDATE" and layout.home(block) == s:
                read += block.all_nbytes  # what waits of its gradient included
                written += block.all_nbytes - (block.nbytes(GRADIENT) if GRADIENT in block.kinds else 0)
            elif kind == "PARK" and GRADIENT in block.kinds:
                written += block.nbytes(GRADIENT)
    kinds = [(block, kind) for block in layout.blocks for kind in block.kinds]
    space = stashed + sum(b.nbytes(kind) * (1 if kind == GRADIENT else case.versions) for b, kind in kinds)
    return {"space": space, "read": read, "written": written}


def _made_bytes(segment: Segment) -> int:
    total = 0
    for node in segment.nodes:
        shared = {result for result, _ in node.operation.aliases}
        total += sum(segment.graph.values[ref].nbytes for i, ref in enumerate(node.results) if i not in shared)
    return total

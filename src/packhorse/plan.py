"""The plan: how a model will be run, decided before anything is allocated.

In: a `Case`, a budget, a machine. Out: `Plan`: strategy, microbatches, what is kept and what is recomputed, where the stash
goes, and what all that will take. Candidates are lists of actions; each is estimated, and the fastest that fits is taken.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from packhorse import lowering, schedule
from packhorse.errors import BudgetError, PackhorseError
from packhorse.estimate import Case, Estimate, estimate
from packhorse.graph import Graph
from packhorse.layout import make_layout
from packhorse.machine import Machine, find_machine, free_bytes
from packhorse.memory import Memory, Tier, read_budget, resident_bytes
from packhorse.optimizer import Stepper
from packhorse.partition import partition
from packhorse.precision import Cast, Precision
from packhorse.schedule import Action
from packhorse.units import format_bytes, format_seconds

Strategy = Literal["auto", "resident", "relay", "pipeline"]
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Plan:
    """Decisions, what they will take, and the reasons for them."""

    model: str
    machine: str
    strategy: str
    microbatches: int
    batch_rows: int
    rows: int  # of the largest microbatch
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
    estimate: Estimate = field(default_factory=Estimate)
    reasons: tuple[str, ...] = ()

    def actions(self, num_microbatches: int, sizes: Mapping[int, int]) -> list[Action]:
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

    def forward_actions(self, num_segments: int, num_microbatches: int, sizes: Mapping[int, int]) -> list[Action]:
        """The list that evaluates or predicts."""
        actions = lowering.fetch(lowering.stash(schedule.forward(num_segments, num_microbatches)))
        actions = lowering.prefetch(actions, sizes, self.prefetch_bytes)
        schedule.check(actions, num_segments, num_microbatches, frozenset())
        return actions

    # -- for people, and for files

    def __str__(self) -> str:
        kept = f"{len(self.kept)} kept, the others recomputed" if self.kept else "all recomputed"
        graphs = "" if self.strategy == "resident" else f"; graphs: {kept}"
        found = self.estimate
        lines = [
            f"{self.strategy}: {self.num_segments} segments, {self.microbatches} microbatches of at most {self.rows} rows, "
            f"{self.precision}, {self.update} update{graphs}"
        ]
        for tier, kinds in found.kinds.items():
            if tier == "disk":
                continue
            parts = ", ".join(
                f"{kind} {format_bytes(n)}" for kind, n in sorted(kinds.items(), key=lambda i: -i[1]) if n
            )
            lines.append(f"{tier} memory: {format_bytes(found.peak[tier])} ({parts})")
        if "disk" in found.peak:
            moved = ", ".join(f"{verb} {format_bytes(found.moved.get(link, 0))}" for link, verb in _VERBS.items())
            lines.append(f"disk: {format_bytes(found.peak['disk'])} of space; a step {moved}")
        lines.append(
            f"time: {format_seconds(found.seconds)} a step on {self.machine}; "
            + ", ".join(f"{lane} {format_seconds(s)}" for lane, s in sorted(found.busy.items(), key=lambda i: -i[1]))
        )
        return "\n".join([*lines, *self.reasons])

    def compare(self, seconds: float, peak_bytes: int) -> str:
        """One line: planned against measured, with the largest part of what deviates."""
        planned, tier = self.estimate, "host"
        parts = [
            f"time {format_seconds(planned.seconds)} planned, {format_seconds(seconds)} measured",
            f"memory {format_bytes(planned.peak[tier])} planned, {format_bytes(peak_bytes)} measured",
        ]
        for name, found, wanted in (("time", seconds, planned.seconds), ("memory", peak_bytes, planned.peak[tier])):
            if abs(found / wanted - 1) > 0.1:
                shares = planned.busy if name == "time" else planned.kinds[tier]
                largest = max(shares, key=lambda kind: shares[kind])
                parts.append(f"{name} is off by {found / wanted - 1:+.0%}, most of what was planned is {largest}")
        return "; ".join(parts)

    def to_json(self) -> str:
        """Text that `read_plan` reads again, and that a person may edit: choices first, what they take last."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["casts"] = [[cast.what, str(cast.dtype).removeprefix("torch."), cast.rule] for cast in self.casts]
        fields["estimate"] = asdict(self.estimate)
        for name in ("kept", "backward", "parks"):
            fields[name] = sorted(fields[name])
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        try:
            fields = json.loads(text)
            for name in ("kept", "backward", "parks"):
                fields[name] = frozenset(int(s) for s in fields[name])
            fields["casts"] = tuple(Cast(what, getattr(torch, dtype), rule) for what, dtype, rule in fields["casts"])
            fields["estimate"] = Estimate(**fields["estimate"])
            fields["reasons"] = tuple(fields["reasons"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackhorseError(
                f"this is no plan as `Plan.to_json` writes it: {type(error).__name__}: {error}"
            ) from None


_VERBS = {"read": "reads", "write": "writes"}


# -- choosing


@dataclass(frozen=True)
class Wish:
    """What the user fixed; None: to be chosen."""

    strategy: str = "auto"
    microbatches: int | None = None
    kept: int | None = None  # how many graphs to keep

    def __post_init__(self) -> None:
        if self.strategy == "pipeline":
            raise PackhorseError(
                "strategy='pipeline' needs several processes, which this version does not run; use 'relay'"
            )
        if self.strategy not in ("auto", "resident", "relay"):
            raise PackhorseError(f"strategy is {self.strategy!r}, expected 'auto', 'resident', 'relay' or 'pipeline'")
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or count < 1):
            raise PackhorseError(f"microbatches is {count!r}, expected a number of at least 1")


def choose(case: Case, wish: Wish, memory: Memory, machine: Machine) -> Plan:
    """The fastest plan that fits. Without a budget a relay keeps nothing it need not keep."""
    limits = _find_limits(case, memory, machine)
    has_budget = any(memory.limit(tier) is not None for tier in ("host", "device"))
    least: Plan | None = None
    best: Plan | None = None
    for plan in _candidates(case, wish, machine):
        if not _fits(plan, limits):
            least = plan if least is None or _excess(plan, limits) < _excess(least, limits) else least
            continue
        if has_budget or wish.strategy == "auto":
            plan = _spend(case, plan, machine, limits)
        if best is None or plan.estimate.seconds < 0.99 * best.estimate.seconds:
            best = plan
    if best is not None:
        return replace(best, reasons=_explain(case, best, limits))
    assert least is not None
    raise BudgetError(_refuse(case, least, wish, memory, limits))


def _find_limits(case: Case, memory: Memory, machine: Machine) -> dict[Tier, int]:
    limits: dict[Tier, int] = {}
    for tier, there in machine.memory.items():
        limit = memory.limit(tier)
        if limit is None:
            limit = case.base_bytes + free_bytes(machine) if tier == "host" else there
        limits[tier] = limit
    if limits["host"] < case.base_bytes:
        raise BudgetError(
            f"memory is {format_bytes(limits['host'])}, but this process already has {format_bytes(case.base_bytes)} before "
            f"any training; give at least {format_bytes(2 * case.base_bytes)}"
        )
    return limits


def _candidates(case: Case, wish: Wish, machine: Machine) -> Iterator[Plan]:
    counts = [min(wish.microbatches, case.batch_rows)] if wish.microbatches else _halvings(case.batch_rows)
    strategies = {"auto": ("relay",) if case.on_disk else ("resident", "relay")}.get(wish.strategy, (wish.strategy,))
    for strategy in strategies:
        for count in counts:
            yield _make(case, strategy, count, machine)


def _halvings(rows: int) -> list[int]:
    """1, 2, 4, ... microbatches, and at last one row each."""
    return [*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows]


def _make(case: Case, strategy: str, microbatches: int, machine: Machine) -> Plan:
    plan = Plan(
        case.partition.graph.name,
        machine.name,
        strategy,
        microbatches,
        case.batch_rows,
        math.ceil(case.batch_rows / microbatches),
        len(case.partition.segments),
        case.backward,
        case.precision,
        case.update,
        parks=case.parks,
        casts=case.casts,
        state_bytes=sum(block.all_nbytes for block in case.layout.blocks),
        prefetch_bytes=_two_largest_neighbours(case.weights),
        stash_bytes=0 if case.on_disk else UNLIMITED,
    )
    return _price(case, plan, machine)


def _two_largest_neighbours(sizes: Mapping[int, int]) -> int:
    return max(sizes[s] + sizes.get(s + 1, 0) for s in sizes)


def _price(case: Case, plan: Plan, machine: Machine) -> Plan:
    actions = plan.actions(plan.microbatches, case.weights)
    resident = plan.strategy == "resident"
    found = estimate(
        case,
        actions,
        machine,
        rows=plan.rows,
        resident=resident,
        kept=plan.kept,
        stash_bytes=plan.stash_bytes,
    )
    return replace(plan, estimate=found)


def _fits(plan: Plan, limits: Mapping[Tier, int]) -> bool:
    return _excess(plan, limits) <= 0


def _excess(plan: Plan, limits: Mapping[Tier, int]) -> int:
    return max(plan.estimate.peak.get(tier, 0) - limit for tier, limit in limits.items())


def _spend(case: Case, plan: Plan, machine: Machine, limits: Mapping[Tier, int]) -> Plan:
    """What the budget leaves goes to kept graphs, from the last segment on, and then to the stash."""
    if plan.strategy == "resident":
        return plan
    order = sorted(case.backward, reverse=True)[1:]
    fewest, most = 0, len(order)
    best = plan
    while fewest < most:
        count = (fewest + most + 1) // 2
        tried = _price(case, replace(plan, kept=frozenset(order[:count])), machine)
        if _fits(tried, limits):
            fewest, best = count, tried
        else:
            most = count - 1
    if case.on_disk:
        left = limits["host"] - best.estimate.peak["host"]
        tried = _price(case, replace(best, stash_bytes=max(left, 0)), machine)
        best = tried if _fits(tried, limits) else best
    return best if best.estimate.seconds <= plan.estimate.seconds else plan


def _explain(case: Case, plan: Plan, limits: Mapping[Tier, int]) -> tuple[str, ...]:
    reasons = []
    if plan.kept:
        reasons.append(f"graphs of {len(plan.kept)} segments are kept: the budget leaves room")
    if plan.estimate.bottleneck != "compute":
        reasons.append(f"a step waits most for {plan.estimate.bottleneck}: more rows a step would hide it")
    elif plan.strategy == "relay" and len(plan.kept) < len(case.backward) - 1:
        reasons.append("more memory would make it faster: more graphs could be kept instead of computed again")
    return tuple(reasons)


def _refuse(case: Case, least: Plan, wish: Wish, memory: Memory, limits: Mapping[Tier, int]) -> str:
    tier = max(limits, key=lambda t: least.estimate.peak.get(t, 0) - limits[t])
    kinds = least.estimate.kinds[tier]
    kind = max(kinds, key=lambda k: kinds[k])
    found = f"{tier} memory" if memory.limit(tier) is not None else f"the {tier} memory available here"
    changes = ["raise memory"]
    if not case.on_disk:
        changes.append("give store=DIRECTORY to keep the model on disk")
    if wish.microbatches is not None and wish.microbatches < case.batch_rows:
        changes.append(f"allow more than {wish.microbatches} microbatches")
    return (
        f"{case.partition.graph.name} does not fit {found}, {format_bytes(limits[tier])}: the smallest budget that works is "
        f"{format_bytes(least.estimate.peak[tier])} ({least.strategy}, {least.microbatches} microbatches), most of it for "
        f"{kind}; " + ", or ".join(changes)
    )


# -- without a trainer


def make_plan(
    graph: Graph,
    machine: Machine | str | Path | None = None,
    *,
    memory: int | str | Memory | None = None,
    strategy: Strategy = "auto",
    microbatches: int | None = None,
    on_disk: bool = False,
    durability: str = "process",
    update: Literal["eager", "deferred"] = "eager",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Plan:
    """How a captured model would be trained on a machine, here or elsewhere. Needs neither its memory nor the machine."""
    machine = find_machine(machine)
    outline = _Outline(graph)
    stepper = Stepper(optimizer([p for _, p in outline.named_parameters()]), outline)  # type: ignore[arg-type]
    part = partition(graph)
    deferred = update == "deferred" or graph.precision == "fp16"
    layout = make_layout(outline, part, stepper, on_disk=on_disk, deferred=deferred)  # type: ignore[arg-type]
    case = Case(
        part,
        layout,
        graph.batch.rows,
        graph.precision,
        "deferred" if deferred else "eager",
        on_disk,
        resident_bytes() if machine.is_here else TYPICAL_BASE,
        1 if durability == "none" else 2,
    )
    return choose(case, Wish(strategy, microbatches), read_budget(memory, machine.device), machine)


TYPICAL_BASE = 400 << 20  # of a process that has loaded torch


class _Outline:
    """A model of which only the graph is there: its parameters and buffers by name, without values."""

    def __init__(self, graph: Graph):
        self._parameters = {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.trainable)
            for name, p in graph.parameters.items()
        }
        self._buffers = {n: torch.empty(b.shape, dtype=b.dtype, device="meta") for n, b in graph.buffers.items()}

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._parameters.items()

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        return self._buffers.items()

"""The plan: how a model will be run, decided before anything is allocated.

`Plan` holds the decisions, what they will take, and the reasons for them. It makes the list of actions of any batch, prints as
a page, and goes to a file and back. `search` finds it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from packhorse import lowering, schedule
from packhorse.errors import PlanError
from packhorse.estimate import Estimate
from packhorse.graph import Graph
from packhorse.memory import Tier
from packhorse.precision import Cast, Precision
from packhorse.ranks.links import Links
from packhorse.ranks.shape import ALONE, Ranks
from packhorse.ranks.traffic import Traffic
from packhorse.schedule import Action
from packhorse.units import format_bytes, format_seconds

Strategy = Literal["auto", "resident", "relay", "pipeline"]

# What a person may decide instead of the search, by editing a plan's file.
DECISIONS = (
    "strategy",
    "microbatches",
    "cuts",
    "kept",
    "prefetch_bytes",
    "updates_ahead",
    "stash_bytes",
    "ranks",
)


@dataclass(frozen=True)
class Measured:
    """What steps really took, by the names the estimate uses."""

    seconds: float
    compute: float  # seconds of them in forward and backward
    peak: Mapping[Tier, int]
    kinds: Mapping[Tier, Mapping[str, int]]  # what was counted of the peak


@dataclass(frozen=True)
class Plan:
    """Decisions, what they will take, and the reasons for them."""

    model: str
    fingerprint: str  # of the graph it was made for
    machine: str
    strategy: str
    microbatches: int
    batch_rows: int
    rows: int  # of the largest microbatch
    cuts: tuple[int, ...]  # indices of the nodes that begin a segment
    backward: frozenset[int]
    precision: Precision
    update: str
    on_disk: bool
    rolls: bool = False  # one version on disk: an interrupted step is finished instead of undone
    kept: frozenset[int] = frozenset()  # segments whose graph is kept from forward to backward
    prefetch_bytes: int = 0
    updates_ahead: int = 1  # blocks whose gradients may wait while another is updated
    stash_bytes: int = 0  # how much of the stash stays in host memory; the rest goes to disk
    parks: frozenset[int] = frozenset()
    ranks: Ranks = ALONE
    piece_bytes: int = 0  # of sums over replicas
    pieces: tuple[tuple[float, ...], ...] = ()  # of each segment's gradients, as parts of a whole one
    pace: tuple[float, ...] = ()  # for each segment: pieces that pass over the network while it runs backward
    overlap: bool = True  # of movement with compute
    casts: tuple[Cast, ...] = ()
    state_bytes: int = 0  # masters and optimizer states
    estimate: Estimate = field(default_factory=Estimate)
    plain: Estimate = field(default_factory=Estimate)  # of the ordinary loop, everything on the device
    plain_microbatches: int = 1  # the fewest with which that fits, or one row each
    plain_fits: bool = False
    reasons: tuple[str, ...] = ()
    pinned: tuple[str, ...] = DECISIONS  # what of it stays when it is read from a file and planned anew

    @property
    def num_segments(self) -> int:
        return len(self.cuts) + 1

    @property
    def is_resident(self) -> bool:
        """Whether parameters and graphs stay in memory, as in the ordinary loop."""
        return self.strategy == "resident" or (self.strategy == "pipeline" and not self.ranks.group)

    def actions(self, num_microbatches: int, sizes: Mapping[int, int], links: Links | None = None) -> list[Action]:
        """The list that trains on a batch of so many microbatches; `sizes` are the bytes a segment's FETCH brings.

        With `links` to other ranks it is that of one rank, and the microbatches are those of its replica.
        """
        if self.strategy == "pipeline":
            assert links is not None
            actions = schedule.pipeline(
                links.place,
                links.stages,
                self.ranks.pipeline,
                num_microbatches,
                self.backward,
                self.ranks.ahead or 0,
                splits=self.ranks.order == "zero-bubble",
                group=self.ranks.group or 1,
                gathers=self.ranks.data > 1,
            )
        else:
            generate = schedule.resident if self.is_resident else schedule.relay
            actions = generate(self.num_segments, num_microbatches, self.backward)
        if not self.is_resident:
            actions = lowering.stash(lowering.recompute(actions, self.kept))
        actions = lowering.update(actions, num_microbatches, deferred=self.update == "deferred", parks=self.parks)
        if links is not None:
            actions = self._connect(actions, links.traffic, links)
            actions = lowering.share(actions, links.passes, links.takes, links.tells, links.hears)
        if self.ranks.data > 1:
            actions = lowering.reduce(actions, self.pieces, self.pace if self.overlap else ())
        if self.rolls:
            actions = lowering.roll_forward(actions)
        run_here = [s for s in range(self.num_segments) if links is None or s in links.local]
        stays = run_here if self.is_resident else sorted(self.kept)
        actions = lowering.fetch(actions, stays)
        return lowering.prefetch(actions, sizes, self.prefetch_bytes + sum(sizes[s] for s in stays))

    def _connect(self, actions: list[Action], traffic: Traffic, links: Links) -> list[Action]:
        """What is exchanged with other ranks."""
        receives, sends = traffic.receivers(), traffic.senders()
        ahead = 2 * len(traffic.segments_of(links.place)) * (1 + (self.ranks.ahead or 0)) if self.overlap else 0
        connected = lowering.exchange(actions, receives, sends, distance=ahead)
        if traffic.partition.graph.mode == "predict":
            return connected
        return lowering.tell_losses(connected, len(traffic.owners) - 1)

    def forward_actions(
        self,
        num_segments: int,
        num_microbatches: int,
        sizes: Mapping[int, int],
        links: Links | None = None,
        traffic: Traffic | None = None,
    ) -> list[Action]:
        """The list that evaluates or predicts."""
        if links is None or traffic is None or self.ranks.pipeline == 1:
            actions = lowering.stash(schedule.forward(num_segments, num_microbatches))
            if links is not None and traffic is not None:
                actions = self._connect(actions, traffic, links)
            return lowering.prefetch(lowering.fetch(actions), sizes, self.prefetch_bytes)
        local = traffic.segments_of(links.place)
        actions = [Action("F", s, k) for k in range(num_microbatches) for s in local]
        actions = lowering.fetch(self._connect(actions, traffic, links), local)
        return lowering.prefetch(actions, sizes, sum(sizes[s] for s in local))

    # -- for people

    def __str__(self) -> str:
        found, graphs = self.estimate, ""
        if self.strategy == "relay":
            graphs = f", graphs of {len(self.kept)} kept" if self.kept else ", graphs computed again for backward"
        lines = {
            "how": f"{self.strategy}, {self.num_segments} segments, {self.microbatches} microbatches of at most {self.rows} "
            f"rows, {self.precision}, {self.update} update{graphs}",
            **({"ranks": str(self.ranks)} if self.ranks.size > 1 else {}),
        }
        for tier in ("device", "host"):
            if tier in found.peak:
                lines[f"{tier} memory"] = f"{format_bytes(found.peak[tier])}: {_list(found.kinds[tier], format_bytes)}"
        if "disk" in found.peak:
            read, written = (format_bytes(found.moved.get(link, 0)) for link in ("read", "write"))
            kept = ", one version and a spare: a step that is interrupted is finished on resume" if self.rolls else ""
            lines["disk"] = (
                f"{format_bytes(found.peak['disk'])} of space{kept}; a step reads {read} and writes {written}"
            )
        links = [f"{format_bytes(found.moved[k])} {k}" for k in ("up", "down") if k in found.moved]
        if links:
            lines["link"] = f"a step moves {', '.join(links)}"
        if "network" in found.moved:
            lines["network"] = f"a step sends {format_bytes(found.moved['network'])} to other ranks"
        speed = f", {self.batch_rows / found.seconds:.3g} rows a second" if found.seconds else ""
        lines["time"] = f"{format_seconds(found.seconds)} a step{speed}; busy: {_list(found.busy, format_seconds)}"
        shown = [f"{name + ':':<15} {text}" for name, text in lines.items()]
        heading = f"{self.model} on {self.machine}, {self.batch_rows} rows a batch"
        return "\n".join([heading, *shown, *(f"- {reason}" for reason in self.reasons)])

    def compare(self, found: "Measured") -> str:
        """One line: planned against measured, by tier and in seconds; what deviates by more than a tenth is explained."""
        planned = self.estimate
        parts = [_beside("time", planned.seconds, found.seconds, format_seconds)]
        if _deviates(planned.seconds, found.seconds):
            compute = planned.busy.get("compute", 0.0)
            wanted_times = {"compute": compute, "update and waiting": planned.seconds - compute}
            times = {"compute": found.compute, "update and waiting": found.seconds - found.compute}
            parts[0] += f": {_farthest_off(wanted_times, times, format_seconds)}"
        for tier, peak in found.peak.items():
            wanted = planned.peak.get(tier, 0)
            text = _beside(f"{tier} memory", wanted, peak, format_bytes)
            if _deviates(wanted, peak):
                text += (
                    f": {_farthest_off(*_group(planned.kinds.get(tier, {}), found.kinds[tier], peak), format_bytes)}"
                )
            parts.append(text)
        return "; ".join(parts)

    # -- for files

    def to_json(self) -> str:
        """Text that `from_json` reads again, and that a person may edit: what `pinned` names stays as it is there."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["casts"] = [[cast.what, str(cast.dtype).removeprefix("torch."), cast.rule] for cast in self.casts]
        for name in ("estimate", "plain", "ranks"):
            fields[name] = asdict(fields[name])
        for name in ("kept", "backward", "parks"):
            fields[name] = sorted(fields[name])
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        try:
            fields = json.loads(text)
            for name in ("kept", "backward", "parks"):
                fields[name] = frozenset(int(s) for s in fields[name])
            for name in ("cuts", "reasons", "pinned", "pace"):
                fields[name] = tuple(fields[name])
            fields["pieces"] = tuple(tuple(pieces) for pieces in fields["pieces"])
            fields["casts"] = tuple(Cast(what, getattr(torch, dtype), rule) for what, dtype, rule in fields["casts"])
            fields["estimate"], fields["plain"] = (Estimate(**fields[name]) for name in ("estimate", "plain"))
            fields["ranks"] = Ranks(**fields["ranks"])
            plan = cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"this is no plan as `Plan.to_json` writes it: {type(error).__name__}: {error}") from None
        for name in plan.pinned:
            if name not in DECISIONS:
                raise PlanError(
                    f"the plan pins {name!r}, which is no decision; expected some of {', '.join(DECISIONS)}"
                )
        return plan


def read_plan(plan: "Plan | str | Path", graph: Graph) -> Plan:
    """A plan, or the file of one, that was made for this very graph."""
    if not isinstance(plan, Plan):
        try:
            text = Path(plan).read_text()
        except OSError as error:
            raise PlanError(f"no plan can be read from {plan}: {error.strerror}") from None
        plan = Plan.from_json(text)
    if plan.fingerprint != find_fingerprint(graph):
        raise PlanError(
            f"the plan was made for another model ({plan.model}, {plan.batch_rows} rows, {plan.precision}; its graph differs "
            f"from that of {graph.name}, {graph.batch.rows} rows, {graph.precision}); make one for this model"
        )
    return plan


def find_fingerprint(graph: Graph) -> str:
    """The same for graphs that a plan fits equally: same parameters, operations, rows and precision."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in graph.parameters.items():
        digest.update(f"{name} {parameter.shape} {parameter.dtype} {parameter.trainable};".encode())
    for node in graph.nodes:
        digest.update(f"{node.operation.target} {node.operands};".encode())
    digest.update(f"{graph.mode} {graph.batch.rows} {graph.precision}".encode())
    return digest.hexdigest()


def _list(amounts: Mapping[str, Any], show: Any) -> str:
    """The largest first; what is below a hundredth of all is left out."""
    least = sum(amounts.values()) / 100
    return ", ".join(f"{name} {show(n)}" for name, n in sorted(amounts.items(), key=lambda i: -i[1]) if n > least)


def _deviates(planned: float, found: float) -> bool:
    return abs(found - planned) > 0.1 * planned


def _beside(name: str, planned: float, found: float, show: Any) -> str:
    off = f" ({found / planned - 1:+.0%})" if planned else ""
    return f"{name} {show(planned)} planned, {show(found)} measured{off}"


def _group(planned: Mapping[str, int], found: Mapping[str, int], peak: int) -> tuple[dict[str, int], dict[str, int]]:
    """What is counted by kind, and all the rest as one."""
    rest = "activations and the process itself"
    return (
        {**{k: planned.get(k, 0) for k in found}, rest: sum(n for k, n in planned.items() if k not in found)},
        {**found, rest: peak - sum(found.values())},
    )


def _farthest_off(planned: Mapping[str, Any], found: Mapping[str, Any], show: Any) -> str:
    kind = max(found, key=lambda k: abs(found[k] - planned.get(k, 0)))
    return f"{kind} {show(planned.get(kind, 0))} planned, {show(found[kind])} found"

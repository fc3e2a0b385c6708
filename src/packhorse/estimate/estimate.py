"""The estimate: walks the very list that will run, on a machine, without running it.

In: a `Case`, a list of actions, a `Machine`. Out: `Estimate`: seconds a step, bytes of each tier by kind at the peak, bytes
over each link, and what a step waits for most. The ranks of a pipeline are walked side by side, each as far as it has its mail.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.case import Case, master_bytes
from packhorse.estimate.walk import Choices, Mail, Walk
from packhorse.machine import Machine
from packhorse.memory import Tier
from packhorse.price import price_update
from packhorse.schedule import Action

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

    def extended(self, before: "Estimate", times: float, seconds: float) -> "Estimate":
        """By so many times what it does more than the one `before`."""

        def extend(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
            return {key: n + type(n)(times * (n - then.get(key, 0))) for key, n in now.items()}

        return replace(
            self,
            seconds=seconds,
            moved=extend(self.moved, before.moved),
            busy=extend(self.busy, before.busy),
        )


def estimate(
    case: Case,
    actions: Sequence[Action],
    machine: Machine,
    choices: Choices,
    limits: Mapping[Tier, int] | None = None,
) -> Estimate:
    """With `limits` the walk ends where one is exceeded: by how much is not known then, nor how long a step takes."""
    (found,) = estimate_together([case], [actions], machine, choices, limits)
    return found


def estimate_together(
    cases: Sequence[Case],
    lists: Sequence[Sequence[Action]],
    machine: Machine,
    choices: Choices,
    limits: Mapping[Tier, int] | None = None,
) -> list[Estimate]:
    """Of all ranks of one replica, which wait for each other. Where one exceeds a limit all end."""
    mail: Mail = {}
    walks = [Walk(case, machine, choices, limits or {}, mail) for case in cases]
    under_way = {i: walk.walk(actions) for i, (walk, actions) in enumerate(zip(walks, lists, strict=True))}
    waits: dict[int, Hashable] = {}
    while under_way and not any(walk.tally.is_over for walk in walks):
        before = dict(waits)
        for i, walk in list(under_way.items()):
            try:
                waits[i] = next(walk)
            except StopIteration:
                del under_way[i]
                waits.pop(i, None)
        assert waits != before or not waits, f"all ranks wait for each other: {waits}"
    return [_read(walk) for walk in walks]


def _read(walk: Walk) -> Estimate:
    """Of the last step."""
    lanes, tally, (started, moved, busy) = walk.lanes, walk.tally, walk.started
    moved = {link: n - moved.get(link, 0) for link, n in lanes.moved.items()}
    busy = {lane: seconds - busy.get(lane, 0.0) for lane, seconds in lanes.busy.items()}
    waiting = max(busy, key=lambda lane: busy[lane], default="compute")
    return Estimate(lanes.now - started, dict(tally.peak), dict(tally.at_peak), moved, busy, waiting)


def estimate_standing(case: Case, machine: Machine, choices: Choices) -> Estimate:
    """What is there before a step begins, and stays."""
    return estimate(case, [], machine, choices)


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

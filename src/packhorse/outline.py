"""Plans without a trainer: of a model of which only the graph is there, for any machine and any number of ranks.

In: a graph, a machine, a budget. Out: a `Plan`, as a trainer would find it there; with several ranks, that of the first.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from packhorse.arrange import arrange
from packhorse.case import Case
from packhorse.errors import BudgetError, MachineError, PlanError
from packhorse.graph import Graph
from packhorse.layout import make_layout
from packhorse.machine import Machine, find_machine
from packhorse.memory import TYPICAL, Memory, read_budget, resident_bytes, settle
from packhorse.optimizer import Stepper
from packhorse.partition import Partition
from packhorse.plan import Plan, Strategy, read_plan
from packhorse.ranks.links import Links
from packhorse.ranks.shape import ALONE, Ranks
from packhorse.search import Wish, choose
from packhorse.units import parse_rate


def make_plan(
    graph: Graph,
    machine: Machine | str | Path | None = None,
    *,
    memory: int | str | Memory | None = None,
    strategy: Strategy = "auto",
    microbatches: int | None = None,
    on_disk: bool | None = None,
    durability: str = "process",
    update: Literal["eager", "deferred"] = "eager",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    plan: Plan | str | Path | None = None,
    ranks: int | Ranks = 1,
    network: str | float | None = None,
) -> Plan:
    """How a captured model would be trained on a machine, here or elsewhere. Needs neither its memory nor the machine.

    `on_disk` says where the model lives; None: in host memory if it fits there, else on disk. What `plan`, an earlier plan or
    its file, pins is respected. `ranks`: so many such machines, or an arrangement of them; `network`: how fast they talk to
    each other, such as 1Gbit, where the machine does not say.
    """
    machine = find_machine(machine)
    if network is not None:
        rate = parse_rate(network)
        if not rate > 0:
            raise MachineError(f"network is {network!r}, expected a rate above 0, such as 1Gbit")
        machine = machine.linked(rate, machine.latency)
    outline = Outline(graph)
    stepper = Stepper(optimizer([p for _, p in outline.named_parameters()]), outline)  # type: ignore[arg-type]  # names are all it asks for
    wish = Wish(strategy, microbatches)
    if plan is not None:
        plan = read_plan(plan, graph)
        if on_disk not in (None, plan.on_disk):
            raise PlanError(
                f"the plan is for a model {'on disk' if plan.on_disk else 'in RAM'}, but the other is asked"
            )
        wish, on_disk = wish.pinned_to(plan), plan.on_disk
        ranks = wish.ranks if wish.ranks != ALONE else ranks
    size = ranks.size if isinstance(ranks, Ranks) else ranks
    budget, base = read_budget(memory, machine.device), TYPICAL
    if machine.is_here:
        settle()
        base = resident_bytes()

    def case_at(on_disk: bool, part: Partition, wish: Wish, links: Links | None) -> Case:
        deferred = update == "deferred" or graph.precision == "fp16"
        in_parts = wish.strategy == "relay" and wish.ranks.data > 1
        layout = make_layout(
            outline,  # type: ignore[arg-type]  # likewise
            part,
            stepper,
            on_disk=on_disk,
            deferred=deferred,
            local=None if links is None else links.local,
            part=(0, wish.ranks.data) if in_parts else (0, 1),
        )
        return Case(
            part,
            layout,
            graph.batch.rows,
            graph.precision,
            "deferred" if deferred else "eager",
            on_disk,
            base,
            versions=1 if durability == "none" else 2,
            may_roll=durability != "none" and size == 1,
            stepper=stepper,
            ranks=wish.ranks,
            links=links,
        )

    def find(on_disk: bool, *, explain: bool = True) -> Plan:
        if size == 1:
            return choose(
                graph, lambda part: case_at(on_disk, part, wish, None), wish, budget, machine, explain=explain
            )[1]
        shape, updated = ranks if isinstance(ranks, Ranks) else None, frozenset(stepper.groups)
        return arrange(graph, lambda *given: case_at(on_disk, *given), updated, wish, budget, machine, size, shape)[2]

    if on_disk is not None:
        return find(on_disk)
    with contextlib.suppress(BudgetError):
        return find(False, explain=False)
    return find(True)


class Outline:
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

"""Programs and tasks: what an executor is given.

A `Program` is a partition and the list of actions that runs it, made once; a `Task` is what one walk of the list works on.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packhorse.errors import NumericsError
from packhorse.gradient import Gradient
from packhorse.graph import Ref
from packhorse.optimizer import Group
from packhorse.partition import Partition, Rest
from packhorse.ranks.traffic import Traffic
from packhorse.schedule import Action


@dataclass(frozen=True)
class Program:
    """A partition and the list of actions that runs it; with the traffic between ranks, if they share it."""

    partition: Partition
    actions: Sequence[Action]
    traffic: Traffic | None = None
    piece_bytes: int = 0  # of sums over replicas; 0: each block is one

    @cached_property
    def kept(self) -> frozenset[tuple[int, int]]:
        """Forwards whose graph lives until backward: no recomputation comes between."""
        following: dict[tuple[int, int], str] = {}
        kept = set()
        for kind, s, k in reversed(self.actions):
            if s is None or k is None:
                continue
            if kind == "F" and following.get((s, k)) == "B":
                kept.add((s, k))
            if kind in ("F", "R", "B"):
                following[s, k] = kind
        return frozenset(kept)

    @cached_property
    def split(self) -> frozenset[int]:
        """Segments whose backward leaves the gradients of their parameters for later."""
        return frozenset(s for kind, s, _ in self.actions if kind == "W" and s is not None)

    @cached_property
    def uses(self) -> defaultdict[int, Counter[str]]:
        """By microbatch, how often each value is read by a forward, by a recomputation, or to be sent."""
        uses: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for kind, s, k in self.actions:
            if s is None or k is None:
                continue
            if kind in ("F", "R"):
                uses[k].update(self.partition.segments[s].inputs)
            if kind == "R":
                uses[k].update(snapshot_name(s, name) for name in self.written(s))
            if kind == "SEND" and self.traffic is not None:
                for number in self.traffic.sent_by(s, backward=False):
                    uses[k].update(self.traffic.messages[number].names)
        return uses

    @cached_property
    def results(self) -> frozenset[str]:
        """Values the caller wants: the loss, or what the model returns."""
        graph = self.partition.graph
        return frozenset(graph.values[o].name for o in graph.outputs if isinstance(o, Ref))

    def written(self, s: int) -> list[str]:
        """Buffers that a segment advances."""
        graph = self.partition.graph
        return [name for name in self.partition.segments[s].buffers if graph.buffers[name].written]


@dataclass
class Microbatch:
    """A slice of the batch: its tensors by name, its rows, its share of the loss, its number in the whole batch."""

    inputs: dict[str, Tensor]
    rows: int
    share: float
    number: int


class Record(NamedTuple):
    """One action as it ran, in seconds since the first."""

    action: Action
    start: float
    end: float


@dataclass
class Task:
    """What one walk of the list works on."""

    program: Program
    microbatches: Sequence[Microbatch]
    step: int
    training: bool = False
    deferred: bool = False
    groups: Sequence[Group] = ()
    clip_norm: float | None = None
    loss_scale: float = 1.0
    values: list[dict[str, Any]] = field(default_factory=list)  # per microbatch: tensors, or arrivals of them
    gradients: list[dict[str, Any]] = field(default_factory=list)
    letters: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # gradients that come, by segment
    remaining: list[Counter[str]] = field(default_factory=list)
    restored: Counter[tuple[str, int]] = field(default_factory=Counter)  # readers that a stashed value came back for
    results: list[dict[str, Tensor]] = field(default_factory=list)
    graphs: dict[tuple[int, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=dict)
    rests: dict[tuple[int, int], Rest] = field(default_factory=dict)  # what backwards left for later
    constants: dict[str, Tensor] = field(default_factory=dict)  # buffers that live in memory
    buffers: dict[str, Tensor] = field(default_factory=dict)  # the written ones of them, as this step advances them
    sums: dict[tuple[str, int], Gradient] = field(default_factory=dict)  # (block, segment) -> gradient so far
    norms: dict[str, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None  # of the gradients, before an update
    norm: float | None = None
    overflowed: bool = False
    loss: Tensor | None = None  # of all ranks, once it is known
    losses_are_finite: bool = False  # once they were asked for
    intent: Mapping[str, Any] = field(default_factory=dict)  # with one version: what finishing the step would take
    batch: Sequence[Tensor] = ()  # likewise
    times: "array[float]" = field(default_factory=lambda: array("d"))

    def refuse_non_finite_losses(self) -> None:
        """Those that are known here."""
        for microbatch, results in zip(self.microbatches, self.results, strict=True):
            for loss in results.values():
                if not torch.isfinite(loss):
                    raise NumericsError(
                        f"step {self.step}: the loss of microbatch {microbatch.number} is {float(loss)}; nothing was "
                        "updated. Look at that part of the batch, or lower the learning rate"
                    )

    def records(self) -> list[Record]:
        pairs = zip(self.times[::2], self.times[1::2], strict=True)
        origin = self.times[0] if self.times else 0.0
        return [Record(a, s - origin, e - origin) for a, (s, e) in zip(self.program.actions, pairs, strict=False)]


def snapshot_name(segment: int, buffer: str) -> str:
    """A buffer as it was before a forward, for the recomputation."""
    return f"{buffer} before segment {segment}"

"""Layout: which block of the store holds which tensor, and which segments use it.

In: the model, its graph and partition, the optimizer. Out: `Layout`. The parameters that only one segment uses lie together in
that segment's blocks; one that several segments use, tied, has a block of its own, updated after the earliest of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.graph import Graph
from packhorse.optimizer import StateKind, Stepper
from packhorse.partition import Partition, Segment
from packhorse.store import GRADIENT, MASTER, Block, Slot, make_block


@dataclass(frozen=True)
class Layout:
    """Blocks in order. `users` are the segments of the training graph that read a block, from first to last.

    `differentiable` are the segments that have a backward.
    """

    blocks: tuple[Block, ...]
    users: Mapping[str, tuple[int, ...]]
    states: Mapping[
        str, Mapping[str, tuple[StateKind, ...]]
    ]  # block -> tensor -> optimizer states; none if not updated
    differentiable: frozenset[int]

    @cached_property
    def places(self) -> dict[str, tuple[Block, Slot]]:
        return {slot.name: (block, slot) for block in self.blocks for slot in block.slots}

    def blocks_of(self, segment: Segment) -> list[Block]:
        """What has to be fetched to run a segment of any graph of the model."""
        found = {
            self.places[name][0].name: self.places[name][0]
            for name in (*segment.parameters, *segment.buffers)
            if name in self.places
        }
        return list(found.values())

    def home(self, block: Block) -> int | None:
        """The segment after whose backward a block is updated, the last that reads it; None if it never is."""
        return block.users[0] if block.users else None

    def parks(self) -> frozenset[int]:
        """The segments whose gradient of a block waits for that of an earlier one."""
        homes = {block.name: self.home(block) for block in self.blocks}
        return frozenset(s for name, home in homes.items() if home is not None for s in self.users[name] if s > home)


def make_layout(model: nn.Module, partition: Partition, stepper: Stepper, *, on_disk: bool, deferred: bool) -> Layout:
    graph = partition.graph
    users = _find_users(partition)
    differentiable = frozenset(s.index for s in partition.segments if s.is_differentiable)
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    groups: dict[Any, list[str]] = {}
    for name in graph.parameters:
        used = users.get(name, ())
        place: Any = used if len(used) == 1 else (name,)  # shared and unused ones have a block each
        working = graph.parameters[name].working
        groups.setdefault((place, _kinds(graph, stepper, name), working, name in stepper.groups), []).append(name)
    for name, buffer in graph.buffers.items():
        if not buffer.written and users.get(name):
            place = users[name][:1] if len(users[name]) == 1 else (name,)
            groups.setdefault((place, ((MASTER, buffer.dtype),), buffer.dtype, False), []).append(name)
    blocks: list[Block] = []
    block_users: dict[str, tuple[int, ...]] = {}
    states: dict[str, dict[str, tuple[StateKind, ...]]] = {}
    counts: Counter[Any] = Counter()
    for (place, kinds, working, updated), names in groups.items():
        name = f"{place[0]}.{counts[place]}" if counts[place] else str(place[0])
        counts[place] += 1
        kept = dict(kinds)
        block_users[name] = users.get(names[0], ())
        if updated:
            states[name] = {n: _states(graph, stepper, n) for n in names}
            if on_disk and (deferred or len(block_users[name]) > 1):
                kept[GRADIENT] = kept[MASTER]
        whole = updated and not all(stepper.is_tileable(n) for n in names)
        adding = tuple(s for s in block_users[name] if updated and s in differentiable)
        blocks.append(make_block(name, [(n, tensors[n]) for n in names], kept, working, whole, adding))
    return Layout(tuple(blocks), block_users, states, differentiable)


def _find_users(partition: Partition) -> dict[str, tuple[int, ...]]:
    users: dict[str, tuple[int, ...]] = {}
    for segment in partition.segments:
        for name in (*segment.parameters, *segment.buffers):
            users[name] = (*users.get(name, ()), segment.index)
    return users


def _states(graph: Graph, stepper: Stepper, name: str) -> tuple[StateKind, ...]:
    parameter = graph.parameters[name]
    return stepper.state_kinds(name, parameter.shape, parameter.dtype)


def _kinds(graph: Graph, stepper: Stepper, name: str) -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds a parameter is kept in: parameters with the same ones may share a block."""
    parameter = graph.parameters[name]
    kinds = {MASTER: parameter.dtype}
    if name in stepper.groups:
        kinds.update({kind.name: kind.dtype for kind in _states(graph, stepper, name) if kind.large})
    return tuple(kinds.items())

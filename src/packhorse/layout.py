"""Layout: which block of the store holds which tensor, and which segments use it.

In: the model, its graph and partition, the optimizer. Out: `Layout`. The parameters that only one segment uses lie together in
that segment's blocks; one that several segments use, tied, has a block of its own, updated after the earliest of them. On a
rank that runs some segments only, what those use.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.graph import Graph
from packhorse.optimizer import StateKind, Stepper
from packhorse.partition import Partition, Segment
from packhorse.ranks.shards import Shard, make_shard
from packhorse.store import GRADIENT, MASTER, WORKING, Block, Slot, make_block


@dataclass(frozen=True)
class Layout:
    """Blocks in order. `users` are the segments of the training graph that read a block, from first to last.

    `differentiable` are the segments that have a backward.
    """

    blocks: tuple[Block, ...]
    users: Mapping[str, tuple[int, ...]]
    states: Mapping[str, tuple[StateKind, ...]]  # of tensors that are updated
    differentiable: frozenset[int]
    followed: frozenset[str] = frozenset()  # blocks that are used here, and updated by another rank
    elsewhere: frozenset[str] = frozenset()  # parameters and buffers that only other ranks have
    shards: Mapping[str, Shard] = field(default_factory=dict)  # by block: what this rank has of it, if not all

    @cached_property
    def places(self) -> dict[str, tuple[Block, Slot]]:
        """Where tensors lie in their blocks, as segments see these."""
        whole = [self.shards[block.name].whole if block.name in self.shards else block for block in self.blocks]
        return {slot.name: (block, slot) for block in whole for slot in block.slots}

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


def make_layout(
    model: nn.Module,
    partition: Partition,
    stepper: Stepper,
    *,
    on_disk: bool,
    deferred: bool,
    local: Collection[int] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Layout:
    """`local` are the segments that run on this rank; None: all. `part` is what it keeps of each block, of how many."""
    graph = partition.graph
    users = _find_users(partition)
    here = frozenset(range(len(partition.segments)) if local is None else local)
    elsewhere = frozenset(n for n in (*graph.parameters, *graph.buffers) if not here & {*(users.get(n, ()) or (0,))})
    differentiable = frozenset(s.index for s in partition.segments if s.is_differentiable)
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    groups: dict[Any, list[str]] = {}
    followed: set[str] = set()
    for name in graph.parameters:
        if name in elsewhere:
            continue
        used = users.get(name, ())
        place: Any = used if len(used) == 1 else (name,)  # shared and unused ones have a block each
        working, updated = graph.parameters[name].working, name in stepper.groups
        adding = [s for s in used if s in differentiable]
        if updated and adding and adding[0] not in here:
            updated = False
            followed.add(name)
        kinds = _kinds(graph, stepper, name) if updated else ((MASTER, graph.parameters[name].dtype),)
        groups.setdefault((place, kinds, working, updated), []).append(name)
    for name, buffer in graph.buffers.items():
        if not buffer.written and users.get(name) and name not in elsewhere:
            place = users[name][:1] if len(users[name]) == 1 else (name,)
            groups.setdefault((place, ((MASTER, buffer.dtype),), buffer.dtype, False), []).append(name)
    blocks: list[Block] = []
    block_users: dict[str, tuple[int, ...]] = {}
    states: dict[str, tuple[StateKind, ...]] = {}
    counts: Counter[Any] = Counter()
    for (place, kinds, working, updated), names in groups.items():
        name = f"{place[0]}.{counts[place]}" if counts[place] else str(place[0])
        counts[place] += 1
        kept = dict(kinds)
        block_users[name] = tuple(s for s in users.get(names[0], ()) if s in here)
        if on_disk and working != kept[MASTER]:
            kept[WORKING] = working
        if updated:
            states.update({n: _states(graph, stepper, n) for n in names})
            if on_disk and (deferred or len(block_users[name]) > 1):
                kept[GRADIENT] = kept[MASTER]
        whole = updated and not all(stepper.is_tileable(n) for n in names)
        summed = tuple(s for s in block_users[name] if updated and s in differentiable)
        blocks.append(make_block(name, [(n, tensors[n]) for n in names], kept, working, whole, summed))
    shards = {block.name: make_shard(block, *part) for block in blocks} if part[1] > 1 else {}
    own = tuple(shards[block.name].own if shards else block for block in blocks)
    return Layout(own, block_users, states, differentiable, frozenset(followed), elsewhere, shards)


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
    """The kinds a parameter that is updated is kept in: parameters with the same ones may share a block."""
    kinds = {MASTER: graph.parameters[name].dtype}
    kinds.update({kind.name: kind.dtype for kind in _states(graph, stepper, name) if kind.large})
    return tuple(kinds.items())

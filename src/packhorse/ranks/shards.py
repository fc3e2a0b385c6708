"""Shards: each of several ranks keeps its part of every block, and all see it whole while they run.

In: blocks, how many ranks. Out: `Shard`: the block as segments see it, and this rank's part of it as its store has it. Parts
are equal runs of elements; where tensors can only be updated whole, they are laid so that none lies in two of them.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from packhorse.gradient import Gradient
from packhorse.memory import Pool
from packhorse.ranks.world import World
from packhorse.store import MASTER, Block, Slot, Store
from packhorse.store.blocks import align
from packhorse.store.lane import URGENT, Lane


@dataclass(frozen=True)
class Shard:
    """Part `index` of `whole`."""

    whole: Block
    own: Block
    index: int

    @property
    def start(self) -> int:
        """Its first element in the whole."""
        return self.index * self.own.numel


def make_shard(block: Block, index: int, count: int) -> Shard:
    slots, length = _pack(block.slots, count) if block.whole else (block.slots, -(-align(block.numel) // count))
    length = align(length)
    whole = replace(block, slots=slots, length=length * count)
    start, stop = index * length, (index + 1) * length
    pieces = [_cut(slot, start, stop) for slot in slots if slot.start < stop and slot.stop > start]
    return Shard(whole, replace(block, slots=tuple(pieces), length=length), index)


def _cut(slot: Slot, start: int, stop: int) -> Slot:
    """What of a tensor lies between two elements of its block, by its place between them."""
    first, last = max(slot.start, start), min(slot.stop, stop)
    if (first, last) == (slot.start, slot.stop):
        return replace(slot, start=first - start)
    return Slot(slot.name, (last - first,), (1,), first - start, last - first, first - slot.start)


def _pack(slots: tuple[Slot, ...], count: int) -> tuple[tuple[Slot, ...], int]:
    """Tensors in `count` runs of one length, none in two of them; the length is about the least that will do."""
    sizes = [align(slot.numel) for slot in slots]
    length = max(*sizes, -(-sum(sizes) // count)) if len(sizes) > 1 else sizes[0]
    while True:
        starts, at, run = [], 0, 0
        for size in sizes:
            if at + size > length:
                at, run = 0, run + 1
            starts.append(run * length + at)
            at += size
        if run < count:
            return tuple(replace(slot, start=start) for slot, start in zip(slots, starts, strict=True)), length
        length = align(length + length // 16)


def take_own(shard: Shard, world: World, gradient: Gradient) -> Gradient:
    """This rank's part of the sum of all ranks' gradients, under way."""
    gradient.fill_all()
    flat = gradient.spread(shard.whole)
    part = flat.new_empty(shard.own.numel)
    own = Gradient(shard.own, gradient.segment, gradient.device)
    for slot in shard.own.slots:
        if slot.name in gradient.present:
            own.keep(slot, part[slot.start : slot.stop])
    gradient.let_go()
    own.summing = world.sum_parts(part, flat)
    return own


class Gathering:
    """Brings blocks together, one after another in the order in which they are asked for, the same on all ranks."""

    def __init__(self, world: World, store: Store, pool: Pool):
        self.world, self.store, self.pool = world, store, pool
        self._lane = Lane("packhorse-gather", 1)

    def start(self, shard: Shard, update: "Future[Any] | None") -> "Future[Tensor]":
        """The whole block in working precision, in host memory, when its update is done and all have sent their parts."""

        def gather() -> Tensor:
            if update is not None:
                update.result()
            loan = self.store.borrow(shard.own, MASTER, priority=URGENT, dtype=shard.whole.working)
            nbytes = shard.whole.working_nbytes
            whole = self.pool.take(nbytes, "weights")[:nbytes].view(shard.whole.working)
            self.world.gather_parts(whole, loan.ready.result()).wait()
            loan.give_back()
            return whole

        return self._lane.submit(gather)

    def give_back(self, whole: Tensor) -> None:
        self.pool.give(whole, "weights")

    def close(self, *, waits: bool) -> None:
        self._lane.close(waits=waits)

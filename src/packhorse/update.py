"""The update: gradients in, new masters and states out, block by block, beside compute.

In: complete gradients, in host memory or parked in the store. Out: the next version of each block. A block passes through
memory chunk by chunk. Each is read, stepped and written by one thread of the store in one go, while it is in that core's cache,
and while others wait for the disk; so a block of any size needs a chunk a thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from packhorse.device import Device
from packhorse.gradient import Gradient
from packhorse.optimizer import TILE, Group, Piece, StateKind, Stepper
from packhorse.store import GRADIENT, MASTER, Block, Loan, Slot, Store, blocks
from packhorse.store.encode import encode
from packhorse.store.lane import ORDINARY, gather
from packhorse.threads import using_threads


@dataclass
class Small:
    """What the optimizer keeps beside the large states that are in blocks: scalars and the like, in memory.

    Of all tensors in one: a deep model has thousands, and tables of their own would lie scattered among large pieces of memory.
    """

    kinds: Mapping[str, tuple[StateKind, ...]]  # by tensor, the large ones too
    started: set[str] = field(default_factory=set)  # tensors that have been stepped, or came with states
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # kind -> tensor -> value

    def kinds_of(self, name: str) -> list[str]:
        """Those that are not large."""
        return [kind.name for kind in self.kinds[name] if not kind.large]

    def put(self, name: str, kind: str, value: Tensor) -> None:
        self.values.setdefault(kind, {})[name] = value

    def describe(self, block: Block) -> dict[str, Any]:
        """For a journal."""
        started = sorted(slot.name for slot in block.slots if slot.name in self.started)
        values = [[n, kind, encode(self.values[kind][n], kind)] for n in started for kind in self.kinds_of(n)]
        return {"started": started, "values": values}


_scalars: WeakValueDictionary[tuple[torch.dtype, str], Tensor] = WeakValueDictionary()


def share_scalar(value: Tensor) -> Tensor:
    """One tensor for all scalars of that value, such as the step counts of a deep model's thousands of parameters.

    Small pieces that stay, made while large ones come and go, would keep malloc from using those places again.
    """
    return value if value.ndim else _scalars.setdefault((value.dtype, repr(value.item())), value)


@dataclass
class Boundary:
    """With one version of the model: what finishing a step takes once a segment is updated."""

    segment: int
    gradients: list[Any]  # of values between this segment and those before it, as the stash describes them
    writes: "list[Future[Any]]"  # of those
    passed: Callable[[], None]  # when what the segment before took is of no use any more


class Updater:
    """Steps blocks. All but the chunks themselves is asked for by one thread."""

    def __init__(self, store: Store, stepper: Stepper, small: Small):
        self.store, self.stepper, self.small = store, stepper, small
        self.parked: dict[str, Gradient] = {}
        self._tiles: dict[tuple[str, int], list[_Tile]] = {}  # (block, first element of a chunk) -> its tiles
        self._previous: Future[Any] | None = None  # with one version: what is updated must be published before the next
        self.num_threads = torch.get_num_threads()  # what sums are made with whose order must be plain's

    # -- gradients that wait

    def park(self, gradient: Gradient, norms: dict[str, Tensor] | None, *, check: bool) -> None:
        """Lets a gradient wait, after adding it to what already waits; with `norms`, notes that of every tensor."""
        if check:
            gradient.refuse_non_finite()
        block, before = gradient.block, self.parked.pop(gradient.block.name, None)
        if before is not None or norms is not None:
            gradient.fill_all()  # what is added to, or has a norm taken, is whole
        if before is not None:
            self._fold(gradient, before)
        if norms is not None:
            with using_threads(self.num_threads):
                for slot in block.slots:
                    if slot.name in gradient.tensors:
                        norms[slot.name] = torch.linalg.vector_norm(slot.shape_of(gradient.tensors[slot.name]))
        if GRADIENT in block.kinds:
            self._write(gradient)
            self.store.publish_gradient(block)
            gradient.let_go()
        self.parked[block.name] = gradient

    def add_parked(self, gradient: Gradient) -> None:
        """What waits of it, if anything does, waits no longer."""
        before = self.parked.pop(gradient.block.name, None)
        if before is not None:
            gradient.fill_all()
            self._fold(gradient, before)

    def _fold(self, gradient: Gradient, before: Gradient) -> None:
        """Adds what later segments found: (last + ... ) + this one; an addition of two is the same in either order."""
        block = gradient.block
        missing = [slot for slot in block.slots if slot.name in before.present - gradient.present]
        for slot in missing:
            if slot.name in before.tensors:
                gradient.take_over(slot, before)
            else:
                gradient.make(slot).zero_()
        for start, stop in block.units:
            loan = self._waiting_part(before, start, stop)
            for slot, a, b in _inside(block, start, stop):
                waiting, own = _part(before, loan, slot, a, b, start), gradient.piece(slot, a, b)
                if waiting is not None and own is not None and slot.name in before.present:
                    own.copy_(waiting) if slot in missing else own.add_(waiting)
            if loan is not None:
                loan.give_back()
        before.let_go()

    def _write(self, gradient: Gradient) -> None:
        """To the store, a unit at a time."""
        units = gradient.block.units
        gather([self.store.work(partial(self._write_unit, gradient, *unit)) for unit in units], lambda: None).result()

    def _write_unit(self, gradient: Gradient, start: int, stop: int) -> None:
        loan = self.store.borrow(gradient.block, GRADIENT, start, stop, read=False, here=True)
        flat = loan.ready.result()
        for slot, a, b in _inside(gradient.block, start, stop):
            own = gradient.piece(slot, a, b)
            if own is not None:
                flat[a - start : b - start] = own
        _write_back(loan)

    def forget_parked(self) -> None:
        for gradient in self.parked.values():
            gradient.let_go()
        self.parked.clear()

    def describe_parked(self) -> dict[str, Any]:
        """What finishing the step takes to know of the gradients that wait in the store."""
        return {
            name: {"present": sorted(gradient.present), **self.store.describe_gradient(gradient.block)}
            for name, gradient in self.parked.items()
        }

    def take_up(self, parked: Mapping[str, Any], blocks: Iterable[Block], device: Device) -> None:
        """Gradients wait that a process before this one parked."""
        for block in blocks:
            if block.name in parked:
                self.parked[block.name] = Gradient(block, -1, device, present=set(parked[block.name]["present"]))

    def _waiting_part(self, parked: Gradient | None, start: int, stop: int, *, here: bool = False) -> Loan | None:
        """A part of a gradient that waits in the store, if that is where it waits."""
        if parked is None or GRADIENT not in parked.block.kinds:
            return None
        return self.store.borrow(parked.block, GRADIENT, start, stop, here=here)

    # -- the update itself

    def update(
        self,
        members: Sequence[tuple[Block, Gradient | None]],
        groups: Sequence[Group],
        scale: Tensor | None,
        boundary: Boundary | None,
        *,
        priority: int = ORDINARY,
    ) -> "Future[Any] | None":
        """Steps blocks with their gradients and what of them waits in the store; `scale` multiplies the gradients first.

        What is returned is done when all is written. With a `boundary` the journal tells of it then, and the next blocks take
        the place of these.
        """
        if self._previous is not None:
            self._previous.result()
        stepped: list[Block] = []
        parts: list[Future[Any]] = []
        try:
            for block, gradient in members:
                part = self._start(block, gradient, groups, scale, priority)
                if part is not None:
                    stepped.append(block)
                    parts.append(part)
        except BaseException:
            wait(parts)  # before anything else is written in their place
            raise
        if boundary is None:
            if not stepped:
                return None  # no tensor of the blocks has a gradient
            return gather(parts, partial(self.store.publish_together, stepped, {}))
        parked = self.describe_parked()  # now: later segments' join them

        def publish() -> None:
            small = [self.small.describe(block) for block in stepped]
            record = {"segment": boundary.segment, "gradients": boundary.gradients, "parked": parked, "small": small}
            self.store.publish_together(stepped, record)
            boundary.passed()

        self._previous = gather([*parts, *boundary.writes], publish)
        return self._previous

    def forget_previous(self) -> None:
        """After a failure, which has been told."""
        self._previous = None

    def _start(
        self,
        block: Block,
        gradient: Gradient | None,
        groups: Sequence[Group],
        scale: Tensor | None,
        priority: int,
    ) -> "Future[Any] | None":
        """Done when the block is written; None if it has no gradient, or no tensor: the others' parts are larger."""
        update = _Update(block, gradient, self.parked.pop(block.name, None), groups, scale)
        if not update.held or not block.slots:
            return None
        try:
            if gradient is not None and scale is None:
                gradient.refuse_non_finite()
        except BaseException:
            update.let_go()
            raise

        def finish() -> None:
            for (name, kind), value in update.advanced.items():
                self.small.put(name, kind, value)
            self.small.started |= update.present

        jobs = [partial(self._step_chunk, update, start, stop) for start, stop in _chunks(block)]
        stepped = gather([self.store.work(job, priority=priority) for job in jobs], finish)
        stepped.add_done_callback(lambda _: update.let_go())  # before anybody else hears of it
        return stepped

    def _step_chunk(self, update: "_Update", start: int, stop: int) -> None:
        """Elements `start` to `stop` of a block: read, stepped, written."""
        block, is_started = update.block, any(slot.name in self.small.started for slot in update.block.slots)
        loans = {MASTER: self.store.borrow(block, MASTER, start, stop, here=True)}
        for kind in block.states:
            loans[kind] = self.store.borrow(block, kind, start, stop, read=is_started, here=True)
        waiting = self._waiting_part(update.parked, start, stop, here=True)
        try:
            with using_threads(self.num_threads if block.whole else 1):
                flats = {kind: loan.ready.result() for kind, loan in loans.items()}
                self._step_part(update, start, stop, flats, waiting)
        except BaseException:
            for loan in loans.values():
                loan.give_back()
            raise
        finally:
            if waiting is not None:
                waiting.give_back()
        _write_back(*loans.values())

    def _step_part(
        self, update: "_Update", start: int, stop: int, flats: Mapping[str, Tensor], parked: Loan | None
    ) -> None:
        """Large tensors tile by tile, several in a call."""
        waiting: list[tuple[_Tile, Piece]] = []
        elements, together = 0, self.stepper.together

        def step() -> None:
            self.stepper.step(update.groups, [piece for _, piece in waiting])
            for tile, piece in waiting:
                self._take_states(update, tile, piece, start, flats)
            waiting.clear()

        for tile in self._find_tiles(update.block, start, stop, flats):
            name = tile.slot.name
            if name not in update.present:
                continue
            waiting.append((tile, self._make_piece(update, tile, start, parked)))
            elements += tile.end - tile.at
            if elements >= (together if name in self.small.started else TILE):  # new states wait
                step()
                elements = 0
        if waiting:
            step()

    def _find_tiles(self, block: Block, start: int, stop: int, flats: Mapping[str, Tensor]) -> "list[_Tile]":
        """Of a chunk; made once where it always lies in the same memory."""
        key = block.name, start
        if key in self._tiles:
            return self._tiles[key]
        tiles = [tile for part in _inside(block, start, stop) for tile in self._cut_tiles(block, *part, start, flats)]
        if self.store.stays and all(tile.slot.name in self.small.started for tile in tiles):
            self._tiles[key] = tiles
        return tiles

    def _cut_tiles(
        self, block: Block, slot: Slot, a: int, b: int, start: int, flats: Mapping[str, Tensor]
    ) -> "Iterator[_Tile]":
        """Elements `a` to `b` of a tensor, in a chunk that begins at `start`."""
        small = self.small
        if slot.name not in small.kinds:
            return  # none of the optimizer's
        size = b - a if block.whole or not self.stepper.is_tileable(slot.name) else self.stepper.tile(slot.name)
        large = [kind.name for kind in small.kinds[slot.name] if kind.large and slot.name in small.started]
        for at in range(a, b, size):
            end = min(at + size, b)
            states = {kind: _cut(flats[kind], slot, at, end, start) for kind in large}
            yield _Tile(slot, at, end, _cut(flats[MASTER], slot, at, end, start), states)

    def _make_piece(self, update: "_Update", tile: "_Tile", start: int, parked: Loan | None) -> Piece:
        """A tile with its gradient and all its states."""
        slot, small = tile.slot, self.small
        gradient = _sum(update.gradient, update.parked, parked, slot, tile.at, tile.end, start)
        if update.scale is not None:
            gradient.mul_(update.scale)
        if slot.name in small.started:
            state: dict[str, Any] = {
                kind.name: tile.states[kind.name] if kind.large else small.values[kind.name][slot.name].clone()
                for kind in small.kinds[slot.name]
            }
        else:
            state = self.stepper.initial_state(tile.master)
        shaped = slot.shape_of(gradient) if tile.is_whole else gradient
        return Piece(self.stepper.groups[slot.name], tile.master, shaped, state)

    def _take_states(
        self, update: "_Update", tile: "_Tile", piece: Piece, start: int, flats: Mapping[str, Tensor]
    ) -> None:
        """What a step left: large states in their chunk, where they may be already, small ones by themselves."""
        slot = tile.slot
        for kind in self.small.kinds[slot.name]:
            value = piece.state[kind.name]
            if not kind.large:
                update.advanced[slot.name, kind.name] = share_scalar(value)
            elif value is not tile.states.get(kind.name):
                _cut(flats[kind.name], slot, tile.at, tile.end, start).copy_(value)


@dataclass
class _Update:
    """The update of one block: what it takes, and the small states that it leaves."""

    block: Block
    gradient: Gradient | None
    parked: Gradient | None
    groups: Sequence[Group]
    scale: Tensor | None
    advanced: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # (tensor, kind) -> value

    def __post_init__(self) -> None:
        self.held = [g for g in (self.gradient, self.parked) if g is not None]
        self.present = {name for gradient in self.held for name in gradient.present}

    def let_go(self) -> None:
        for gradient in self.held:
            gradient.let_go()


@dataclass(frozen=True)
class _Tile:
    """A tensor, or elements `at` to `end` of its block, with the states that lie where they are stored."""

    slot: Slot
    at: int
    end: int
    master: Tensor
    states: dict[str, Tensor]

    @cached_property
    def is_whole(self) -> bool:
        return (self.at, self.end) == (self.slot.start, self.slot.stop)


def _cut(flat: Tensor, slot: Slot, at: int, end: int, start: int) -> Tensor:
    """Elements of a tensor in a chunk that begins at `start`; all of it in its own shape."""
    return slot.view(flat, start) if (at, end) == (slot.start, slot.stop) else flat[at - start : end - start]


def _write_back(*loans: Loan) -> None:
    """All of them, also if one fails."""
    writes = [loan.give_back(dirty=True) for loan in loans]
    for write in writes:
        if write is not None:
            write.result()


def _part(gradient: Gradient | None, loan: Loan | None, slot: Slot, a: int, b: int, start: int) -> Tensor | None:
    """Elements of a gradient, in memory or on loan from element `start` of the block."""
    if gradient is None or slot.name not in gradient.present:
        return None
    return gradient.piece(slot, a, b) if loan is None else loan.ready.result()[a - start : b - start]


def _sum(
    gradient: Gradient | None, parked: Gradient | None, loan: Loan | None, slot: Slot, a: int, b: int, start: int
) -> Tensor:
    """What waited, plus this segment's."""
    waited, own = _part(parked, loan, slot, a, b, start), _part(gradient, None, slot, a, b, start)
    if waited is not None and own is not None:
        return waited.add_(own)
    found = own if waited is None else waited
    assert found is not None
    return found


def _chunks(block: Block) -> Iterator[tuple[int, int]]:
    """Ranges of elements that are read, stepped and written together: units, or as many whole tensors as fit one."""
    if not block.whole:
        yield from block.units
        return
    start = 0
    ends = [slot.start for slot in block.slots[1:]] + [block.numel]
    for slot, end, following in zip(block.slots, ends, [*ends[1:], block.numel], strict=True):
        if end == block.numel or following - start > blocks.UNIT:
            yield start, end
            start = end
        assert slot.stop <= end


def _inside(block: Block, start: int, stop: int) -> list[tuple[Slot, int, int]]:
    """The tensors, or parts of tensors, in a range of elements."""
    parts = [(slot, max(slot.start, start), min(slot.stop, stop)) for slot in block.slots]
    return [(slot, a, b) for slot, a, b in parts if a < b]

"""The update: gradients in, new masters and states out, block by block, in a thread of its own.

In: complete gradients, in host memory or parked in the store. Out: the next version of each block. A block passes through
memory piece by piece: while one is stepped, the next is read and the last is written, so a block of any size needs a
few pieces.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packhorse.device import Device, Transfer
from packhorse.errors import NumericsError
from packhorse.optimizer import TILE, Group, Piece, StateKind, Stepper
from packhorse.store import GRADIENT, MASTER, Block, Loan, Slot, Store, blocks
from packhorse.store.lane import gather

AHEAD = 2  # chunks read ahead


@dataclass
class Gradient:
    """The gradient of a block, summed over microbatches; `present` are the tensors that have one."""

    block: Block
    flat: Tensor
    segment: int
    present: set[str] = field(default_factory=set)
    arrival: Transfer | None = None  # until it is in host memory

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """The first is copied, not added to zero, so that -0.0 stays."""
        view = slot.view(self.flat)
        if slot.name in self.present:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.present.add(slot.name)


@dataclass
class Small:
    """What the optimizer keeps of a block beside its large states: scalars and the like, in memory."""

    kinds: dict[str, tuple[StateKind, ...]]  # by tensor
    started: set[str] = field(default_factory=set)  # tensors that have been stepped, or came with states
    values: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # (tensor, kind) -> value

    @property
    def large(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(k.name for kinds in self.kinds.values() for k in kinds if k.large))


class Updater:
    """Steps blocks. Everything here runs in one thread, one block after another."""

    def __init__(self, store: Store, stepper: Stepper, device: Device, small: Mapping[str, Small]):
        self.store, self.stepper, self.device, self.small = store, stepper, device, dict(small)
        self.parked: dict[str, Gradient] = {}

    # -- gradients that wait

    def park(self, gradient: Gradient, norms: dict[str, Tensor] | None, *, check: bool) -> None:
        """Lets a gradient wait, after adding it to what already waits; with `norms`, notes that of every tensor."""
        if check:
            _refuse_non_finite(gradient)
        block, before = gradient.block, self.parked.pop(gradient.block.name, None)
        if before is not None:
            self._fold(gradient, before)
        if norms is not None:
            for slot in block.slots:
                if slot.name in gradient.present:
                    norms[slot.name] = torch.linalg.vector_norm(slot.view(gradient.flat))
        if GRADIENT in block.kinds:
            loan = self.store.borrow(block, GRADIENT, read=False, buffer=gradient.flat)
            written = loan.give_back(dirty=True)
            assert written is not None
            written.result()
            self.device.give(gradient.flat, "gradients")
            gradient = Gradient(block, torch.empty(0), gradient.segment, gradient.present)
        self.parked[block.name] = gradient

    def _fold(self, gradient: Gradient, before: Gradient) -> None:
        """Adds what later segments found: (last + ... ) + this one; an addition of two is the same in either order."""
        for start, stop in gradient.block.units:
            loan = self._parked_piece(before, start, stop)
            for slot in _inside(gradient.block, start, stop):
                a, b = max(slot.start, start), min(slot.stop, stop)
                if slot.name in before.present:
                    waiting, own = loan.result()[a - start : b - start], gradient.flat[a:b]
                    own.add_(waiting) if slot.name in gradient.present else own.copy_(waiting)
            self._end(loan)
        gradient.present |= before.present
        self._forget(before)

    def forget_parked(self) -> None:
        for gradient in self.parked.values():
            self._forget(gradient)
        self.parked.clear()

    def _parked_piece(self, parked: Gradient, start: int, stop: int) -> "_Piece":
        if parked.flat.numel():
            return _Piece(parked.flat[start:stop], None)
        return _Piece(None, self.store.borrow(parked.block, GRADIENT, start, stop))

    def _end(self, piece: "_Piece") -> None:
        if piece.loan is not None:
            piece.loan.give_back()

    def _forget(self, gradient: Gradient) -> None:
        if gradient.flat.numel():
            self.device.give(gradient.flat, "gradients")

    # -- the update itself

    def update(
        self, block: Block, gradient: Gradient | None, groups: Sequence[Group], scale: Tensor | None
    ) -> "Future[Any] | None":
        """Steps a block with its gradient and what of it waits in the store; `scale` multiplies the gradient first.

        What is returned is done when all is written: the next block is read meanwhile.
        """
        parked = self.parked.pop(block.name, None)
        if gradient is None and parked is None:
            return None  # no tensor of the block has a gradient
        if gradient is not None and scale is None:
            _refuse_non_finite(gradient)
        present = (gradient.present if gradient else set()) | (parked.present if parked else set())
        writes: list[Future[Any]] = []
        advanced: dict[tuple[str, str], Tensor] = {}
        for start, stop, loans in self._read_ahead(block, present, parked):
            grad = self._gradient_piece(loans.pop(GRADIENT, None), gradient, parked, start, stop, scale)
            flats = {kind: loan.ready.result() for kind, loan in loans.items()}
            self._step_chunk(block, start, stop, flats, grad, present, groups, advanced)
            writes += [w for w in (loan.give_back(dirty=True) for loan in loans.values()) if w is not None]
            while len(writes) > 2 * AHEAD * len(loans):  # bounds the buffers in flight
                writes.pop(0).result()
        small = self.small[block.name]
        small.values.update(advanced)
        small.started |= present
        for held in (gradient, parked):
            if held is not None:
                self._forget(held)
        return gather(writes, lambda: self.store.publish(block))

    def _read_ahead(
        self, block: Block, present: set[str], parked: Gradient | None
    ) -> Iterator[tuple[int, int, dict[str, Loan]]]:
        small = self.small[block.name]
        waiting: deque[tuple[int, int, dict[str, Loan]]] = deque()
        for start, stop in _chunks(block):
            loans = {MASTER: self.store.borrow(block, MASTER, start, stop)}
            for kind in small.large:
                loans[kind] = self.store.borrow(block, kind, start, stop, read=bool(small.started))
            if parked is not None and not parked.flat.numel():
                loans[GRADIENT] = self.store.borrow(block, GRADIENT, start, stop)
            waiting.append((start, stop, loans))
            if len(waiting) > AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _gradient_piece(
        self,
        loan: Loan | None,
        gradient: Gradient | None,
        parked: Gradient | None,
        start: int,
        stop: int,
        scale: Tensor | None,
    ) -> Tensor:
        """The gradient of a chunk: this segment's, plus what waited, times the scale."""
        own = gradient.flat[start:stop] if gradient is not None else None
        if parked is None:
            assert own is not None
            piece = own
        else:
            waited = loan.ready.result() if loan is not None else parked.flat[start:stop]
            piece = waited
            if own is not None and gradient is not None:
                for slot in _inside(gradient.block, start, stop):
                    a, b = max(slot.start, start) - start, min(slot.stop, stop) - start
                    if slot.name in gradient.present:
                        both = slot.name in parked.present
                        piece[a:b].add_(own[a:b]) if both else piece[a:b].copy_(own[a:b])
        if scale is not None:
            piece.mul_(scale)
        if loan is not None:  # used up before the chunk's other loans are; the piece stays valid until the next borrow
            piece = piece.clone()
            loan.give_back()
        return piece

    def _step_chunk(
        self,
        block: Block,
        start: int,
        stop: int,
        flats: Mapping[str, Tensor],
        gradient: Tensor,
        present: set[str],
        groups: Sequence[Group],
        advanced: dict[tuple[str, str], Tensor],
    ) -> None:
        """Steps all tensors, or parts of tensors, in a chunk: small ones together, large ones tile by tile."""
        for slot in _inside(block, start, stop):
            if slot.name not in present:
                continue
            a, b = max(slot.start, start), min(slot.stop, stop)
            whole = (a, b) == (slot.start, slot.stop)
            size = TILE if self.stepper.is_tileable(slot.name) else b - a
            for at in range(a, b, size):
                end = min(at + size, b)
                self._step_tile(
                    block, slot, at, end, start, flats, gradient, groups, advanced, whole and end - at == b - a
                )

    def _step_tile(
        self,
        block: Block,
        slot: Slot,
        at: int,
        end: int,
        start: int,
        flats: Mapping[str, Tensor],
        gradient: Tensor,
        groups: Sequence[Group],
        advanced: dict[tuple[str, str], Tensor],
        whole: bool,
    ) -> None:
        small = self.small[block.name]
        kinds = small.kinds[slot.name]

        def cut(flat: Tensor) -> Tensor:
            return slot.view(flat, start) if whole else flat[at - start : end - start]

        state: dict[str, Any] = {}
        if slot.name in small.started:
            for kind in kinds:
                stored = cut(flats[kind.name]) if kind.large else small.values[slot.name, kind.name].clone()
                state[kind.name] = stored
        else:
            state = self.stepper.initial_state(cut(flats[MASTER]))
        piece = Piece(self.stepper.groups[slot.name], cut(flats[MASTER]), cut(gradient), state)
        self.stepper.step(groups, [piece])
        for kind in kinds:
            value = piece.state[kind.name]
            if not kind.large:
                advanced[slot.name, kind.name] = value
            elif value.data_ptr() != cut(flats[kind.name]).data_ptr():
                cut(flats[kind.name]).copy_(value)


@dataclass
class _Piece:
    """A part of a parked gradient: in memory, or on loan."""

    tensor: Tensor | None
    loan: Loan | None

    def result(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.loan is not None
        return self.loan.ready.result()


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


def _inside(block: Block, start: int, stop: int) -> list[Slot]:
    return [slot for slot in block.slots if slot.start < stop and slot.stop > start]


def _refuse_non_finite(gradient: Gradient) -> None:
    for slot in gradient.block.slots:
        if slot.name in gradient.present:
            view = gradient.flat[slot.start : slot.stop]
            # The sum is one pass without memory; it may overflow by itself, so only then every element is asked.
            if not torch.isfinite(view.sum()) and not torch.isfinite(view).all():
                raise NumericsError(
                    f"the gradient of {slot.name} (segment {gradient.segment}) is not finite; it was not used, but segments "
                    "after it have been updated. With update='deferred' none would have been: lower the learning rate, clip, "
                    "or look at the batch"
                )

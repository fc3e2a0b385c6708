"""Gradients: sums over microbatches, tensor by tensor, until a block is updated with them.

In: what backward found, one microbatch after another. Out: flat tensors that lie as their slots do. The first gradient of a
tensor becomes the sum itself, as in plain PyTorch, if nothing else holds its memory; otherwise it is copied. Of a table that is
only looked up, the rows that were are kept, as long as they are few: the others are zero.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packhorse.device import Device, Transfer
from packhorse.errors import GradientError
from packhorse.store import MASTER, Block, Slot

SMALL = 1 << 20  # bytes below which a copy is not worth a mapping of its own
TILE = 1 << 20  # elements that are cast and added at a time
FEW = 0.5  # the share of a table's rows up to which they are kept by themselves


@dataclass
class LookedUp:
    """Rows of a table by number, in order; the gradient of all others is zero."""

    numbers: Tensor
    rows: Tensor

    @classmethod
    def of(cls, gradient: Tensor, dtype: torch.dtype) -> "LookedUp":
        """One microbatch's, from a sparse gradient: rows that were looked up several times are added as plain does it."""
        numbers, places = torch.unique(gradient._indices()[0], return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(gradient._values(), places, len(numbers), -1, False)
        return cls(numbers, rows.to(dtype))

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def add(self, other: "LookedUp") -> "LookedUp":
        numbers = torch.unique(torch.cat([self.numbers, other.numbers]))
        rows = self.rows.new_zeros(len(numbers), self.rows.shape[1])
        rows[torch.searchsorted(numbers, self.numbers)] = self.rows
        at = torch.searchsorted(numbers, other.numbers)
        rows[at] = rows[at].add_(other.rows)
        return LookedUp(numbers, rows)

    def write(self, flat: Tensor, start: int) -> None:
        """Puts the rows into elements of the table from `start` on, which are zero."""
        width, stop = self.rows.shape[1], start + len(flat)
        first, last = start // width, -(-stop // width)
        low, high = torch.searchsorted(self.numbers, torch.tensor([first, last], device=self.numbers.device)).tolist()
        for number, row in zip(self.numbers[low:high].tolist(), self.rows[low:high], strict=True):
            begin, end = max(number * width, start), min((number + 1) * width, stop)
            flat[begin - start : end - start] = row[begin - number * width : end - number * width]


def find_runs(block: Block) -> list[list[Slot]]:
    """Tensors whose gradients are sent in one go: each large one, and all small ones together."""
    itemsize = block.kinds[MASTER].itemsize
    small = [slot for slot in block.slots if slot.numel * itemsize < SMALL]
    return [*([slot] for slot in block.slots if slot.numel * itemsize >= SMALL), *([small] if small else [])]


@dataclass
class Gradient:
    """The gradient of a block from one segment. `present` are the tensors that have one, here or waiting in the store."""

    block: Block
    segment: int
    device: Device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    looked_up: dict[str, LookedUp] = field(default_factory=dict)  # instead of a tensor
    _taken: set[str] = field(default_factory=set)  # in memory of the device's own
    _transfers: list[Transfer] = field(default_factory=list)
    _is_finite: bool = False
    summing: Any = None  # over replicas, under way: to be waited for
    summed: "Future[Any] | None" = None  # likewise, where a thread of the host waits for it

    def add(self, slot: Slot, gradient: Tensor, alone: bool) -> None:
        """Adds one microbatch's; `alone` if nobody else has this tensor. The first is not added to zero, so that -0.0 stays."""
        if gradient.is_sparse:
            self._add_rows(slot, gradient)
        elif slot.name in self.tensors:
            self._add(slot, gradient)
        elif alone and self._fits(slot, gradient):
            self.keep(slot, gradient.as_strided((slot.numel,), (1,)))
        else:
            slot.shape_of(self.make(slot)).copy_(gradient)

    def _add(self, slot: Slot, gradient: Tensor) -> None:
        """A gradient in another precision is cast a piece at a time: in one go its cast would take as much as the sum."""
        total = self.tensors[slot.name]
        if gradient.dtype == total.dtype or tuple(gradient.stride()) != slot.stride:
            slot.shape_of(total).add_(gradient)
            return
        for part, more in zip(total.split(TILE), gradient.as_strided((slot.numel,), (1,)).split(TILE), strict=True):
            part.add_(more)

    def _add_rows(self, slot: Slot, gradient: Tensor) -> None:
        found = LookedUp.of(gradient, self.block.kinds[MASTER])
        if slot.name in self.tensors:
            total = slot.shape_of(self.tensors[slot.name])
            total[found.numbers] = total[found.numbers].add_(found.rows)
            return
        before = self.looked_up.get(slot.name)
        self.looked_up[slot.name] = found if before is None else before.add(found)
        self.present.add(slot.name)
        self.device.count(self.looked_up[slot.name].nbytes - (before.nbytes if before else 0), "gradients")
        if len(self.looked_up[slot.name].numbers) > FEW * slot.shape[0] or not slot.is_contiguous:
            self.fill(slot)

    def fill(self, slot: Slot) -> None:
        """What was looked up becomes a tensor of the whole table."""
        found = self.looked_up.pop(slot.name)
        slot.shape_of(self.make(slot).zero_())[found.numbers] = found.rows
        self.device.count(-found.nbytes, "gradients")

    def fill_all(self) -> None:
        for slot in self.block.slots:
            if slot.name in self.looked_up:
                self.fill(slot)

    def _fits(self, slot: Slot, gradient: Tensor) -> bool:
        storage = gradient.untyped_storage()
        holders = 2 if gradient._base is None else 3  # the tensor, what it is a view of, and `storage`
        return (
            gradient.dtype == self.block.kinds[MASTER]
            and tuple(gradient.stride()) == slot.stride
            and storage.nbytes() == gradient.nbytes
            and torch._C._storage_Use_Count(storage._cdata) == holders
        )

    def keep(self, slot: Slot, flat: Tensor) -> None:
        """What torch has allocated becomes the sum of a tensor."""
        self.device.count(flat.nbytes, "gradients")
        self.tensors[slot.name] = flat
        self.present.add(slot.name)

    def make(self, slot: Slot) -> Tensor:
        """Memory for a tensor's sum."""
        dtype = self.block.kinds[MASTER]
        nbytes = slot.numel * dtype.itemsize
        if nbytes < SMALL:
            self.keep(slot, torch.empty(slot.numel, dtype=dtype, device=self.device.name))
        else:
            self.tensors[slot.name] = self.device.take(nbytes, "gradients")[:nbytes].view(dtype)
            self._taken.add(slot.name)
            self.present.add(slot.name)
        return self.tensors[slot.name]

    def spread(self, block: Block) -> Tensor:
        """All tensors at their places in a block, with zeros between them."""
        flat = torch.zeros(block.numel, dtype=block.kinds[MASTER], device=self.device.name)
        for slot in block.slots:
            if slot.name in self.tensors:
                flat[slot.start : slot.stop] = self.tensors[slot.name]
        return flat

    def join(self) -> list[Tensor]:
        """All tensors, large ones by themselves, the small ones as one, of which they are views from now on."""
        self.fill_all()
        runs = [[slot for slot in run if slot.name in self.tensors] for run in find_runs(self.block)]
        return [self._join(run) for run in runs if run]

    def _join(self, slots: Sequence[Slot]) -> Tensor:
        if len(slots) == 1:
            return self.tensors[slots[0].name]
        whole = torch.cat([self.tensors[slot.name] for slot in slots])
        views = whole.split_with_sizes([slot.numel for slot in slots])  # `split` asks a good deal before, in Python
        self.tensors.update(zip((slot.name for slot in slots), views, strict=True))
        return whole

    def bring_home(self) -> None:
        """Starts to bring it to the host; what is summed on a device comes when it is summed."""
        if self.summed is None:
            self._await_sum()
        self._transfers = [self.device.download(flat) for flat in self.tensors.values()]
        self.tensors = dict(zip(self.tensors, [t.tensor for t in self._transfers], strict=True))
        for found in self.looked_up.values():
            parts = [self.device.download(found.numbers), self.device.download(found.rows)]
            found.numbers, found.rows = (part.tensor for part in parts)
            self._transfers += parts

    def wait(self) -> None:
        """Returns when it is there."""
        self._await_sum()
        for transfer in self._transfers:
            self.device.wait_on_host(transfer)
        self._transfers.clear()

    def _await_sum(self) -> None:
        if self.summed is not None:
            self.summed.result()
        elif self.summing is not None:
            self.summing.wait()
        self.summing = self.summed = None

    @property
    def is_home(self) -> bool:
        return self.summing is None and all(transfer.event is None for transfer in self._transfers)

    def refuse_non_finite(self) -> None:
        """Once it is home; asked a second time, it has been answered."""
        found = {**self.tensors, **{name: looked_up.rows for name, looked_up in self.looked_up.items()}}
        if self._is_finite or not found:
            return
        # The sum is one pass without memory; it may overflow by itself, so only then every element is asked.
        total = float(torch.stack([flat.sum() for flat in found.values()]).sum())
        for name, flat in found.items():
            if not math.isfinite(total) and not torch.isfinite(flat).all():
                raise GradientError(
                    f"the gradient of {name} (segment {self.segment}) is not finite; it was not used, but segments after it "
                    "were updated (a store on disk with two versions takes that back; with update='deferred' none would have "
                    "been): lower the learning rate, clip, or look at the batch"
                )
        self._is_finite = True

    def piece(self, slot: Slot, start: int, stop: int) -> Tensor | None:
        """Elements of a tensor, counted as its block does."""
        found = self.looked_up.get(slot.name)
        if found is not None:
            part = found.rows.new_zeros(stop - start)
            found.write(part, start - slot.start)
            return part
        flat = self.tensors.get(slot.name)
        if flat is None or stop - start == slot.numel:
            return flat
        return flat[start - slot.start : stop - slot.start]

    def take_over(self, slot: Slot, other: "Gradient") -> None:
        """A tensor that only the other has becomes this one's."""
        self.tensors[slot.name] = other.tensors.pop(slot.name)
        self.present.add(slot.name)
        if slot.name in other._taken:
            other._taken.discard(slot.name)
            self._taken.add(slot.name)

    def let_go(self) -> None:
        """Gives its memory back; what is present stays known."""
        for name, flat in self.tensors.items():
            if name in self._taken:
                self.device.give(flat, "gradients")
            else:
                self.device.count(-flat.nbytes, "gradients")
        for found in self.looked_up.values():
            self.device.count(-found.nbytes, "gradients")
        self.tensors.clear()
        self.looked_up.clear()
        self._taken.clear()

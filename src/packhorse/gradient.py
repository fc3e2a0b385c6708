"""Gradients: sums over microbatches, tensor by tensor, until a block is updated with them.

In: what backward found, one microbatch after another. Out: flat tensors that lie as their slots do. The first gradient of a
tensor becomes the sum itself, as in plain PyTorch, if nothing else holds its memory; otherwise it is copied.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from packhorse.device import Device, Transfer
from packhorse.errors import NumericsError
from packhorse.store import MASTER, Block, Slot

SMALL = 1 << 20  # bytes below which a copy is not worth a mapping of its own


@dataclass
class Gradient:
    """The gradient of a block from one segment. `present` are the tensors that have one, here or waiting in the store."""

    block: Block
    segment: int
    device: Device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)  # in memory of the device's own
    _transfers: list[Transfer] = field(default_factory=list)
    _is_finite: bool = False

    def add(self, slot: Slot, gradient: Tensor, alone: bool) -> None:
        """Adds one microbatch's; `alone` if nobody else has this tensor. The first is not added to zero, so that -0.0 stays."""
        if slot.name in self.tensors:
            slot.shape_of(self.tensors[slot.name]).add_(gradient)
        elif alone and self._fits(slot, gradient):
            self._keep(slot, gradient.as_strided((slot.numel,), (1,)))
        else:
            slot.shape_of(self.make(slot)).copy_(gradient)

    def _fits(self, slot: Slot, gradient: Tensor) -> bool:
        storage = gradient.untyped_storage()
        holders = 2 if gradient._base is None else 3  # the tensor, what it is a view of, and `storage`
        return (
            gradient.dtype == self.block.kinds[MASTER]
            and tuple(gradient.stride()) == slot.stride
            and storage.nbytes() == gradient.nbytes
            and torch._C._storage_Use_Count(storage._cdata) == holders
        )

    def _keep(self, slot: Slot, flat: Tensor) -> None:
        self.device.count(flat.nbytes, "gradients")
        self.tensors[slot.name] = flat
        self.present.add(slot.name)

    def make(self, slot: Slot) -> Tensor:
        """Memory for a tensor's sum."""
        dtype = self.block.kinds[MASTER]
        nbytes = slot.numel * dtype.itemsize
        if nbytes < SMALL:
            self._keep(slot, torch.empty(slot.numel, dtype=dtype, device=self.device.name))
        else:
            self.tensors[slot.name] = self.device.take(nbytes, "gradients")[:nbytes].view(dtype)
            self._taken.add(slot.name)
            self.present.add(slot.name)
        return self.tensors[slot.name]

    def bring_home(self) -> None:
        """Starts to bring it to the host."""
        self._transfers = [self.device.download(flat) for flat in self.tensors.values()]
        self.tensors = dict(zip(self.tensors, [t.tensor for t in self._transfers], strict=True))

    def wait(self) -> None:
        """Returns when it is there."""
        for transfer in self._transfers:
            self.device.wait_on_host(transfer)
        self._transfers.clear()

    @property
    def is_home(self) -> bool:
        return all(transfer.event is None for transfer in self._transfers)

    def refuse_non_finite(self) -> None:
        """Once it is home; asked a second time, it has been answered."""
        if self._is_finite:
            return
        for name, flat in self.tensors.items():
            # The sum is one pass without memory; it may overflow by itself, so only then every element is asked.
            if not torch.isfinite(flat.sum()) and not torch.isfinite(flat).all():
                raise NumericsError(
                    f"the gradient of {name} (segment {self.segment}) is not finite; it was not used, but segments after it "
                    "were updated (a store on disk with two versions takes that back; with update='deferred' none would have "
                    "been): lower the learning rate, clip, or look at the batch"
                )
        self._is_finite = True

    def piece(self, slot: Slot, start: int, stop: int) -> Tensor | None:
        """Elements of a tensor, counted as its block does."""
        flat = self.tensors.get(slot.name)
        return None if flat is None else flat[start - slot.start : stop - slot.start]

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
        self.tensors.clear()
        self._taken.clear()

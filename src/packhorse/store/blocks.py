"""Blocks: how the model's tensors lie in a store.

In: tensors by name, grouped by who uses them. Out: `Block`, one contiguous piece of every kind (master, each optimizer
state). Tensors begin at multiples of `ALIGNMENT` elements in all kinds alike, so that any piece cut there can be read
and written by direct I/O, and the same range of elements is the same piece of the model in every kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from packhorse.memory import PAGE

ALIGNMENT = PAGE  # in elements: a page even of one-byte elements

MASTER, GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a block: `start` is its first element, `stride` how it lies there."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """This tensor in a piece of its block that begins at element `start`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start - start)


@dataclass(frozen=True)
class Block:
    """Tensors that are fetched and updated together, and the kinds of them that are kept, each with its dtype."""

    name: str
    slots: tuple[Slot, ...]
    kinds: Mapping[str, torch.dtype]
    working: torch.dtype  # what segments run with: masters are cast to it as they are fetched

    @cached_property
    def numel(self) -> int:
        """Padding included."""
        return align(self.slots[-1].stop)

    def nbytes(self, kind: str) -> int:
        return self.numel * self.kinds[kind].itemsize

    @property
    def is_cast(self) -> bool:
        return self.working != self.kinds[MASTER]

    @property
    def working_nbytes(self) -> int:
        return self.numel * self.working.itemsize

    @property
    def all_nbytes(self) -> int:
        return sum(self.nbytes(kind) for kind in self.kinds)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}


def make_block(
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    kinds: Mapping[str, torch.dtype],
    working: torch.dtype | None = None,
) -> Block:
    """Lays tensors out one after another. Those that lie dense keep their strides, others become contiguous."""
    slots: list[Slot] = []
    start = 0
    for tensor_name, tensor in tensors:
        shape = tuple(tensor.shape)
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
        slots.append(Slot(tensor_name, shape, tuple(stride), start, tensor.numel()))
        start = align(slots[-1].stop)
    return Block(name, tuple(slots), dict(kinds), working or kinds[MASTER])


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def align(numel: int) -> int:
    """The next place where a tensor may begin."""
    return max(-(-numel // ALIGNMENT), 1) * ALIGNMENT

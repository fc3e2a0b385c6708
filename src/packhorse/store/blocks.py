"""Blocks: how the model's tensors lie in a store.

In: tensors by name, grouped by who uses them. Out: `Block`, one contiguous piece of every kind (master, each optimizer
state). Tensors begin at multiples of `ALIGNMENT` elements in all kinds alike, so that any piece cut there can be read
and written by direct I/O, and the same range of elements is the same piece of the model in every kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from packhorse.memory import PAGE

ALIGNMENT = PAGE  # in elements: a page even of one-byte elements
UNIT = 1 << 20  # elements, at most, that are read, checked and written together

MASTER, WORKING, GRADIENT = "master", "working", "gradient"


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a block: `start` is its first element, `stride` how it lies there.

    Or a piece of one, flat, which begins at element `offset` of it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    numel: int
    offset: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def shape_of(self, flat: Tensor) -> Tensor:
        """This tensor, from its elements alone."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    @property
    def is_contiguous(self) -> bool:
        return self.stride == torch.empty(self.shape, device="meta").stride()

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """This tensor in a piece of its block that begins at element `start`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start - start)


@dataclass(frozen=True)
class Block:
    """Tensors that are fetched and updated together, and the kinds of them that are kept, each with its dtype."""

    name: str
    slots: tuple[Slot, ...]
    kinds: Mapping[str, torch.dtype]
    working: torch.dtype  # what segments run with: masters are cast to it as they are written, or fetched
    whole: bool = False  # its tensors cannot be updated in parts
    users: tuple[int, ...] = ()  # segments that add to its gradient; it is updated after the first; none: never
    length: int = 0  # in elements, where it is more than its tensors take

    @cached_property
    def numel(self) -> int:
        """Padding included."""
        return self.length or align(self.slots[-1].stop)

    def nbytes(self, kind: str) -> int:
        return self.numel * self.kinds[kind].itemsize

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """Ranges of elements that are read, checked and written together: each in one tensor if those are updated whole."""
        edges = [slot.start for slot in self.slots] if self.whole and self.slots else [0]
        ends = [*edges[1:], self.numel]
        return tuple(
            (a, min(a + UNIT, end)) for start, end in zip(edges, ends, strict=True) for a in range(start, end, UNIT)
        )

    def units_between(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Number, start and stop of the units of a range, which must begin and end with one."""
        found = [(i, a, b) for i, (a, b) in enumerate(self.units) if a >= start and b <= stop]
        assert found and (found[0][1], found[-1][2]) == (start, stop), f"{start} to {stop} are not whole units"
        return found

    def around(self, slot: Slot) -> tuple[int, int]:
        """The range of whole units that a tensor lies in."""
        touched = [(a, b) for a, b in self.units if a < slot.stop and b > slot.start]
        return (touched[0][0], touched[-1][1]) if touched else self.units[0]

    @property
    def is_cast(self) -> bool:
        return self.working != self.kinds[MASTER]

    @property
    def working_nbytes(self) -> int:
        return self.numel * self.working.itemsize

    @property
    def all_nbytes(self) -> int:
        return sum(self.nbytes(kind) for kind in self.kinds)

    @property
    def state_nbytes(self) -> int:
        """Masters and optimizer states: what an update reads."""
        return sum(self.nbytes(kind) for kind in (MASTER, *self.states))

    @property
    def states(self) -> list[str]:
        """The kinds that are states of an optimizer."""
        return [kind for kind in self.kinds if kind not in (MASTER, WORKING, GRADIENT)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}


def make_block(
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    kinds: Mapping[str, torch.dtype],
    working: torch.dtype | None = None,
    whole: bool = False,
    users: tuple[int, ...] = (),
) -> Block:
    """Lays tensors out one after another. Those that lie dense keep their strides, others become contiguous."""
    slots: list[Slot] = []
    start = 0
    for tensor_name, tensor in tensors:
        shape = tuple(tensor.shape)
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
        slots.append(Slot(tensor_name, *_share(shape, tuple(stride), start, tensor.numel())))
        start = align(slots[-1].stop)
    return Block(name, tuple(slots), dict(kinds), working or kinds[MASTER], whole, users)


@cache
def _share(shape: tuple[int, ...], stride: tuple[int, ...], *numbers: int) -> tuple[Any, ...]:
    """The same objects for all that is alike: a deep model has thousands of tensors, of few kinds."""
    return shape, stride, *numbers


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

"""Places: where in its files each version of a block lies.

In: blocks, and how many versions of them are kept. Out: the runs of pages that reads see, and those that writes go to. Either
every block has slots of its own, used in turn; or blocks share a spare, large enough for what is updated together: an update
goes there, and what it leaves is the next one's spare.
"""

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from packhorse.store.blocks import ALIGNMENT, GRADIENT, Block

Run = tuple[int, int]  # first page and number of pages; a page is ALIGNMENT elements
Runs = tuple[Run, ...]  # in the order of a block's elements


def make_places(blocks: Sequence[Block], versions: int, *, rolls: bool) -> "Places":
    return Spares(blocks) if rolls else Slots(blocks, versions)


class Places(ABC):
    """Gradients live within a step and lie in slots of their own, in either way."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = {block.name: block for block in blocks}
        self.sizes: dict[str, int] = {}  # kind -> bytes of its file
        self._bases: dict[tuple[str, str], int] = {}  # (block, kind) -> where its page 0 is
        self.gradient_slots: dict[str, int] = {}
        for block in blocks:
            if GRADIENT in block.kinds:
                self.gradient_slots[block.name] = 0
                nbytes = block.nbytes(GRADIENT) * self.num_gradient_slots(block)
                self._bases[block.name, GRADIENT] = self._extend(GRADIENT, nbytes)

    def num_gradient_slots(self, block: Block) -> int:
        return 1

    def _extend(self, kind: str, nbytes: int) -> int:
        start = self.sizes.get(kind, 0)
        self.sizes[kind] = start + nbytes
        return start

    def runs(self, block: Block, kind: str, *, write: bool) -> Runs:
        """Where a kind of a block is read, or written."""
        if kind == GRADIENT:
            slot = (self.gradient_slots[block.name] + write) % self.num_gradient_slots(block)
            return ((slot * _count_pages(block), _count_pages(block)),)
        return self._written_runs(block) if write else self._current_runs(block)

    def is_in_place(self, block: Block, kind: str) -> bool:
        """Whether a write takes the place of what reads see."""
        return self.runs(block, kind, write=True) == self.runs(block, kind, write=False)

    def ranges(self, block: Block, kind: str, runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
        """Offsets and bytes in the kind's file of elements `start` to `stop`, which are whole pages."""
        step, base = ALIGNMENT * block.kinds[kind].itemsize, self._bases[block.name, kind]
        first, last, at = start // ALIGNMENT, stop // ALIGNMENT, 0
        found = []
        for page, count in runs:
            a, b = max(first, at), min(last, at + count)
            if a < b:
                found.append((base + (page + a - at) * step, (b - a) * step))
            at += count
        return found

    def publish_gradient(self, block: Block) -> None:
        self.gradient_slots[block.name] = (self.gradient_slots[block.name] + 1) % self.num_gradient_slots(block)

    @abstractmethod
    def _current_runs(self, block: Block) -> Runs: ...

    @abstractmethod
    def _written_runs(self, block: Block) -> Runs: ...

    @abstractmethod
    def publish(self, block: Block) -> None:
        """What was written is what reads see from now on."""

    @abstractmethod
    def describe(self) -> list[Any]:
        """What is current, block by block, for a manifest."""

    @abstractmethod
    def restore(self, described: Sequence[Any]) -> None: ...

    @abstractmethod
    def unused(self) -> Iterator[tuple[str, int, int]]:
        """Kind, offset and bytes of what holds nothing that reads see."""


class Slots(Places):
    """Every block has one or two slots, one after the other."""

    def __init__(self, blocks: Sequence[Block], versions: int):
        super().__init__(blocks)
        self.versions = versions
        self.current = dict.fromkeys(self.blocks, 0)
        for block in blocks:
            for kind in _lasting(block):
                self._bases[block.name, kind] = self._extend(kind, versions * block.nbytes(kind))

    def _current_runs(self, block: Block) -> Runs:
        return ((self.current[block.name] * _count_pages(block), _count_pages(block)),)

    def _written_runs(self, block: Block) -> Runs:
        slot = (self.current[block.name] + 1) % self.versions
        return ((slot * _count_pages(block), _count_pages(block)),)

    def publish(self, block: Block) -> None:
        self.current[block.name] = (self.current[block.name] + 1) % self.versions

    def describe(self) -> list[Any]:
        return list(self.current.values())

    def restore(self, described: Sequence[Any]) -> None:
        self.current = dict(zip(self.blocks, described, strict=True))

    def unused(self) -> Iterator[tuple[str, int, int]]:
        for block in self.blocks.values() if self.versions > 1 else ():
            for kind in _lasting(block):
                for offset, nbytes in self.ranges(block, kind, self._written_runs(block), 0, block.numel):
                    yield kind, offset, nbytes


class Spares(Places):
    """Blocks of the same kinds, a family, share their pages, and as many spare ones as are updated together at most."""

    def __init__(self, blocks: Sequence[Block]):
        super().__init__(blocks)
        self._families: dict[str, Any] = {}
        self._current: dict[str, Runs] = {}
        self._written: dict[str, Runs] = {}
        self._lock = threading.Lock()
        families: defaultdict[Any, list[Block]] = defaultdict(list)
        for block in blocks:
            self._families[block.name] = family = tuple(_lasting(block).items())
            families[family].append(block)
        self._pages = {family: _count_all_pages(members) for family, members in families.items()}
        for family, members in families.items():
            for kind, dtype in family:
                base = self._extend(kind, self._pages[family] * ALIGNMENT * dtype.itemsize)
                self._bases.update({(block.name, kind): base for block in members})

    def num_gradient_slots(self, block: Block) -> int:
        """What a third segment adds to must not take the place of what it adds to."""
        return 2 if len(block.users) > 2 else 1

    def is_in_place(self, block: Block, kind: str) -> bool:
        return kind == GRADIENT and self.num_gradient_slots(block) == 1

    def _current_runs(self, block: Block) -> Runs:
        return self._current[block.name]

    def _written_runs(self, block: Block) -> Runs:
        with self._lock:
            if block.name not in self._written:
                self._written[block.name] = _take(self._free(self._families[block.name]), _count_pages(block))
            return self._written[block.name]

    def _free(self, family: Any) -> list[Run]:
        """The pages between those that are in use, as runs."""
        names = [name for name, other in self._families.items() if other == family]
        used = sorted(run for runs in (self._current, self._written) for name in names for run in runs.get(name, ()))
        free, at = [], 0
        for first, count in [*used, (self._pages[family], 0)]:
            if first > at:
                free.append((at, first - at))
            at = first + count
        return free

    def publish(self, block: Block) -> None:
        written = self._written_runs(block)
        with self._lock:
            self._current[block.name] = written
            del self._written[block.name]

    def adopt(self, block: Block, runs: Sequence[Sequence[int]]) -> None:
        """A block lies there, as a journal says."""
        self._current[block.name] = _as_runs(runs)

    def describe(self) -> list[Any]:
        return [self._current[name] for name in self.blocks]

    def restore(self, described: Sequence[Any]) -> None:
        self._current = {name: _as_runs(runs) for name, runs in zip(self.blocks, described, strict=True)}
        self._written.clear()

    def unused(self) -> Iterator[tuple[str, int, int]]:
        for family in self._pages:
            block = next(self.blocks[name] for name, other in self._families.items() if other == family)
            for first, count in self._free(family):
                for kind in _lasting(block):
                    step = ALIGNMENT * block.kinds[kind].itemsize
                    yield kind, self._bases[block.name, kind] + first * step, count * step


def _lasting(block: Block) -> dict[str, Any]:
    """The kinds that outlive a step."""
    return {kind: dtype for kind, dtype in block.kinds.items() if kind != GRADIENT}


def _count_pages(block: Block) -> int:
    return block.numel // ALIGNMENT


def _count_all_pages(blocks: Sequence[Block]) -> int:
    """Those of the blocks, and a spare for what one segment updates."""
    together: defaultdict[int, int] = defaultdict(int)
    for block in blocks:
        if block.users:
            together[block.users[0]] += _count_pages(block)
    return sum(_count_pages(block) for block in blocks) + max(together.values(), default=0)


def _take(free: list[Run], pages: int) -> Runs:
    """From the smallest run that is large enough; if there is none, from as few as possible."""
    taken: list[Run] = []
    while pages:
        fitting = [run for run in free if run[1] >= pages]
        run = min(fitting, key=lambda r: r[1]) if fitting else max(free, key=lambda r: r[1])
        free.remove(run)
        taken.append((run[0], min(run[1], pages)))
        pages -= taken[-1][1]
    return tuple(taken)


def _as_runs(described: Sequence[Sequence[int]]) -> Runs:
    return tuple((int(first), int(count)) for first, count in described)

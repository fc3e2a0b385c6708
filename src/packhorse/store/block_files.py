"""Block files: one file a kind, with the blocks of a model one after another, each in one or two numbered slots.

In: a layout of blocks, and which slot of each is current. Out: units of elements read, checked and written. Writes go to the
slot that is not current; `publish` makes it so. From the moment a unit is written its checksum says what it must contain.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import map_bytes
from packhorse.store.blocks import GRADIENT, MASTER, UNIT, Block, Slot
from packhorse.store.files import File, FileSystem, digest

Sums = list[int | None]  # of a block's units, in order; None: never written


class BlockFiles:
    """`versions` is 2, or 1 to overwrite in place; without `checked` nothing is compared."""

    def __init__(
        self,
        system: FileSystem,
        path: Path,
        blocks: Sequence[Block],
        versions: int,
        *,
        create: bool,
        checked: bool,
        allocate: bool = True,
    ):
        self.system, self.path, self.versions, self.checked = system, path, versions, checked
        self.blocks = {block.name: block for block in blocks}
        self.current = dict.fromkeys(self.blocks, 0)
        self.sums: dict[tuple[str, str], Sums] = {
            (block.name, kind): [None] * len(block.units) for block in blocks for kind in block.kinds
        }
        self._written = {key: list(sums) for key, sums in self.sums.items()}
        self._offsets: dict[tuple[str, str], tuple[int, ...]] = {}  # (block, kind) -> where its slots begin
        self.sizes: dict[str, int] = {}
        self._lay_out()
        self.files: dict[str, File] = {}
        for kind, nbytes in self.sizes.items():
            create_this = create or kind == GRADIENT
            self.files[kind] = File(system, path / f"{kind}.bin", nbytes, create=create_this, allocate=allocate)

    def _lay_out(self) -> None:
        for block in self.blocks.values():
            for kind in block.kinds:
                start, size = self.sizes.get(kind, 0), block.nbytes(kind)
                self._offsets[block.name, kind] = tuple(start + i * size for i in range(self.num_slots(kind)))
                self.sizes[kind] = start + self.num_slots(kind) * size

    def num_slots(self, kind: str) -> int:
        """Gradients live within a step and need no versions."""
        return 1 if kind == GRADIENT else self.versions

    def slot(self, block: Block, kind: str, *, write: bool) -> int:
        """The number of the slot that is read, or written."""
        if self.num_slots(kind) == 1:
            return 0
        return (self.current[block.name] + write) % self.versions

    def offset(self, block: Block, kind: str, slot: int) -> int:
        return self._offsets[block.name, kind][slot]

    # -- units

    def read(self, block: Block, kind: str, unit: int, target: Tensor, slot: int, expected: int | None) -> None:
        """A unit's bytes, as `expected` by its checksum."""
        file, offset, what = self._place(block, kind, unit, slot)
        file.read(target, offset, what)
        if self.checked and expected is not None and digest(_view(target)) != expected:
            raise StoreError(
                f"{what} at byte {offset} of {file.path} is damaged: what was read is not what was written; bring the "
                "file back from a copy, or start again"
            )

    def write(self, block: Block, kind: str, unit: int, source: Tensor, slot: int) -> None:
        file, offset, what = self._place(block, kind, unit, slot)
        if self.checked:
            self._written[block.name, kind][unit] = digest(_view(source))
            if self.num_slots(kind) == 1:
                self.sums[block.name, kind][unit] = self._written[block.name, kind][unit]
        file.write(source, offset, what)

    def _place(self, block: Block, kind: str, unit: int, slot: int) -> tuple[File, int, str]:
        offset = self.offset(block, kind, slot) + block.units[unit][0] * block.kinds[kind].itemsize
        return self.files[kind], offset, f"block {block.name} ({kind}, part {unit + 1} of {len(block.units)})"

    def read_elements(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a tensor, as they lie; at once, through memory of their own. For tools, not for training."""
        block, slot = self.find(name)
        parts = []
        for unit, (a, b) in enumerate(block.units):
            first, last = max(a, slot.start + start), min(b, slot.start + stop)
            if first < last:
                buffer = map_bytes((b - a) * block.kinds[kind].itemsize)
                number = self.slot(block, kind, write=False)
                self.read(block, kind, unit, buffer, number, self.sums[block.name, kind][unit])
                parts.append(buffer.view(block.kinds[kind])[first - a : last - a])
        return torch.cat(parts) if parts else torch.empty(0, dtype=block.kinds[kind])

    def read_pieces(self, name: str) -> Iterator[Tensor]:
        """A tensor's masters in the order of its dimensions, flat, a unit at a time."""
        _, slot = self.find(name)
        if not slot.is_contiguous:
            flat = self.read_elements(name, MASTER, 0, slot.numel)
            yield flat.as_strided(slot.shape, slot.stride).contiguous().view(-1)
            return
        for start in range(0, slot.numel, UNIT):
            yield self.read_elements(name, MASTER, start, min(start + UNIT, slot.numel))

    def find(self, name: str) -> tuple[Block, Slot]:
        return next((b, s) for b in self.blocks.values() for s in b.slots if s.name == name)

    # -- versions

    def publish(self, block: Block) -> None:
        """What has been written since the last time is complete: from now on reads see it."""
        self.current[block.name] = (self.current[block.name] + 1) % self.versions
        for kind in block.kinds:
            if self.num_slots(kind) > 1:
                self.sums[block.name, kind] = list(self._written[block.name, kind])

    def version(self) -> dict[str, Any]:
        """What a manifest says of all blocks."""
        return {
            "slots": list(self.current.values()),
            "sums": {
                f"{block}:{kind}": [None if s is None else f"{s:016x}" for s in sums]
                for (block, kind), sums in self.sums.items()
                if kind != GRADIENT
            },
        }

    def restore(self, version: Mapping[str, Any]) -> None:
        """Reads see that version again."""
        self.current = dict(zip(self.blocks, version["slots"], strict=True))
        for (block, kind), sums in self.sums.items():
            if kind != GRADIENT:
                found = version["sums"].get(f"{block}:{kind}", [None] * len(sums))
                self.sums[block, kind] = [None if s is None else int(s, 16) for s in found]

    def sync(self) -> None:
        for kind, file in self.files.items():
            if kind != GRADIENT:
                file.sync()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()


def _view(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]  # numpy's stubs hide that arrays are buffers


# -- descriptions


def describe_blocks(blocks: Sequence[Block]) -> list[Any]:
    """Blocks as a header tells of them; gradients are none of its business."""
    return [
        {
            "name": block.name,
            "kinds": {k: str(dtype).removeprefix("torch.") for k, dtype in block.kinds.items() if k != GRADIENT},
            "slots": [[slot.name, list(slot.shape), list(slot.stride), slot.start] for slot in block.slots],
            "whole": block.whole,
        }
        for block in blocks
    ]


def rebuild_blocks(described: Sequence[Mapping[str, Any]]) -> list[Block]:
    blocks = []
    for entry in described:
        kinds = {kind: getattr(torch, dtype) for kind, dtype in entry["kinds"].items()}
        slots = tuple(
            Slot(name, tuple(shape), tuple(stride), start, torch.Size(shape).numel())
            for name, shape, stride, start in entry["slots"]
        )
        blocks.append(Block(entry["name"], slots, kinds, kinds["master"], entry["whole"]))
    return blocks

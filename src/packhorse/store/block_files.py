"""Block files: one file a kind, with the blocks of a model.

In: blocks, and where in the files they lie (`places`). Out: units of elements read, checked and written. Writes go to another
place than the one reads see, until `publish`. From the moment a unit is written its checksum says what it must contain.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import map_bytes
from packhorse.store.blocks import GRADIENT, MASTER, UNIT, Block, Slot
from packhorse.store.encode import DTYPE_NAMES
from packhorse.store.files import File, FileSystem, as_bytes, digest
from packhorse.store.places import Runs, Spares, make_places

Sums = list[int | None]  # of a block's units, in order; None: never written


class BlockFiles:
    """`versions` is 2, or 1 to overwrite in place; `rolls`: 1 and a spare. Without `checked` nothing is compared."""

    def __init__(
        self,
        system: FileSystem,
        path: Path,
        blocks: Sequence[Block],
        versions: int,
        *,
        rolls: bool,
        create: bool,
        checked: bool,
        allocate: bool = True,
    ):
        self.system, self.path, self.versions, self.checked = system, path, versions, checked
        self.blocks = {block.name: block for block in blocks}
        self.sums: dict[tuple[str, str], Sums] = {
            (block.name, kind): [None] * len(block.units) for block in blocks for kind in block.kinds
        }
        self._written = {key: list(sums) for key, sums in self.sums.items()}
        self.places = make_places(blocks, versions, rolls=rolls)
        self.sizes = self.places.sizes
        self.files: dict[str, File] = {}
        for kind, nbytes in self.sizes.items():
            create_this = create or kind == GRADIENT
            self.files[kind] = File(system, path / f"{kind}.bin", nbytes, create=create_this, allocate=allocate)

    # -- units

    def read(self, block: Block, kind: str, unit: int, target: Tensor, runs: Runs, expected: int | None) -> None:
        """A unit's bytes, as `expected` by its checksum."""
        file, what = self.files[kind], self._name(block, kind, unit)
        ranges, at = self.places.ranges(block, kind, runs, *block.units[unit]), 0
        for offset, nbytes in ranges:
            file.read(target[at : at + nbytes], offset, what)
            at += nbytes
        if self.checked and expected is not None and digest(as_bytes(target)) != expected:
            raise StoreError(
                f"{what} at byte {ranges[0][0]} of {file.path} is damaged: what was read is not what was written; bring the "
                "file back from a copy, or start again"
            )

    def write(self, block: Block, kind: str, unit: int, source: Tensor, runs: Runs) -> None:
        if self.checked:
            self._written[block.name, kind][unit] = digest(as_bytes(source))
            if self.places.is_in_place(block, kind):
                self.sums[block.name, kind][unit] = self._written[block.name, kind][unit]
        at = 0
        for offset, nbytes in self.places.ranges(block, kind, runs, *block.units[unit]):
            self.files[kind].write(source[at : at + nbytes], offset, self._name(block, kind, unit))
            at += nbytes

    def _name(self, block: Block, kind: str, unit: int) -> str:
        return f"block {block.name} ({kind}, part {unit + 1} of {len(block.units)})"

    def read_elements(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements of a tensor, as they lie; at once, through memory of their own. For tools, not for training."""
        block, slot = self.find(name)
        parts = []
        for unit, (a, b) in enumerate(block.units):
            first, last = max(a, slot.start + start), min(b, slot.start + stop)
            if first < last:
                buffer = map_bytes((b - a) * block.kinds[kind].itemsize)
                runs = self.places.runs(block, kind, write=False)
                self.read(block, kind, unit, buffer, runs, self.sums[block.name, kind][unit])
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
        self.places.publish(block)
        for kind in block.kinds:
            if kind != GRADIENT:
                self.sums[block.name, kind] = list(self._written[block.name, kind])

    def publish_gradient(self, block: Block) -> None:
        self.places.publish_gradient(block)
        self.sums[block.name, GRADIENT] = list(self._written[block.name, GRADIENT])

    def version(self) -> dict[str, Any]:
        """What a manifest says of all blocks."""
        sums = {f"{block}:{kind}": _show(sums) for (block, kind), sums in self.sums.items() if kind != GRADIENT}
        return {"slots": self.places.describe(), "sums": sums}

    def restore(self, version: Mapping[str, Any]) -> None:
        """Reads see that version again."""
        self.places.restore(version["slots"])
        for (block, kind), sums in self.sums.items():
            if kind != GRADIENT:
                self.sums[block, kind] = _read_sums(version["sums"].get(f"{block}:{kind}", [None] * len(sums)))

    # -- what a journal says of single blocks

    def describe_written(self, block: Block) -> dict[str, Any]:
        """Where what has been written since the last publish lies, and what it contains."""
        kinds = [kind for kind in block.kinds if kind != GRADIENT]
        sums = {kind: _show(self._written[block.name, kind]) for kind in kinds}
        return {"runs": self.places.runs(block, MASTER, write=True), "sums": sums}

    def adopt(self, block: Block, described: Mapping[str, Any]) -> None:
        """Reads see what `describe_written` told of."""
        assert isinstance(self.places, Spares)
        self.places.adopt(block, described["runs"])
        for kind, sums in described["sums"].items():
            self.sums[block.name, kind] = _read_sums(sums)

    def describe_gradient(self, block: Block) -> dict[str, Any]:
        return {"slot": self.places.gradient_slots[block.name], "sums": _show(self.sums[block.name, GRADIENT])}

    def adopt_gradient(self, block: Block, described: Mapping[str, Any]) -> None:
        self.places.gradient_slots[block.name] = int(described["slot"])
        self.sums[block.name, GRADIENT] = _read_sums(described["sums"])

    def sync(self, *, gradients: bool = False) -> None:
        for kind, file in self.files.items():
            if kind != GRADIENT or gradients:
                file.sync()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()


def _show(sums: Sums) -> list[str | None]:
    return [None if s is None else f"{s:016x}" for s in sums]


def _read_sums(shown: Sequence[str | None]) -> Sums:
    return [None if s is None else int(s, 16) for s in shown]


# -- descriptions


def describe_blocks(blocks: Sequence[Block]) -> list[Any]:
    """Blocks as a header tells of them; gradients are none of its business."""
    return [
        {
            "name": block.name,
            "kinds": {k: DTYPE_NAMES[dtype] for k, dtype in block.kinds.items() if k != GRADIENT},
            "slots": [(slot.name, slot.shape, slot.stride, slot.start, slot.offset) for slot in block.slots],
            "whole": block.whole,
            "users": block.users,
            "length": block.length,
        }
        for block in blocks
    ]


def rebuild_blocks(described: Sequence[Mapping[str, Any]]) -> list[Block]:
    blocks = []
    for entry in described:
        kinds = {kind: getattr(torch, dtype) for kind, dtype in entry["kinds"].items()}
        slots = tuple(
            Slot(name, tuple(shape), tuple(stride), start, torch.Size(shape).numel(), offset)
            for name, shape, stride, start, offset in entry["slots"]
        )
        users, whole, length = tuple(entry["users"]), entry["whole"], entry["length"]
        blocks.append(Block(entry["name"], slots, kinds, kinds["master"], whole, users, length))
    return blocks

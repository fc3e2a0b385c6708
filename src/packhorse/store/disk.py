"""The store on disk: one file a kind, direct I/O, versions in numbered slots, a manifest that says which slot is current.

store.json       what is stored: model, blocks, kinds; written once
manifest.json    the last committed step: which slot of each block and kind is current, and the run's own facts
small-N.safetensors   what is too small for blocks: written buffers, scalar optimizer states
KIND.bin         the slots of all blocks
stash.bin        boundary values of the step that runs; of no use afterwards
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool
from packhorse.store.blocks import GRADIENT, Block
from packhorse.store.lane import Lane
from packhorse.store.store import Link, Store
from packhorse.units import format_bytes

FORMAT = 1
PIECE = 4 << 20  # bytes of one I/O operation: large enough for full speed, small enough to let urgent ones pass
THREADS = 2  # enough for full speed with pieces of that size


class DiskStore(Store):
    """`bytes_per_second` slows it down; `versions=1` gives up the last committed step for half the space."""

    on_disk = True

    def __init__(self, directory: str | Path, *, bytes_per_second: float | None = None, versions: int = 2):
        self.path = Path(directory)
        self.link = Link(bytes_per_second)
        self.versions = versions
        self.lane = Lane("packhorse-disk", THREADS)
        self._files: dict[str, File] = {}
        self._offsets: dict[tuple[str, str], tuple[int, ...]] = {}  # (block, kind) -> where its slots begin
        self._current: dict[str, int] = {}  # block -> the slot that reads see
        self._blocks: dict[str, Block] = {}
        self._pool = Pool(Ledger())

    # -- making and opening

    def read_manifest(self) -> dict[str, Any] | None:
        if not (self.path / "manifest.json").exists():
            return None
        try:
            return dict(json.loads((self.path / "manifest.json").read_text()))
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path / 'manifest.json'} cannot be read: {error}") from None

    def create(self, blocks: Sequence[Block], pool: Pool, identity: Mapping[str, Any]) -> None:
        self._lay_out(blocks, pool)
        self._make_directory()
        sizes = self._sizes()
        self._refuse_if_full(sum(sizes.values()))
        try:
            for kind, nbytes in sizes.items():
                self._files[kind] = File(self.path / f"{kind}.bin", nbytes)
        except OSError as error:
            raise StoreError(f"{self.path} cannot hold the store: {error.strerror or error}") from None
        described = {
            "format": FORMAT,
            "identity": dict(identity),
            "blocks": _describe(blocks),
            "versions": self.versions,
        }
        _replace(self.path / "store.json", json.dumps(described))
        (self.path / "manifest.json").unlink(missing_ok=True)
        pool.ledger.add("disk", "store", sum(sizes.values()))

    def open(self, blocks: Sequence[Block], pool: Pool, identity: Mapping[str, Any]) -> None:
        found = dict(json.loads((self.path / "store.json").read_text()))
        if found.get("format") != FORMAT:
            raise StoreError(f"{self.path} has format {found.get('format')}, this version reads {FORMAT}")
        if found["identity"] != json.loads(json.dumps(dict(identity))):
            raise StoreError(f"{self.path} belongs to another model: {_difference(found['identity'], identity)}")
        if found["blocks"] != json.loads(json.dumps(_describe(blocks))):
            raise StoreError(
                f"{self.path} was cut into other blocks; resume with the segments and precision it was made with"
            )
        self.versions = found["versions"]
        self._lay_out(blocks, pool)
        sizes = self._sizes()
        for kind, nbytes in sizes.items():
            self._files[kind] = File(self.path / f"{kind}.bin", nbytes)
        manifest = self.read_manifest()
        assert manifest is not None, "a store without manifest is created, not opened"
        self._current = dict(zip(self._blocks, manifest["slots"], strict=True))
        pool.ledger.add("disk", "store", sum(sizes.values()))

    def _lay_out(self, blocks: Sequence[Block], pool: Pool) -> None:
        self._blocks = {block.name: block for block in blocks}
        self._current = dict.fromkeys(self._blocks, 0)
        self._pool = pool
        ends: dict[str, int] = {}
        for block in blocks:
            for kind in block.kinds:
                offsets = []
                for _ in range(self._num_slots(kind)):
                    offsets.append(ends.get(kind, 0))
                    ends[kind] = offsets[-1] + block.nbytes(kind)
                self._offsets[block.name, kind] = tuple(offsets)

    def _num_slots(self, kind: str) -> int:
        """Gradients live within a step and need no versions."""
        return 1 if kind == GRADIENT else self.versions

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (name, kind), offsets in self._offsets.items():
            sizes[kind] = max(sizes.get(kind, 0), offsets[-1] + self._blocks[name].nbytes(kind))
        return sizes

    def _make_directory(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"the store directory {self.path} is not writable ({error.strerror}); choose another, or change its permissions"
            ) from None

    def _refuse_if_full(self, needed: int) -> None:
        held = sum(f.stat().st_blocks * 512 for f in self.path.glob("*.bin"))
        free = shutil.disk_usage(self.path).free + held
        if needed > free:
            raise StoreError(
                f"the store needs {format_bytes(needed)} in {self.path}, but {format_bytes(free)} are free there; "
                f"make room, choose another directory, or a lighter optimizer"
            )

    # -- loans

    def borrow(
        self,
        block: Block,
        kind: str,
        start: int = 0,
        stop: int | None = None,
        *,
        read: bool = True,
        urgent: bool = False,
        buffer: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> "DiskLoan":
        stop = block.numel if stop is None else stop
        return DiskLoan(self, block, kind, start, stop, dtype or block.kinds[kind], read, urgent, buffer)

    def publish(self, block: Block) -> None:
        self._current[block.name] = self._written_slot(block)

    def carry_over(self, block: Block, kind: str) -> None:
        if self._num_slots(kind) > 1:
            loan = self.borrow(block, kind)
            loan.ready.result()
            written = loan.give_back(dirty=True)
            assert written is not None
            written.result()

    def _written_slot(self, block: Block) -> int:
        return (self._current[block.name] + 1) % self.versions

    def transfer(self, loan: "DiskLoan", *, write: bool, urgent: bool) -> "Future[Tensor]":
        """Moves a loan's bytes, in pieces."""
        block, kind = loan.block, loan.kind
        slots = self._offsets[block.name, kind]
        slot = self._written_slot(block) if write else self._current[block.name]
        offset = slots[slot if len(slots) > 1 else 0] + loan.start * block.kinds[kind].itemsize
        file, what = self._files[kind], f"block {block.name} ({kind})"
        if loan.result.dtype == block.kinds[kind]:
            return self.move(file, loan.buffer, offset, loan.result, what, write, urgent)
        assert not write, "a cast copy is read only"
        return self._read_cast(file, loan.result, block.kinds[kind], offset, what, urgent)

    def _read_cast(
        self, file: "File", target: Tensor, dtype: torch.dtype, offset: int, what: str, urgent: bool
    ) -> "Future[Tensor]":
        """Reads elements of `dtype` and casts them, piece by piece, so that they are never all in memory as they are stored."""
        step = PIECE // dtype.itemsize

        def job(at: int) -> Callable[[], None]:
            def run() -> None:
                piece = target[at : at + step]
                stored = self._pool.take(piece.numel() * dtype.itemsize, "weights")
                file.read(stored, offset + at * dtype.itemsize, what)
                piece.copy_(stored.view(dtype))
                self._pool.give(stored, "weights")
                self.link.pass_through(stored.nbytes)

            return run

        return self.lane.submit_all([job(at) for at in range(0, target.numel(), step)], target, urgent=urgent)

    def move(
        self, file: "File", buffer: Tensor, offset: int, result: Any, what: str, write: bool, urgent: bool
    ) -> "Future[Any]":
        """Moves bytes between a buffer and a file."""

        def job(at: int) -> Callable[[], None]:
            def run() -> None:
                piece = buffer[at : at + PIECE]
                file.write(piece, offset + at, what) if write else file.read(piece, offset + at, what)
                self.link.pass_through(piece.nbytes)

            return run

        return self.lane.submit_all([job(at) for at in range(0, buffer.nbytes, PIECE)], result, urgent=urgent)

    def take_buffer(self, nbytes: int, kind: str) -> Tensor:
        return self._pool.take(nbytes, kind)

    def give_buffer(self, buffer: Tensor, kind: str) -> None:
        self._pool.give(buffer, kind)

    # -- the run

    def commit(self, facts: Mapping[str, Any], small: Mapping[str, Tensor]) -> None:
        """In one atomic step: the manifest is replaced."""
        number = int(facts["step"]) % 2
        save_file(
            {name: tensor.contiguous() for name, tensor in small.items()}, self.path / f"small-{number}.safetensors"
        )
        manifest = {**facts, "format": FORMAT, "small": number, "slots": list(self._current.values())}
        _replace(self.path / "manifest.json", json.dumps(manifest))

    def read_small(self, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
        return load_file(self.path / f"small-{manifest['small']}.safetensors")

    def close(self) -> None:
        self.lane.close()
        for file in self._files.values():
            file.close()
        self._files.clear()


class DiskLoan:
    """A buffer that is being filled from a file, and written back if it comes home dirty."""

    def __init__(
        self,
        store: DiskStore,
        block: Block,
        kind: str,
        start: int,
        stop: int,
        dtype: torch.dtype,
        read: bool,
        urgent: bool,
        buffer: Tensor | None,
    ):
        self.store, self.block, self.kind, self.start = store, block, kind, start
        self.role = "weights" if urgent else "update buffers"
        self.own = buffer is None
        self.buffer = (
            store.take_buffer((stop - start) * dtype.itemsize, self.role)
            if buffer is None
            else buffer.view(torch.uint8)
        )
        self.result = self.buffer.view(dtype)
        self.ready: Future[Tensor] = (
            store.transfer(self, write=False, urgent=urgent) if read else store.lane.submit_all([], self.result)
        )

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        if not dirty:
            self._release()
            return None
        written = self.store.transfer(self, write=True, urgent=False)
        written.add_done_callback(lambda _: self._release())
        return written

    def _release(self) -> None:
        if self.own:
            self.store.give_buffer(self.buffer, self.role)


class File:
    """A file for direct I/O; where the file system offers none, an ordinary one."""

    def __init__(self, path: Path, nbytes: int):
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            self.descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.descriptor = os.open(path, flags, 0o644)
        if nbytes and os.fstat(self.descriptor).st_size < nbytes:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, nbytes)
            else:
                os.ftruncate(self.descriptor, nbytes)

    def read(self, piece: Tensor, offset: int, what: str) -> None:
        self._all(os.preadv, piece, offset, f"reading {what}")

    def write(self, piece: Tensor, offset: int, what: str) -> None:
        self._all(os.pwritev, piece, offset, f"writing {what}")

    def _all(self, move: Callable[..., int], piece: Tensor, offset: int, what: str) -> None:
        view = memoryview(piece.numpy())  # type: ignore[arg-type]  # numpy's stubs hide that arrays are buffers
        moved = 0
        while moved < len(view):
            try:
                count = move(self.descriptor, [view[moved:]], offset + moved)
            except OSError as error:
                raise StoreError(f"{what} at byte {offset + moved} of {self.path} failed: {error.strerror}") from error
            if count == 0:
                raise StoreError(f"{what} at byte {offset + moved} of {self.path} failed: the file ends there")
            moved += count

    def close(self) -> None:
        os.close(self.descriptor)


def _describe(blocks: Sequence[Block]) -> list[Any]:
    return [
        {
            "name": block.name,
            "kinds": {kind: str(dtype).removeprefix("torch.") for kind, dtype in block.kinds.items()},
            "slots": [[slot.name, list(slot.shape), list(slot.stride), slot.start] for slot in block.slots],
        }
        for block in blocks
    ]


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first thing in which two identities differ."""
    wanted = json.loads(json.dumps(dict(wanted)))
    for key in wanted:
        if isinstance(wanted[key], dict) and isinstance(found.get(key), dict):
            names = [n for n in {**wanted[key], **found[key]} if wanted[key].get(n) != found[key].get(n)]
            if names:
                return f"{names[0]} is {found[key].get(names[0])} there and {wanted[key].get(names[0])} here"
        elif wanted[key] != found.get(key):
            return f"{key} is {found.get(key)} there and {wanted[key]} here"
    return "it has other facts"


def _replace(path: Path, text: str) -> None:
    """Writes a file so that it is there as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)

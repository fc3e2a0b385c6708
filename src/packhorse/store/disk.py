"""The store on disk. It is the checkpoint: whatever dies, the last committed step is there, whole.

manifest.json         the last committed step: which slot of each block is current, checksums, the run's own facts
previous.json         the one before, which a store that ranks share may have to go back to
small-N.safetensors   what is too small for blocks: written buffers, scalar optimizer states
blocks-N/header.json  what is stored: model, optimizer, tensors, blocks; written once
blocks-N/KIND.bin     the blocks, in two slots each, or with one spare for all; `gradient.bin` lives within a step
stash.bin             boundary values of the step that runs; of no use afterwards
step.journal          with one spare: what of the step that runs is done, and what finishing it takes (step.bin)
lock                  who uses the store

With two slots an update never touches those that the manifest names. A commit writes the small tensors beside those of the last
one, and then replaces the manifest, in one atomic step. With one spare an updated block takes it, and leaves its own place to
the next, once the journal says so: an interrupted step cannot be undone then, but it can be finished.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool
from packhorse.store.block_files import BlockFiles, describe_blocks, rebuild_blocks
from packhorse.store.blocks import GRADIENT, MASTER, WORKING, Block
from packhorse.store.files import File, FileSystem, Lock, digest, is_same_json, replace_small, seal, unseal, write_small
from packhorse.store.journal import Journal
from packhorse.store.lane import ORDINARY, Lane, do_now, gather
from packhorse.store.places import make_places
from packhorse.store.relayout import copy_blocks, find_difference, write_working
from packhorse.store.runs import MANIFESTS, Earlier
from packhorse.store.store import Link, Store, done
from packhorse.units import format_bytes

FORMAT = 4
PIECE = 4 << 20  # bytes of one I/O operation: large enough for full speed, small enough to let urgent ones pass
THREADS = 2  # enough for full speed with pieces of that size

Durability = Literal["none", "process", "power"]


def check_durability(durability: str) -> None:
    if durability not in get_args(Durability):
        raise StoreError(f"durability is {durability!r}, expected one of {', '.join(get_args(Durability))}")


class DiskStore(Store):
    """`durability`: what a commit survives: `process` its end, however sudden; `power` that of the machine; `none` nothing.

    With `none` blocks are overwritten in place, unchecked, for half the space; such a store can be resumed only after it was
    closed. `versions`: of each block; with 1 and a spare place, a step that was interrupted is not undone but finished by the
    run that resumes it. None: 2 if the disk holds them, else 1. `bytes_per_second` slows the store down, on purpose.
    """

    on_disk = True
    keeps_previous = False  # the manifest before the last

    def __init__(
        self,
        directory: str | Path,
        *,
        durability: Durability = "process",
        versions: int | None = None,
        bytes_per_second: float | None = None,
        filesystem: FileSystem | None = None,
    ):
        check_durability(durability)
        _check_versions(versions, durability)
        self.path, self.durability = Path(directory), durability
        self._asked = versions
        self.versions = 1 if durability == "none" else versions or 2
        self.link = Link(bytes_per_second)
        self.system = filesystem or FileSystem()
        self.lane = Lane("packhorse-disk", THREADS)
        self.lock = Lock(self.path / "lock")
        self._pool = Pool(Ledger())
        self._files: BlockFiles | None = None
        self._committed: dict[str, Any] | None = None  # the manifest, but for what it says of every block
        self._unwritten: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None  # without durability: a commit
        self._base = ""  # the checksum of that
        self.journal = Journal(self.system, self.path, sync=durability == "power")
        self.step_files: list[File] = []  # others that a step writes, and that finishing it takes
        self._counted = 0  # bytes, by the ledger
        self._dirty = False  # blocks were written since the last commit
        self._torn = False  # without durability: a step failed after that

    def moved_to(self, directory: str | Path) -> "DiskStore":
        """Such a store elsewhere, instead of this one, which has not been opened."""
        self.close()
        return DiskStore(
            directory,
            durability=self.durability,
            versions=self._asked,
            bytes_per_second=self.link.bytes_per_second,
            filesystem=self.system,
        )

    @property
    def files(self) -> BlockFiles:
        assert self._files is not None, "the store is not open"
        return self._files

    @property
    def committed_step(self) -> int:
        assert self._committed is not None, "the store is open"
        return int(self._committed["facts"]["step"])

    # -- making and opening

    def read_manifest(self) -> dict[str, Any] | None:
        path = self.path / "manifest.json"
        if not path.exists():
            return None
        manifest = unseal(path)
        self._base = f"{digest(path.read_bytes()):016x}"
        if manifest.get("format") != FORMAT:
            raise StoreError(f"{path} has format {manifest.get('format')}, this version of packhorse reads {FORMAT}")
        return manifest

    def claim(self) -> None:
        self._make_directory()
        self.lock.take()

    def create(self, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]) -> None:
        self.claim()
        self._pool = pool
        self._files = self._make_files("blocks-0", blocks, header)
        for number in (0, 1):  # made beforehand, so that a commit only writes
            write_small(self.system, self._small_path(number), b"", sync=self._syncs)
        if self._syncs:
            self.system.sync_directory(self.path)
        self._count()

    def _make_files(self, name: str, blocks: Sequence[Block], header: Mapping[str, Any]) -> BlockFiles:
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)  # left by an attempt that did not come to its first commit
        self.system.make_directory(path)
        self._refuse_if_full(sum(make_places(blocks, self.versions, rolls=self.rolls).sizes.values()))
        files = self._block_files(path, blocks, create=True)
        whole = {**header, "format": FORMAT, "blocks": describe_blocks(blocks), "versions": self.versions}
        replace_small(self.system, path / "header.json", seal(whole), sync=self._syncs)
        return files

    def _block_files(self, path: Path, blocks: Sequence[Block], *, create: bool) -> BlockFiles:
        checked = self.durability != "none"
        return BlockFiles(self.system, path, blocks, self.versions, rolls=self.rolls, create=create, checked=checked)

    @property
    def holds_run(self) -> bool:
        return (self.path / "manifest.json").is_file()

    def find_versions(self) -> int | None:
        """As asked; else those of the run that is stored."""
        if self._asked is not None or self.durability == "none":
            return self.versions
        manifest = self.read_manifest()
        if manifest is None or not manifest["checked"]:
            return None
        return int(unseal(self.path / manifest["blocks"] / "header.json")["versions"])

    def find_unfinished(self) -> Journal | None:
        manifest = self.read_manifest()
        return self.journal if manifest is not None and self.journal.read(self._base) else None

    def find_steps(self) -> list[int]:
        """Those that can be continued from: the last committed, and the one before if it is kept."""
        found = [self.path / name for name in MANIFESTS]
        return [int(unseal(path)["facts"]["step"]) for path in found if path.exists()]

    def go_back(self) -> None:
        """To the commit before the last, nothing having been written since that."""
        content = (self.path / "previous.json").read_bytes()
        replace_small(self.system, self.path / "manifest.json", content, sync=self._syncs)

    def has_room(self, nbytes: int) -> bool:
        """For so many bytes more; the directory need not be there yet."""
        place = self.path
        while not place.exists():
            place = place.parent
        return nbytes <= shutil.disk_usage(place).free

    def open_as_it_is(self, pool: Pool) -> dict[str, Any]:
        """Opens whatever run is stored, and returns its manifest."""
        self.lock.take()
        self._pool = pool
        manifest = self.read_manifest()
        if manifest is None:
            raise StoreError(f"{self.path} holds no run: there is no manifest.json")
        if manifest["open"]:
            raise StoreError(
                f"the run in {self.path} was written with durability='none' and was not closed: blocks of different steps may "
                "be mixed, so it cannot be continued; start again in an empty directory"
            )
        path = self.path / manifest["blocks"]
        header = unseal(path / "header.json")
        checked, versions = manifest["checked"], header["versions"]
        blocks, rolls = rebuild_blocks(header["blocks"]), checked and versions == 1
        if self._files is not None:
            self._files.close()
        self._files = BlockFiles(
            self.system, path, blocks, versions, rolls=rolls, create=False, checked=checked, allocate=False
        )
        self._keep(manifest)
        self._take_up(manifest, rolls)
        return manifest

    def read_header(self) -> dict[str, Any]:
        """What is stored. Of a deep model it is large, so nobody keeps it."""
        return unseal(self.files.path / "header.json")

    def _take_up(self, manifest: Mapping[str, Any], rolls: bool) -> None:
        """Reads see the last commit, and what an interrupted step had updated since."""
        self.files.restore(manifest["version"])
        if not rolls or not self.journal.read(self._base):
            return
        for record in self.journal.records:
            for name, described in record["blocks"].items():
                self.files.adopt(self.files.blocks[name], described)
        for name, described in self.journal.records[-1]["parked"].items():
            if GRADIENT in self.files.blocks[name].kinds:
                self.files.adopt_gradient(self.files.blocks[name], described)

    def open(self, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]) -> None:
        """Continues the run that is stored. Where the model is now cut into other blocks, it is laid out anew."""
        manifest = self.open_as_it_is(pool)
        found = self.read_header()
        difference = find_difference(found, header)
        if difference:
            raise StoreError(f"{self.path} belongs to another model or optimizer: {difference}")
        same = is_same_json(found["blocks"], describe_blocks(blocks)) and found["versions"] == self.versions
        if same and manifest["checked"] == (self.durability != "none"):
            path = self.files.path
            self.files.close()
            self._files = self._block_files(path, blocks, create=False)
            if self._syncs:  # a file of gradients may be new
                self.system.sync_directory(path)
            self._take_up(manifest, self.rolls)
        elif self.journal.intent is not None:
            raise StoreError(
                f"a step of the run in {self.path} was interrupted and has to be finished as it was begun, but the model is "
                "now cut or trained otherwise; resume once with the options of that run"
            )
        else:
            self._lay_out_anew(blocks, header)
            self.is_laid_out_anew = True
        if self.durability == "none":
            self._write_manifest(self._read_committed(), open=True)
        self._count()

    def continue_from(
        self, earlier: Earlier, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Takes over the run of other ranks than these, and returns its small tensors. The caller commits."""
        difference = find_difference(earlier.header, header)
        if difference:
            raise StoreError(f"{earlier.directory} belongs to another model or optimizer: {difference}")
        for name in MANIFESTS:  # what there was here is older
            (self.path / name).unlink(missing_ok=True)
        self.create(blocks, pool, header)
        old = earlier.open_files()
        try:
            copy_blocks(old, self.files, pool)
        finally:
            for files in old:
                files.close()
        return earlier.read_small()

    def _count(self) -> None:
        nbytes = sum(self.files.sizes.values())
        self._pool.ledger.add("disk", "store", nbytes - self._counted)
        self._counted = nbytes

    def _lay_out_anew(self, blocks: Sequence[Block], header: Mapping[str, Any]) -> None:
        """Copies all tensors into new files, unit by unit, and then lets the manifest name those."""
        old, manifest = self.files, self._read_committed()
        number = int(old.path.name.rpartition("-")[2]) + 1
        new = self._make_files(f"blocks-{number}", blocks, header)
        copy_blocks([old], new, self._pool)
        if self._syncs:
            new.sync()
        self._files = new
        self._write_manifest({**manifest, "blocks": new.path.name, "version": new.version(), "checked": new.checked})
        old.close()
        shutil.rmtree(old.path)

    def _make_directory(self) -> None:
        try:
            self.system.make_directory(self.path)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"the store directory {self.path} is not writable ({error.strerror}); choose another, or change its permissions"
            ) from None

    def _refuse_if_full(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed > free:
            fewer = ", versions=1" if self.versions == 2 else ""
            raise StoreError(
                f"the store needs {format_bytes(needed)} in {self.path}, but {format_bytes(free)} are free there; "
                f"make room, choose another directory{fewer}, or a lighter optimizer"
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
        priority: int = ORDINARY,
        dtype: torch.dtype | None = None,
        here: bool = False,
    ) -> "DiskLoan":
        stop = block.numel if stop is None else stop
        role = "update buffers" if dtype is None else "weights"
        if dtype is not None and dtype != block.kinds[kind]:
            assert kind == MASTER and dtype == block.kinds[WORKING], "the only cast copy there is"
            kind = WORKING
        return DiskLoan(self, block, kind, start, stop, role, read, None if here else priority)

    def work(self, job: Callable[[], Any], *, priority: int = ORDINARY) -> "Future[Any]":
        return self.lane.submit(job, priority=priority)

    def publish(self, block: Block) -> None:
        self.files.publish(block)

    def begin_step(self, intent: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """With one version, before the first update of a step: what finishing it takes. Once is enough."""
        if self.journal.intent is None:
            if self._syncs:
                self._sync_step()
            self.journal.begin(self._base, intent, tensors)

    def publish_together(self, blocks: Sequence[Block], record: Mapping[str, Any]) -> None:
        """Updates of one segment: with one version the journal tells of all of them at once, before reads see them."""
        if self.rolls:
            if self._syncs:
                self._sync_step()
            self.journal.append({**record, "blocks": {b.name: self.files.describe_written(b) for b in blocks}})
        super().publish_together(blocks, record)

    def _sync_step(self) -> None:
        self.files.sync(gradients=True)
        for file in self.step_files:
            file.sync()

    def publish_gradient(self, block: Block) -> None:
        self.files.publish_gradient(block)

    def describe_gradient(self, block: Block) -> dict[str, Any]:
        return self.files.describe_gradient(block)

    def carry_over(self, block: Block, kind: str) -> None:
        if not self.files.places.is_in_place(block, kind):
            loan = self.borrow(block, kind)
            loan.ready.result()
            written = loan.give_back(dirty=True)
            assert written is not None
            written.result()

    def transfer(self, loan: "DiskLoan", *, write: bool) -> "Future[Tensor]":
        """Moves a loan's bytes, unit by unit."""
        block, kind, files = loan.block, loan.kind, self.files
        self._dirty = self._dirty or (write and kind != GRADIENT)
        runs, sums = files.places.runs(block, kind, write=write), files.sums[block.name, kind]

        def job(unit: int, start: int, stop: int) -> Callable[[], None]:
            def run() -> None:
                piece = loan.result[start - loan.start : stop - loan.start]
                if write:
                    files.write(block, kind, unit, piece.view(torch.uint8), runs)
                    if kind == MASTER:
                        self.link.pass_through(write_working(files, block, unit, piece, runs, self._pool))
                else:
                    files.read(block, kind, unit, piece.view(torch.uint8), runs, sums[unit])
                self.link.pass_through(piece.nbytes)

            return run

        assert not write or kind != WORKING, "a cast copy is read only"
        jobs = [job(*unit) for unit in block.units_between(loan.start, loan.stop)]
        if loan.priority is None:
            return gather([do_now(do) for do in jobs], lambda: loan.result)
        return self.lane.submit_all(jobs, loan.result, priority=loan.priority)

    def move(
        self, file: File, buffer: Tensor, offset: int, result: Any, what: str, write: bool, priority: int
    ) -> "Future[Any]":
        """Moves bytes between a buffer and a file that is none of the blocks'."""

        def job(at: int) -> Callable[[], None]:
            def run() -> None:
                piece = buffer[at : at + PIECE]
                file.write(piece, offset + at, what) if write else file.read(piece, offset + at, what)
                self.link.pass_through(piece.nbytes)

            return run

        return self.lane.submit_all([job(at) for at in range(0, buffer.nbytes, PIECE)], result, priority=priority)

    def take_buffer(self, nbytes: int, kind: str) -> Tensor:
        return self._pool.take(nbytes, kind)

    def give_buffer(self, buffer: Tensor, kind: str) -> None:
        self._pool.give(buffer, kind)

    # -- the run

    @property
    def rolls(self) -> bool:  # type: ignore[override]  # it may change until blocks are made
        return self.versions == 1 and self.durability != "none"

    @property
    def _syncs(self) -> bool:
        return self.durability == "power"

    def commit(self, facts: Mapping[str, Any], small: Mapping[str, Tensor]) -> None:
        """Everything is written before the manifest names it; replacing the manifest is the commit."""
        self._dirty = False
        if self.durability == "none" and self._committed is not None:
            self._unwritten = (facts, small)
            return
        self._commit(facts, small, is_open=self.durability == "none")

    def _commit(self, facts: Mapping[str, Any], small: Mapping[str, Tensor], *, is_open: bool) -> None:
        number = 1 - self._committed["small"]["number"] if self._committed is not None else 0
        content = save({name: tensor.contiguous() for name, tensor in small.items()})
        write_small(self.system, self._small_path(number), content, sync=self._syncs)
        if self._syncs:
            self.files.sync()
        manifest = {
            "format": FORMAT,
            "facts": dict(facts),
            "small": {"number": number, "sum": f"{digest(content):016x}"},
            "blocks": self.files.path.name,
            "version": self.files.version(),
            "checked": self.files.checked,
            "open": is_open,
        }
        self._write_manifest(manifest)

    def _write_manifest(self, manifest: Mapping[str, Any], **changes: Any) -> None:
        """Replacing the file is the commit, even if what comes after it fails."""
        manifest, path = {**manifest, **changes}, self.path / "manifest.json"
        content = seal(manifest)
        if self.keeps_previous and path.exists():
            replace_small(self.system, self.path / "previous.json", path.read_bytes(), sync=self._syncs)
        try:
            replace_small(self.system, path, content, sync=self._syncs)
        except StoreError:
            if path.exists() and path.read_bytes() == content:
                self._take_note(manifest, content)
            raise
        self._take_note(manifest, content)

    def _take_note(self, manifest: dict[str, Any], content: bytes) -> None:
        """That is the commit from now on; the journal of the step before is of no use any more."""
        self._keep(manifest)
        self._base = f"{digest(content):016x}"
        self.journal.forget()

    def _keep(self, manifest: Mapping[str, Any]) -> None:
        """Of a deep model what it says of blocks is large, and read again when it is wanted."""
        self._committed = {key: said for key, said in manifest.items() if key != "version"}

    def _read_committed(self) -> dict[str, Any]:
        manifest = self.read_manifest()
        assert manifest is not None, "the store is open"
        return manifest

    def _small_path(self, number: int) -> Path:
        return self.path / f"small-{number}.safetensors"

    def read_small(self) -> dict[str, Tensor]:
        assert self._committed is not None
        entry = self._committed["small"]
        path = self._small_path(entry["number"])
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
        if f"{digest(content):016x}" != entry["sum"]:
            raise StoreError(
                f"{path} is damaged: it does not have the checksum in the manifest; bring it back from a copy"
            )
        try:
            return load(content)
        except SafetensorError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error

    def roll_back(self) -> Mapping[str, Any] | None:
        if self.durability == "none" or self._committed is None:
            self._torn = self._torn or self._dirty
            return None
        if self.journal.records:
            first = self.journal.records[-1]["segment"]
            raise StoreError(
                f"there is one version, and segment {first} is updated already: a run with resume=True finishes the step"
            )
        self.journal.forget()
        manifest = self._read_committed()
        self.files.restore(manifest["version"])
        return dict(manifest["facts"])

    def close(self) -> None:
        self.lane.close()
        try:
            if self._files is not None and self._unwritten is not None and not self._torn:
                self._commit(*self._unwritten, is_open=False)
            elif self._committed is not None and self._committed["open"] and not self._torn:
                self._write_manifest(self._read_committed(), open=False)
        finally:
            if self._files is not None:
                self._files.close()
            self.journal.forget()
            self.lock.drop()


class DiskLoan:
    """A buffer that is being filled from a file, and written back if it comes home dirty."""

    def __init__(
        self,
        store: DiskStore,
        block: Block,
        kind: str,
        start: int,
        stop: int,
        role: str,
        read: bool,
        priority: int | None,
    ):
        """Without a `priority` whoever asks moves the bytes; else a thread of the store's."""
        self.store, self.block, self.kind, self.start, self.stop = store, block, kind, start, stop
        self.role, self.priority = role, priority
        dtype = block.kinds[kind]
        self.buffer = store.take_buffer((stop - start) * dtype.itemsize, self.role)
        self.result = self.buffer.view(dtype)
        self.ready: Future[Tensor] = store.transfer(self, write=False) if read else done(self.result)

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        if not dirty:
            self._release()
            return None
        written = self.store.transfer(self, write=True)
        written.add_done_callback(lambda _: self._release())
        return written

    def _release(self) -> None:
        self.store.give_buffer(self.buffer, self.role)


def _check_versions(versions: int | None, durability: str) -> None:
    if versions not in (None, 1, 2):
        raise StoreError(f"versions is {versions!r}, expected 1 or 2, or None to let the disk decide")
    if versions == 2 and durability == "none":
        raise StoreError(
            "versions is 2, but with durability='none' blocks are overwritten in place; leave one of them out"
        )

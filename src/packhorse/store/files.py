"""Files of a store: direct I/O, checksums, sealed text, a lock.

In: bytes and where they belong. Out: the same bytes later, or an error that names the file. Everything a store asks of the
operating system goes through `FileSystem`, so that tests can put a faulty one in its place, or take note of what was asked.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from packhorse.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there is no lock there

digest = xxhash.xxh3_64_intdigest


class FileSystem:
    """The operations a store is made of. Those that change something are all here."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:  # what a file system without direct I/O answers
                    raise
        return os.open(path, flags, 0o644)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Makes sure that so many bytes can be written."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        return os.pwritev(descriptor, [view], offset)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_bytes(piece: Tensor) -> memoryview:
    """A tensor's memory as checksums and files take it."""
    return memoryview(piece.numpy())  # type: ignore[arg-type]  # numpy's stubs hide that arrays are buffers


class File:
    """A file of known size, read and written by direct I/O where the file system offers it."""

    def __init__(self, system: FileSystem, path: Path, nbytes: int, *, create: bool, allocate: bool = True):
        """Without `allocate` space that was given back stays so: for looking at a file only."""
        self.system, self.path = system, path
        try:
            self.descriptor = system.open(path, create=create, direct=True)
            size = os.fstat(self.descriptor).st_size
            if not create and size < nbytes:
                system.close(self.descriptor)
                raise StoreError(
                    f"{path} has {size} bytes, expected {nbytes}: it was cut short; bring it back from a copy"
                )
            if nbytes and allocate:
                system.allocate(self.descriptor, nbytes)
        except OSError as error:
            raise StoreError(f"{path} cannot be {'made' if create else 'opened'}: {error.strerror or error}") from error

    def read(self, piece: Tensor, offset: int, what: str) -> None:
        self._all(self.system.read, piece, offset, f"reading {what}")

    def write(self, piece: Tensor, offset: int, what: str) -> None:
        self._all(self.system.write, piece, offset, f"writing {what}")

    def _all(self, move: Any, piece: Tensor, offset: int, what: str) -> None:
        """As many operations as it takes: each may move fewer bytes than it was asked to."""
        view = as_bytes(piece)
        moved = 0
        while moved < len(view):
            try:
                count = move(self.descriptor, view[moved:], offset + moved)
            except OSError as error:
                raise StoreError(
                    f"{what} at byte {offset + moved} of {self.path} failed: {error.strerror or error}"
                ) from error
            if count == 0:
                raise StoreError(f"{what} at byte {offset + moved} of {self.path} failed: the file ends there")
            moved += count

    def sync(self) -> None:
        try:
            self.system.sync(self.descriptor)
        except OSError as error:
            raise StoreError(f"syncing {self.path} failed: {error.strerror or error}") from error

    def close(self) -> None:
        self.system.close(self.descriptor)


# -- small files


def write_small(system: FileSystem, path: Path, content: bytes, *, sync: bool) -> None:
    """A whole small file, in place."""
    try:
        descriptor = system.open(path, create=True)
        try:
            os.ftruncate(descriptor, 0)
            view, moved = memoryview(content), 0
            while moved < len(view):
                moved += system.write(descriptor, view[moved:], moved)
            if sync:
                system.sync(descriptor)
        finally:
            system.close(descriptor)
    except OSError as error:
        raise StoreError(f"writing {path} failed: {error.strerror or error}") from error


def replace_small(system: FileSystem, path: Path, content: bytes, *, sync: bool) -> None:
    """A whole small file, so that it is there as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    write_small(system, temporary, content, sync=sync)
    try:
        system.replace(temporary, path)
        if sync:
            system.sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"replacing {path} failed: {error.strerror or error}") from error


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON below a line with its checksum."""
    text = json.dumps(content).encode()
    return f"packhorse {digest(text):016x}\n".encode() + text


def is_same_json(a: Any, b: Any) -> bool:
    """Whether two values are the same once they are written: tuples become lists then."""
    return json.dumps(a) == json.dumps(b)


def unseal(path: Path) -> dict[str, Any]:
    """What `seal` made, if not a bit of it has changed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    line, _, text = raw.partition(b"\n")
    if line != f"packhorse {digest(text):016x}".encode():
        raise StoreError(
            f"{path} is damaged: it does not have the checksum in its first line; bring it back from a copy"
        )
    return dict(json.loads(text))


# -- the lock


class Lock:
    """One process at a time. The operating system lets go of it when the holder dies, however it dies."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Once it is held, it may be taken again."""
        if self._descriptor is not None:
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise StoreError(f"the lock {self.path} cannot be made: {error.strerror}") from error
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise StoreError(f"{self.path} cannot be locked: {error.strerror}") from error
                raise StoreError(
                    f"the store {self.path.parent} is in use by {holder or 'another process'}; wait until it ends, end it, or "
                    "choose another directory"
                ) from None
        command = " ".join(Path(a).name if i == 0 else a for i, a in enumerate(sys.argv))[:200]
        holder = (
            f"process {os.getpid()} on {socket.gethostname()} ({command}) since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        self._descriptor = descriptor

    def holder(self) -> str | None:
        """Who has it, if anybody."""
        if fcntl is None or not self.path.exists():
            return None
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None  # another user's: nothing is known of it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError:
            return os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
        finally:
            os.close(descriptor)

    def drop(self) -> None:
        """The file stays, empty: removing it would let two processes lock different files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

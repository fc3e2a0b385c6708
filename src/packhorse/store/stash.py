"""The stash: boundary values and gradients between the action that makes them and the ones that use them.

In: tensors by key. Out: the same tensors, bit for bit and stride for stride. They stay in host memory up to a budget; the rest
goes to a file of the store, written behind and read ahead. What outlasts the process (`lasting`) goes there in any case, with a
checksum, and its place is not used again before somebody says that it may be.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import PAGE, Ledger, find_span, map_bytes
from packhorse.store.disk import DiskStore
from packhorse.store.encode import DTYPE_NAMES, DTYPES
from packhorse.store.files import File, as_bytes, digest
from packhorse.store.lane import ORDINARY, URGENT, gather
from packhorse.store.store import Store, done


@dataclass(slots=True)
class _Kept:
    """A tensor in memory (`tensor`), in the file (`offset`), or, while it is written, in both.

    There are as many as segments times microbatches, made among large pieces of memory: each is small, and has no lock.
    """

    tensor: Tensor | None
    nbytes: int
    offset: int = -1
    buffer: Tensor | None = None
    like: tuple[Any, ...] = ()
    dropped: bool = False
    readers: int = 0
    used: int = 0  # bytes of it that have a meaning
    checksum: int | None = None  # of what outlasts the process
    written: "Future[Any] | None" = None  # under way
    held: bool = False  # its place must stay as it is
    arrive: Callable[[], Any] | None = None


class Stash:
    """Without a store on disk everything stays in host memory."""

    def __init__(self, ledger: Ledger, store: Store | None = None, budget: int = 0):
        self.ledger, self.budget = ledger, budget
        self.store = store = store if isinstance(store, DiskStore) else None
        self._kept: dict[Hashable, _Kept] = {}
        self._lock = threading.Lock()
        self._in_memory = 0
        self._file = File(store.system, store.path / "stash.bin", 0, create=True) if store is not None else None
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        self._held: list[_Kept] = []  # dropped, but what a resume would take
        if store is not None and self._file is not None:
            store.step_files.append(self._file)
        self._failure: BaseException | None = None

    def put(
        self, key: Hashable, tensor: Tensor, arrive: Callable[[], Any] | None = None, *, lasting: bool = False
    ) -> None:
        """Keeps a tensor, which may still be on its way from the device: `arrive` waits for it."""
        assert key not in self._kept, f"{key} is stashed twice"
        nbytes = tensor.nbytes
        if self.store is None or (not lasting and (self._in_memory + nbytes <= self.budget or nbytes < PAGE)):
            self._in_memory += nbytes
            self.ledger.add("host", "stash", nbytes)
            self._kept[key] = _Kept(tensor, nbytes, arrive=arrive)
            return
        if arrive is not None:
            arrive()
        self._write(key, tensor, lasting)

    def _write(self, key: Hashable, tensor: Tensor, lasting: bool) -> None:
        assert self.store is not None and self._file is not None
        span = find_span(tensor)
        packed = tensor.as_strided((span,), (1,)) if span else tensor.reshape(-1)
        stride = tensor.stride() if span else torch.empty(tensor.shape, device="meta").stride()
        size = max(-(-packed.nbytes // PAGE), 1) * PAGE
        buffer = self.store.take_buffer(size, "stash")
        buffer[: packed.nbytes].view(tensor.dtype).copy_(packed)
        offset = self._free[size].pop() if self._free[size] else self._grow(size)
        kept = _Kept(tensor, size, offset, buffer, _share(tensor.dtype, tuple(tensor.shape), stride))
        # Until it is written the copy serves, so that the tensor itself need not live.
        kept.tensor = _shape(buffer, kept.like)
        if lasting:
            kept.held, kept.used = True, packed.nbytes
            kept.checksum = digest(as_bytes(buffer[: packed.nbytes]))
        self._kept[key] = kept
        self.ledger.add("disk", "stash", size)

        def written(future: "Future[Any]") -> None:
            with self._lock:
                if not kept.dropped:
                    self._failure = self._failure or future.exception()
                # The future goes too: it remembers its callbacks, and these the buffer.
                kept.tensor = kept.buffer = kept.written = None
                self._free_if_unused(kept)
            self.store.give_buffer(buffer, "stash")  # type: ignore[union-attr]

        write = self.store.move(self._file, buffer, offset, None, f"stashed {key}", True, ORDINARY)
        kept.written = write if lasting else None
        write.add_done_callback(written)

    def _grow(self, size: int) -> int:
        self._end += size
        return self._end - size

    def get(self, key: Hashable) -> "Future[Tensor]":
        """Starts to bring a tensor back; it stays stashed until dropped."""
        if self._failure is not None:
            raise self._failure
        kept = self._kept[key]
        if kept.offset < 0:
            if kept.arrive is not None:
                kept.arrive()
            return done(kept.tensor)
        assert self.store is not None and self._file is not None
        with self._lock:
            if kept.tensor is not None:  # not written yet; a copy, since the buffer is given away when it is
                return done(_shape(kept.buffer.clone(), kept.like))  # type: ignore[union-attr]
            kept.readers += 1
        buffer = map_bytes(kept.nbytes)  # not the pool's: it lives as long as the tensor's users
        tensor = _shape(buffer, kept.like)

        def was_read(_: "Future[Any]") -> None:
            with self._lock:
                kept.readers -= 1
                self._free_if_unused(kept)

        read = self.store.move(self._file, buffer, kept.offset, tensor, f"stashed {key}", False, URGENT)
        read.add_done_callback(was_read)
        return read if kept.checksum is None else gather([read], lambda: self._check(key, kept, buffer, tensor))

    def _check(self, key: Hashable, kept: _Kept, buffer: Tensor, tensor: Tensor) -> Tensor:
        assert self._file is not None
        if digest(as_bytes(buffer[: kept.used])) != kept.checksum:
            raise StoreError(
                f"stashed {key} at byte {kept.offset} of {self._file.path} is damaged: what was read is not what was written"
            )
        return tensor

    def _free_if_unused(self, kept: _Kept) -> None:
        """Its place may be written again when it is dropped, and neither written nor read any more."""
        if kept.dropped and kept.buffer is None and not kept.readers and not kept.held:
            self._free[kept.nbytes].append(kept.offset)

    def drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key)
        if kept.offset < 0:
            self._in_memory -= kept.nbytes
            self.ledger.add("host", "stash", -kept.nbytes)
            return
        with self._lock:
            kept.dropped = True
            self._free_if_unused(kept)
        if kept.held:
            self._held.append(kept)
        self.ledger.add("disk", "stash", -kept.nbytes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forgets everything: the step is over, or has failed."""
        for key in list(self._kept):
            self.drop(key)
        self.release(self.take_held())
        self._failure = None

    # -- what outlasts the process

    def describe_lasting(self) -> list[list[Any]]:
        """All that is kept of it: enough to find it again."""
        return [
            [list(key), kept.offset, kept.nbytes, kept.used, _describe(kept.like), f"{kept.checksum:016x}"]  # type: ignore[call-overload]  # its keys are tuples
            for key, kept in self._kept.items()
            if kept.checksum is not None
        ]

    def lasting_writes(self) -> "list[Future[Any]]":
        """Those that are under way."""
        if self._failure is not None:
            raise self._failure
        return [write for write in (kept.written for kept in self._kept.values()) if write is not None]

    def take_held(self) -> list[_Kept]:
        """What has been dropped since the last time; its places wait for `release`."""
        held, self._held = self._held, []
        return held

    def release(self, held: list[_Kept]) -> None:
        for kept in held:
            with self._lock:
                kept.held = False
                self._free_if_unused(kept)

    def adopt(self, described: list[list[Any]]) -> None:
        """What `describe_lasting` told of, in a process before this one."""
        for key, offset, nbytes, used, (dtype, shape, stride), checksum in described:
            like = _share(DTYPES[dtype], tuple(shape), tuple(stride))
            kept = _Kept(None, nbytes, offset, None, like, used=used, checksum=int(checksum, 16), held=True)
            self._kept[tuple(key)] = kept
            self.ledger.add("disk", "stash", nbytes)
            self._end = max(self._end, offset + nbytes)

    def close(self) -> None:
        if self._file is not None and self.store is not None:
            self.store.step_files.remove(self._file)
            self._file.close()


@cache
def _share(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Any, ...]:
    """One object for all that are alike."""
    return dtype, shape, stride


def _shape(buffer: Tensor, like: tuple[Any, ...]) -> Tensor:
    dtype, shape, stride = like
    flat = buffer.view(dtype)
    return flat.as_strided(shape, stride) if 0 not in shape else flat[:0].view(shape)


def _describe(like: tuple[Any, ...]) -> list[Any]:
    dtype, shape, stride = like
    return [DTYPE_NAMES[dtype], list(shape), list(stride)]

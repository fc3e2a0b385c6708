"""The stash: boundary values and gradients between the action that makes them and the ones that use them.

In: tensors by key. Out: the same tensors, bit for bit and stride for stride. They stay in host memory up to a budget; the rest
goes to a file of the store, written behind and read ahead.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packhorse.memory import PAGE, Ledger, find_span, map_bytes
from packhorse.store.disk import DiskStore
from packhorse.store.files import File
from packhorse.store.store import Store, done


@dataclass
class _Kept:
    """A tensor in memory (`tensor`), in the file (`offset`), or, while it is written, in both."""

    tensor: Tensor | None
    nbytes: int
    offset: int = -1
    buffer: Tensor | None = None
    like: tuple[Any, ...] = ()
    dropped: bool = False
    readers: int = 0
    arrive: Callable[[], Any] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Stash:
    """Without a store on disk everything stays in host memory."""

    def __init__(self, ledger: Ledger, store: Store | None = None, budget: int = 0):
        self.ledger, self.budget = ledger, budget
        self.store = store = store if isinstance(store, DiskStore) else None
        self._kept: dict[Hashable, _Kept] = {}
        self._in_memory = 0
        self._file = File(store.system, store.path / "stash.bin", 0, create=True) if store is not None else None
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        self._failure: BaseException | None = None

    def put(self, key: Hashable, tensor: Tensor, arrive: Callable[[], Any] = lambda: None) -> None:
        """Keeps a tensor, which may still be on its way from the device: `arrive` waits for it."""
        assert key not in self._kept, f"{key} is stashed twice"
        nbytes = tensor.nbytes
        if self.store is None or self._in_memory + nbytes <= self.budget or nbytes < PAGE:
            self._in_memory += nbytes
            self.ledger.add("host", "stash", nbytes)
            self._kept[key] = _Kept(tensor, nbytes, arrive=arrive)
            return
        arrive()
        self._write(key, tensor)

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        assert self.store is not None and self._file is not None
        span = find_span(tensor)
        packed = tensor.as_strided((span,), (1,)) if span else tensor.reshape(-1)
        stride = tensor.stride() if span else torch.empty(tensor.shape, device="meta").stride()
        size = -(-packed.nbytes // PAGE) * PAGE
        buffer = self.store.take_buffer(size, "stash")
        buffer[: packed.nbytes].view(tensor.dtype).copy_(packed)
        offset = self._free[size].pop() if self._free[size] else self._grow(size)
        kept = _Kept(tensor, size, offset, buffer, (tensor.dtype, tuple(tensor.shape), stride))
        # Until it is written the copy serves, so that the tensor itself need not live.
        kept.tensor = _shape(buffer, kept.like)
        self._kept[key] = kept
        self.ledger.add("disk", "stash", size)

        def written(future: "Future[Any]") -> None:
            with kept.lock:
                if not kept.dropped:
                    self._failure = self._failure or future.exception()
                kept.tensor = kept.buffer = None
                self._free_if_unused(kept)
            self.store.give_buffer(buffer, "stash")  # type: ignore[union-attr]

        self.store.move(self._file, buffer, offset, None, f"stashed {key}", True, False).add_done_callback(written)

    def _grow(self, size: int) -> int:
        self._end += size
        return self._end - size

    def get(self, key: Hashable) -> "Future[Tensor]":
        """Starts to bring a tensor back; it stays stashed until dropped."""
        if self._failure is not None:
            raise self._failure
        kept = self._kept[key]
        if kept.offset < 0:
            kept.arrive()
            return done(kept.tensor)
        assert self.store is not None and self._file is not None
        with kept.lock:
            if kept.tensor is not None:  # not written yet; a copy, since the buffer is given away when it is
                return done(_shape(kept.buffer.clone(), kept.like))  # type: ignore[union-attr]
            kept.readers += 1
        buffer = map_bytes(kept.nbytes)  # not the pool's: it lives as long as the tensor's users
        tensor = _shape(buffer, kept.like)

        def was_read(_: "Future[Any]") -> None:
            with kept.lock:
                kept.readers -= 1
                self._free_if_unused(kept)

        read = self.store.move(self._file, buffer, kept.offset, tensor, f"stashed {key}", False, True)
        read.add_done_callback(was_read)
        return read

    def _free_if_unused(self, kept: _Kept) -> None:
        """Its place may be written again when it is dropped, and neither written nor read any more."""
        if kept.dropped and kept.buffer is None and not kept.readers:
            self._free[kept.nbytes].append(kept.offset)

    def drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key)
        if kept.offset < 0:
            self._in_memory -= kept.nbytes
            self.ledger.add("host", "stash", -kept.nbytes)
            return
        with kept.lock:
            kept.dropped = True
            self._free_if_unused(kept)
        self.ledger.add("disk", "stash", -kept.nbytes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forgets everything: the step is over, or has failed."""
        for key in list(self._kept):
            self.drop(key)
        self._failure = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _shape(buffer: Tensor, like: tuple[Any, ...]) -> Tensor:
    dtype, shape, stride = like
    flat = buffer.view(dtype)
    return flat.as_strided(shape, stride) if 0 not in shape else flat[:0].view(shape)

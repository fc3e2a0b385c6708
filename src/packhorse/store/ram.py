"""The store in RAM: blocks are mapped memory, loans are views of them."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import Pool, map_bytes
from packhorse.store.blocks import Block
from packhorse.store.lane import ORDINARY
from packhorse.store.store import Link, Store, done, sleep_until


class RamStore(Store):
    """`bytes_per_second` slows it down, as if it were behind a link of that rate."""

    stays = True

    def __init__(self, *, bytes_per_second: float | None = None):
        self.link = Link(bytes_per_second)
        self._memory: dict[tuple[str, str], Tensor] = {}
        self._touched: set[tuple[str, str]] = set()
        self._pool: Pool | None = None

    def create(self, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]) -> None:
        self._pool = pool
        for block in blocks:
            for kind, dtype in block.kinds.items():
                self._memory[block.name, kind] = map_bytes(block.nbytes(kind)).view(dtype)

    def view(self, block: Block, kind: str) -> Tensor:
        """Untouched pages take no memory, so a kind counts from its first use on: optimizer states from the first update."""
        if not self._memory:
            raise StoreError("the store is closed: its trainer has ended; read what you need before")
        if (block.name, kind) not in self._touched:
            self._touched.add((block.name, kind))
            assert self._pool is not None
            self._pool.ledger.add("host", "store", block.nbytes(kind))
        return self._memory[block.name, kind]

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
    ) -> "RamLoan":
        piece = self.view(block, kind)[start : block.numel if stop is None else stop]
        if dtype is None or dtype == block.kinds[kind]:
            return RamLoan(piece, self.link, read)
        assert self._pool is not None
        return CastLoan(piece, self.link, self._pool, dtype)

    def publish(self, block: Block) -> None:
        """Written in place: reads have seen it already."""

    def close(self) -> None:
        self._memory.clear()


class RamLoan:
    """The piece itself."""

    def __init__(self, piece: Tensor, link: Link, read: bool):
        self._piece, self._link = piece, link
        self.ready: Future[Tensor] = done(piece)
        if link.bytes_per_second is not None and read:
            self.ready = _later(link.reserve(piece.nbytes), piece)

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        if not dirty or self._link.bytes_per_second is None:
            return None
        return _later(self._link.reserve(self._piece.nbytes), None)


class CastLoan(RamLoan):
    """A copy of the piece in another dtype."""

    def __init__(self, piece: Tensor, link: Link, pool: Pool, dtype: torch.dtype):
        self._pool, self._buffer = pool, pool.take(piece.numel() * dtype.itemsize, "weights")
        super().__init__(self._buffer.view(dtype).copy_(piece), link, read=True)

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        assert not dirty, "a cast copy is read only"
        self._pool.give(self._buffer, "weights")
        return None


def _later(moment: float, result: Any) -> "Future[Any]":
    """A future that is done at that time."""
    future: Future[Any] = Future()

    def finish() -> None:
        sleep_until(moment)
        future.set_result(result)

    threading.Thread(target=finish, daemon=True).start()
    return future

"""The store in RAM: blocks are mapped memory, loans are views of them."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from packhorse.memory import Pool, map_bytes
from packhorse.store.blocks import Block
from packhorse.store.store import Link, Store, done, sleep_until


class RamStore(Store):
    """`bytes_per_second` slows it down, as if it were behind a link of that rate."""

    def __init__(self, *, bytes_per_second: float | None = None):
        self.link = Link(bytes_per_second)
        self._memory: dict[tuple[str, str], Tensor] = {}

    def create(self, blocks: Sequence[Block], pool: Pool, identity: Mapping[str, Any]) -> None:
        """Untouched pages take no memory, so the bytes of optimizer states count from their first update on."""
        for block in blocks:
            for kind, dtype in block.kinds.items():
                self._memory[block.name, kind] = map_bytes(block.nbytes(kind)).view(dtype)
            pool.ledger.add("host", "store", block.all_nbytes)

    def view(self, block: Block, kind: str) -> Tensor:
        return self._memory[block.name, kind]

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
    ) -> "RamLoan":
        piece = self._memory[block.name, kind][start : block.numel if stop is None else stop]
        return RamLoan(piece, self.link, read)

    def publish(self, block: Block) -> None:
        """Written in place: reads have seen it already."""

    def close(self) -> None:
        self._memory.clear()


class RamLoan:
    def __init__(self, piece: Tensor, link: Link, read: bool):
        self._piece, self._link = piece, link
        self.ready: Future[Tensor] = done(piece)
        if link.bytes_per_second is not None and read:
            self.ready = _later(link.reserve(piece.nbytes), piece)

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        if not dirty or self._link.bytes_per_second is None:
            return None
        return _later(self._link.reserve(self._piece.nbytes), None)


def _later(moment: float, result: Any) -> "Future[Any]":
    """A future that is done at that time."""
    future: Future[Any] = Future()

    def finish() -> None:
        sleep_until(moment)
        future.set_result(result)

    threading.Thread(target=finish, daemon=True).start()
    return future

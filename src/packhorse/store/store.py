"""What a store is: where the model lives, block by block, and how pieces of it are borrowed.

A store knows bytes, not schedules. Whoever works on a piece borrows it, waits for it, and gives it back, dirty if it changed.
In RAM a loan is a view and costs nothing; on disk it is a buffer that is read ahead and written behind.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.errors import PackhorseError, StoreError
from packhorse.memory import Pool
from packhorse.store.blocks import Block
from packhorse.store.journal import Journal
from packhorse.store.lane import ORDINARY, do_now


class Loan(Protocol):
    """A piece of one kind of a block, on its way or here."""

    ready: "Future[Tensor]"  # its elements, flat, in the kind's dtype

    def give_back(self, dirty: bool = False) -> "Future[Any] | None":
        """Ends the loan; a changed piece is written. What is returned tells when it has been."""
        ...


class Link:
    """A transfer rate, shared by all that moves over it: slows a store down on purpose, to test what hides behind what."""

    def __init__(self, bytes_per_second: float | None):
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise PackhorseError(
                f"bytes_per_second is {bytes_per_second}, expected a rate above 0, or None for full speed"
            )
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """The time at which a transfer that is asked for now would be over."""
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self.bytes_per_second
            return self._free_at

    def pass_through(self, nbytes: int) -> None:
        """Returns when a transfer of so many bytes would be over."""
        sleep_until(self.reserve(nbytes))


class Store(ABC):
    """Blocks by name. A kind may have several versions: then a write never touches the one that reads see."""

    on_disk = False
    stays = False  # loans of the same elements are always the same memory
    versions = 1  # of every block
    rolls = False  # one version and a spare: a step that has updated something can only be finished
    is_laid_out_anew = False  # opened with other blocks than it had
    link = Link(None)  # at full speed

    @property
    def holds_run(self) -> bool:
        return False

    def find_versions(self) -> int | None:
        """Of each block; None: to be decided by the space there is."""
        return self.versions

    def find_unfinished(self) -> Journal | None:
        """The journal of a step that was interrupted after it had updated something: it must be finished before all else."""
        return None

    def claim(self) -> None:  # noqa: B027  # memory is nobody else's anyway
        """From now on no other process may use it."""

    @abstractmethod
    def create(self, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]) -> None:
        """Makes room for all kinds of all blocks. The header tells whose they are."""

    @abstractmethod
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
    ) -> Loan:
        """Starts to bring elements `start` to `stop`; without `read` they need not be what they were.

        Those of lower `priority` go first, on their way back too. `here`: by the calling thread, which then has them at once.
        With a `dtype` other than the kind's, what comes is the cast copy of a master, to be read only.
        """

    def work(self, job: Callable[[], Any], *, priority: int = ORDINARY) -> "Future[Any]":
        """A job that borrows `here`, done by a thread of the store's, if it has any: while it waits, another one works."""
        return do_now(job)

    @abstractmethod
    def publish(self, block: Block) -> None:
        """What has been written to the block since the last time is complete: from now on reads see it."""

    @abstractmethod
    def close(self) -> None: ...

    def publish_together(self, blocks: Sequence[Block], record: Mapping[str, Any]) -> None:
        """The same for several, of which `record` says what else finishing the step would take."""
        for block in blocks:
            self.publish(block)

    def begin_step(self, intent: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: B027  # as above
        """What finishing a step takes, before its first update, where it could not be undone."""

    def publish_gradient(self, block: Block) -> None:  # noqa: B027  # nothing to do where it is written in place
        """Likewise for a gradient that waits."""

    def describe_gradient(self, block: Block) -> dict[str, Any]:
        """What finishing a step takes to know of a gradient that waits."""
        return {}

    def view(self, block: Block, kind: str) -> Tensor | None:
        """The whole piece in place, where that is possible."""
        return None

    def carry_over(self, block: Block, kind: str) -> None:  # noqa: B027  # nothing to do without versions
        """Before a publish that wrote other kinds only: this one stays as it is."""

    def read_manifest(self) -> dict[str, Any] | None:
        """What the last commit left; None if there was none."""
        return None

    def open(self, blocks: Sequence[Block], pool: Pool, header: Mapping[str, Any]) -> None:
        """Continues the run that the manifest tells of."""
        raise StoreError("this store holds no run to continue")

    def commit(self, facts: Mapping[str, Any], small: Mapping[str, Tensor]) -> None:  # noqa: B027  # nor without a disk
        """Makes what was published, and these facts, the store's version; only a store on disk outlives the process."""

    def read_small(self) -> dict[str, Tensor]:
        """The small tensors of the last commit."""
        return {}

    def roll_back(self) -> Mapping[str, Any] | None:
        """After a failure: reads see the last committed version again. Returns its facts; None if there is none."""
        return None


def sleep_until(moment: float) -> None:
    pause = moment - time.perf_counter()
    if pause > 0:
        time.sleep(pause)


def done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future

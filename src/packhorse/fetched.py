"""What a FETCH started: the blocks of a segment, borrowed from the store and brought to the device.

In: blocks, and the updates of them that are still under way. Out: parameters and buffers by name, once they are there.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from packhorse.device import Arrival, Device
from packhorse.partition import Segment
from packhorse.ranks.shards import Gathering, Shard
from packhorse.store import MASTER, Block, Loan, Store
from packhorse.store.lane import pass_on


class Fetched:
    """The parameters and buffers of a segment, on their way to the device or there."""

    def __init__(
        self,
        store: Store,
        device: Device,
        blocks: Sequence[Block],
        segment: Segment,
        trainable: set[str],
        pending: Mapping[str, "Future[Any]"],
        shards: Mapping[str, Shard],
        gathering: Gathering | None,
        order: int,
    ):
        """`order`: what is asked for first is needed first, also if it comes later, since its update is under way."""
        self.order = order
        self.store, self.device, self.blocks = store, device, blocks
        self.shards, self.gathering = shards, gathering
        self.gathered: list[Future[Tensor]] = []
        self.names = {*segment.parameters, *segment.buffers}
        self.trainable = trainable
        self.loans: list[Loan] = []
        self.arrivals = [self._start(block, pending.get(block.name)) for block in blocks]
        self.tensors: dict[str, Tensor] | None = None

    def _start(self, block: Block, update: "Future[Any] | None") -> Arrival:
        """Borrows a block as soon as its update, if one is under way, is done."""
        if self.gathering is not None:
            self.gathered.append(self.gathering.start(self.shards[block.name], update))
            return Arrival(self.device, self.gathered[-1])
        host: Future[Tensor] = Future()
        waiting = [host]  # emptied when it is answered: an update remembers its callbacks, and with them all they know

        def borrow(finished: "Future[Any] | None") -> None:
            answer = waiting.pop()
            failure = finished.exception() if finished is not None else None
            if failure is not None:
                answer.set_exception(failure)
                return
            try:
                loan = self.store.borrow(block, MASTER, priority=self.order, dtype=block.working)
            except BaseException as error:  # called when an update ends, where nobody else would hear of it
                answer.set_exception(error)
                return
            self.loans.append(loan)
            loan.ready.add_done_callback(partial(pass_on, answer))

        borrow(None) if update is None else update.add_done_callback(borrow)
        return Arrival(self.device, host)

    def wait(self) -> dict[str, Tensor]:
        if self.tensors is None:
            self.tensors = {}
            for block, arrival in zip(self.blocks, self.arrivals, strict=True):
                flat = arrival.wait()
                for slot in block.slots:
                    if slot.name in self.names:
                        view = slot.view(flat).detach()
                        self.tensors[slot.name] = view.requires_grad_(slot.name in self.trainable)
        return self.tensors

    def release(self) -> None:
        """What is still under way must end before its buffers serve another."""
        self.tensors = None
        for arrival in self.arrivals:
            flat = arrival.wait_on_host()
            if flat is not None:
                self.device.release(flat)
        for loan in self.loans:
            loan.give_back()
        for gathered in self.gathered:
            if gathered.exception() is None:
                self.gathering.give_back(gathered.result())  # type: ignore[union-attr]  # it gathered them
        self.arrivals, self.loans, self.gathered = [], [], []

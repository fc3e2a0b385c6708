"""The post: values and gradients on their way between the stages of a pipeline.

In: tensors by name. Out: on the other rank the same, to wait for. A message is one run of bytes; what is sent is copied, so
nobody waits for a send. Copies go when what was sent so many microbatches before must have been received: to wait for one that
is read later than what this rank has yet to send would be to wait for ever.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from packhorse.device import Device
from packhorse.ranks.parcel import Parcel
from packhorse.ranks.traffic import Traffic
from packhorse.ranks.world import Work, World

MOST_MICROBATCHES = 1 << 14
BLOCKS = 1 << 30  # tags from here on are those of blocks


class Letter:
    """One tensor of a message that comes."""

    def __init__(self, incoming: "Incoming", name: str):
        self._incoming, self._name = incoming, name

    def wait(self) -> Tensor | None:
        """None: there is no such gradient."""
        return self._incoming.open()[self._name]


class Incoming:
    """A message that comes; `before` is called before it is waited for."""

    def __init__(self, parcel: Parcel, buffer: Tensor, work: Work, before: Callable[[], None]):
        self.parcel, self._buffer, self._work, self._before = parcel, buffer, work, before
        self._opened: dict[str, Tensor | None] | None = None

    def open(self) -> dict[str, Tensor | None]:
        if self._opened is None:
            self._before()
            self._work.wait()
            self._opened = self.parcel.unpack(self._buffer)
        return self._opened

    def letters(self) -> dict[str, Letter]:
        return {name: Letter(self, name) for name in self.parcel.names}


class Post:
    def __init__(self, world: World, device: Device, num_blocks: int):
        """`num_blocks` are sent in a step."""
        self.world, self.device, ranks = world, device, world.ranks
        under_way = (
            ranks.chunks * (ranks.pipeline + (ranks.ahead or 0) + 1) * (ranks.group or 1)
        )  # microbatches, at most
        self._apart = self._most_apart = 2 * under_way
        self._begun = self._number = 0  # microbatches before this task, and in it
        self._sent: dict[bool, deque[tuple[int, Work]]] = {False: deque(), True: deque()}  # by direction
        self._blocks: deque[Work] = deque()
        self._most_blocks = 2 * num_blocks
        self._lock = threading.Lock()  # blocks are sent from a thread of their own

    def begin(self, num_microbatches: int) -> None:
        """A task of so many."""
        self._begun += self._number
        self._number = num_microbatches
        self._apart = min(self._most_apart, 2 * num_microbatches)

    def send(self, traffic: Traffic, number: int, k: int, rows: int, tensors: Mapping[str, Any]) -> None:
        message = traffic.messages[number]
        buffer = self._pack(traffic.parcel(number, rows), tensors)
        place = traffic.owners[message.receiver]
        sent, now = self._sent[message.backward], self._begun + k
        sent.append((now, self.world.send(buffer, place, _tag(number, k), backward=message.backward)))
        while sent[0][0] <= now - self._apart:
            sent.popleft()[1].wait()

    def receive(self, traffic: Traffic, number: int, k: int, rows: int) -> Incoming:
        message = traffic.messages[number]
        parcel = traffic.parcel(number, rows)
        buffer = self._make(parcel)
        place = traffic.owners[message.sender]
        work = self.world.receive(buffer, place, _tag(number, k), backward=message.backward)
        return Incoming(parcel, buffer, work, self.world.settle)

    def send_flat(self, flat: Tensor, place: int, number: int, *, backward: bool) -> None:
        """All of a block, whose size both sides know."""
        work = self.world.send(flat.contiguous(), place, BLOCKS + number, backward=backward)
        with self._lock:
            self._blocks.append(work)
            while len(self._blocks) > self._most_blocks:
                self._blocks.popleft().wait()

    def receive_flat(self, flat: Tensor, place: int, number: int, *, backward: bool) -> Work:
        return self.world.receive(flat, place, BLOCKS + number, backward=backward)

    def finish(self) -> None:
        """Waits until all that was sent has been received."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].wait()
        with self._lock:
            while self._blocks:
                self._blocks.popleft().wait()

    def _pack(self, parcel: Parcel, tensors: Mapping[str, Any]) -> Tensor:
        buffer = self._make(parcel)
        parcel.pack(tensors, buffer)
        return buffer

    def _make(self, parcel: Parcel) -> Tensor:
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device.name)


def _tag(number: int, k: int) -> int:
    return number * MOST_MICROBATCHES + k

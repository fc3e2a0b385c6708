"""The post: values and gradients on their way between the stages of a pipeline.

In: tensors by name. Out: on the other rank the same, to wait for. A message is one run of bytes; what is sent is copied, so
nobody waits for a send but the next that would be one too many.
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

MOST_SENT = 16  # messages under way, of which the first is waited for before another is sent
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
    def __init__(self, world: World, device: Device):
        self.world, self.device = world, device
        self._sent: deque[Work] = deque()
        self._lock = threading.Lock()  # updates are sent from a thread of their own

    def send(self, traffic: Traffic, number: int, k: int, rows: int, tensors: Mapping[str, Any]) -> None:
        message = traffic.messages[number]
        buffer = self._pack(traffic.parcel(number, rows), tensors)
        place = traffic.owners[message.receiver]
        self._keep(self.world.send(buffer, place, _tag(number, k), backward=message.backward))

    def receive(self, traffic: Traffic, number: int, k: int, rows: int) -> Incoming:
        message = traffic.messages[number]
        parcel = traffic.parcel(number, rows)
        buffer = self._make(parcel)
        place = traffic.owners[message.sender]
        work = self.world.receive(buffer, place, _tag(number, k), backward=message.backward)
        return Incoming(parcel, buffer, work, self.world.settle)

    def send_flat(self, flat: Tensor, place: int, number: int, *, backward: bool) -> None:
        """All of a block, whose size both sides know."""
        self._keep(self.world.send(flat.contiguous(), place, BLOCKS + number, backward=backward))

    def receive_flat(self, flat: Tensor, place: int, number: int, *, backward: bool) -> Work:
        return self.world.receive(flat, place, BLOCKS + number, backward=backward)

    def finish(self) -> None:
        """Waits until all that was sent has been received."""
        with self._lock:
            while self._sent:
                self._sent.popleft().wait()

    def _pack(self, parcel: Parcel, tensors: Mapping[str, Any]) -> Tensor:
        buffer = self._make(parcel)
        parcel.pack(tensors, buffer)
        return buffer

    def _make(self, parcel: Parcel) -> Tensor:
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device.name)

    def _keep(self, work: Work) -> None:
        with self._lock:
            self._sent.append(work)
            while len(self._sent) > MOST_SENT:
                self._sent.popleft().wait()


def _tag(number: int, k: int) -> int:
    return number * MOST_MICROBATCHES + k

"""The device: where segments run. All streams, events, pinned memory and generators are behind this one class.

In: tensors in host memory. Out: tensors the device can use, and transfers to wait for. `CpuDevice` is the twin for machines
without an accelerator: there host memory is device memory, so nothing is copied and every wait is over at once.
"""

from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.memory import Pool, make_like, map_bytes


class Transfer(NamedTuple):
    """A tensor on its way. What it comes from, `source`, must live until it has arrived."""

    tensor: Tensor
    event: Any = None
    source: Tensor | None = None


class Device(Protocol):
    """What the executor may ask of a device. Whatever a transfer brings is used only after one of the waits."""

    name: str

    @property
    def generator(self) -> torch.Generator: ...

    def take(self, nbytes: int, kind: str) -> Tensor:
        """Bytes to compute in; given back by `give`, also after a download."""
        ...

    def give(self, tensor: Tensor, kind: str) -> None: ...

    def count(self, nbytes: int, kind: str) -> None:
        """Memory that torch allocated itself has come, or, negative, gone."""
        ...

    def upload(self, tensor: Tensor) -> Transfer:
        """Starts to bring a host tensor to the device. May be called from any thread."""
        ...

    def download(self, tensor: Tensor) -> Transfer:
        """Starts to bring a device tensor to the host, once compute issued so far has made it."""
        ...

    def wait(self, transfer: Transfer) -> Tensor:
        """Compute that follows sees what came."""
        ...

    def wait_on_host(self, transfer: Transfer) -> Tensor:
        """The calling thread sees what came."""
        ...

    def release(self, tensor: Tensor) -> None:
        """The device memory of an uploaded tensor may be used again, once compute issued so far is done with it."""
        ...

    def memory_allocated(self) -> int: ...

    def memory_peak(self) -> int: ...


class Arrival:
    """Something in host memory, or soon there, that is brought to the device as soon as it can be."""

    def __init__(self, device: Device, host: "Future[Tensor]"):
        self._device = device
        self._transfer: Future[Transfer] = Future()
        host.add_done_callback(self._upload)

    def _upload(self, host: "Future[Tensor]") -> None:
        try:
            self._transfer.set_result(self._device.upload(host.result()))
        except BaseException as error:
            self._transfer.set_exception(error)

    def wait(self) -> Tensor:
        return self._device.wait(self._transfer.result())

    def wait_on_host(self) -> Tensor | None:
        """The host side is no longer needed; None if it never came."""
        if self._transfer.exception() is not None:
            return None
        return self._device.wait_on_host(self._transfer.result())


class CpuDevice:
    """No accelerator: the working part of RAM is the device."""

    name = "cpu"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def take(self, nbytes: int, kind: str) -> Tensor:
        return self._pool.take(nbytes, kind)

    def give(self, tensor: Tensor, kind: str) -> None:
        self._pool.give(tensor, kind)

    def count(self, nbytes: int, kind: str) -> None:
        self._pool.ledger.add("host", kind, nbytes)

    def upload(self, tensor: Tensor) -> Transfer:
        return Transfer(tensor)

    def download(self, tensor: Tensor) -> Transfer:
        return Transfer(tensor)

    def wait(self, transfer: Transfer) -> Tensor:
        return transfer.tensor

    def wait_on_host(self, transfer: Transfer) -> Tensor:
        return transfer.tensor

    def release(self, tensor: Tensor) -> None:
        pass

    def memory_allocated(self) -> int:
        return 0

    def memory_peak(self) -> int:
        return 0


class Accelerator:
    """CUDA, XPU or MPS through `torch.accelerator`: one stream for each direction beside the one that computes.

    Events order the streams: an upload is waited for by compute, a download waits for compute, and memory that was uploaded
    to is used again only after the compute that read it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._compute = torch.accelerator.current_stream()
        self._up = torch.Stream(device=name)
        self._down = torch.Stream(device=name)
        self._resting: list[tuple[Tensor, Any]] = []  # device buffers, and the event after their last use

    @property
    def generator(self) -> torch.Generator:
        module = getattr(torch, torch.device(self.name).type)
        return module.default_generators[torch.device(self.name).index or 0]

    def take(self, nbytes: int, kind: str) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.name)

    def give(self, tensor: Tensor, kind: str) -> None:
        """torch's own allocator keeps it."""

    def count(self, nbytes: int, kind: str) -> None:
        """torch counts it too."""

    def upload(self, tensor: Tensor) -> Transfer:
        target = self._find_buffer(tensor)
        with self._up:
            target.copy_(tensor, non_blocking=True)
            event = self._up.record_event()
        return Transfer(target, event, tensor)

    def _find_buffer(self, like: Tensor) -> Tensor:
        for i, (buffer, event) in enumerate(self._resting):
            if buffer.dtype == like.dtype and buffer.shape == like.shape and buffer.stride() == like.stride():
                del self._resting[i]
                self._up.wait_event(event)
                return buffer
        fresh = make_like(like, partial(self.take, kind="uploads"))
        self._up.wait_event(self._compute.record_event())  # the allocator may give what running compute still reads
        return fresh

    def download(self, tensor: Tensor) -> Transfer:
        target = make_like(tensor, self._host_memory)
        self._down.wait_event(self._compute.record_event())
        with self._down:
            target.copy_(tensor, non_blocking=True)
            event = self._down.record_event()
        return Transfer(target, event, tensor)

    def _host_memory(self, nbytes: int) -> Tensor:
        """Page-aligned in any case, for direct I/O; pinned where that makes transfers faster."""
        if torch.device(self.name).type in ("cuda", "xpu"):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return map_bytes(nbytes)

    def wait(self, transfer: Transfer) -> Tensor:
        self._compute.wait_event(transfer.event)
        return transfer.tensor

    def wait_on_host(self, transfer: Transfer) -> Tensor:
        transfer.event.synchronize()
        return transfer.tensor

    def release(self, tensor: Tensor) -> None:
        self._resting.append((tensor, self._compute.record_event()))

    def memory_allocated(self) -> int:
        return int(torch.accelerator.memory_allocated())

    def memory_peak(self) -> int:
        return int(torch.accelerator.max_memory_allocated())


def find_device(device: str | torch.device | None, pool: Pool) -> Device:
    """The accelerator if there is one, else the CPU, whose memory is the pool; or the one that is asked for."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    wanted = torch.device(device) if device is not None else found or torch.device("cpu")
    if wanted.type == "cpu":
        return CpuDevice(pool)
    if found is None or found.type != wanted.type:
        here = f"the accelerator here is {found.type}" if found else "there is no accelerator here"
        raise PackhorseError(f"device is {str(wanted)!r}, but {here}; leave device out to use what there is")
    return Accelerator(str(wanted))

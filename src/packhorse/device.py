"""The device: where segments run. All streams, events, pinned memory and generators are behind this one class.

In: tensors in host memory. Out: tensors the device can use, and handles to wait for. `CpuDevice` is the twin for machines
without an accelerator: there host memory is device memory, so nothing is copied and every wait is over at once.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.memory import map_bytes


class Device(Protocol):
    """What the executor may ask of a device. A transfer returns an event; use of what it moved goes through `wait`."""

    name: str
    shares_host_memory: bool

    @property
    def generator(self) -> torch.Generator: ...

    def host_bytes(self, nbytes: int) -> Tensor:
        """Host memory that transfers are fast from."""
        ...

    def upload(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts to bring a host tensor to the device."""
        ...

    def download(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts to bring a device tensor to the host."""
        ...

    def wait(self, event: Any) -> None:
        """Compute that follows sees what the transfer brought."""
        ...

    def wait_on_host(self, event: Any) -> None:
        """The calling thread sees what the transfer brought."""
        ...

    def release(self, tensor: Tensor) -> None:
        """The device memory of an uploaded tensor may be used again, once compute issued so far is done with it."""
        ...

    def memory_allocated(self) -> int: ...


class CpuDevice:
    """No accelerator: the working part of RAM is the device."""

    name = "cpu"
    shares_host_memory = True

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def host_bytes(self, nbytes: int) -> Tensor:
        return map_bytes(nbytes)

    def upload(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def download(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def wait(self, event: Any) -> None:
        pass

    def wait_on_host(self, event: Any) -> None:
        pass

    def release(self, tensor: Tensor) -> None:
        pass

    def memory_allocated(self) -> int:
        return 0


class Accelerator:
    """CUDA, XPU or MPS through `torch.accelerator`: one stream for each direction beside the one that computes.

    Events order the streams: an upload is waited for by compute, a download waits for compute, and memory that was uploaded
    to is used again only after the compute that read it.
    """

    shares_host_memory = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._up = torch.Stream(device=name)
        self._down = torch.Stream(device=name)
        self._resting: list[tuple[Tensor, Any]] = []  # device buffers, and the event after their last use

    @property
    def generator(self) -> torch.Generator:
        module = getattr(torch, torch.device(self.name).type)
        return module.default_generators[torch.device(self.name).index or 0]

    def host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.device(self.name).type != "mps")

    def upload(self, tensor: Tensor) -> tuple[Tensor, Any]:
        target = self._take(tensor)
        with self._up:
            target.copy_(tensor, non_blocking=True)
            event = self._up.record_event()
        return target, event

    def _take(self, like: Tensor) -> Tensor:
        for i, (buffer, event) in enumerate(self._resting):
            if buffer.shape == like.shape and buffer.dtype == like.dtype:
                del self._resting[i]
                self._up.wait_event(event)
                return buffer
        return torch.empty_like(like, device=self.name)

    def download(self, tensor: Tensor) -> tuple[Tensor, Any]:
        target = self.host_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._down.wait_event(torch.accelerator.current_stream().record_event())
        with self._down:
            target.copy_(tensor, non_blocking=True)
            event = self._down.record_event()
        self._resting.append((tensor, event))  # kept alive until the copy has read it
        return target, event

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream().wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        event.synchronize()

    def release(self, tensor: Tensor) -> None:
        self._resting.append((tensor, torch.accelerator.current_stream().record_event()))

    def memory_allocated(self) -> int:
        return int(torch.accelerator.memory_allocated())


def find_device(device: str | torch.device | None) -> Device:
    """The accelerator if there is one, else the CPU; or the one that is asked for."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    wanted = torch.device(device) if device is not None else found or torch.device("cpu")
    if wanted.type == "cpu":
        return CpuDevice()
    if found is None or found.type != wanted.type:
        here = f"the accelerator here is {found.type}" if found else "there is no accelerator here"
        raise PackhorseError(f"device is {str(wanted)!r}, but {here}; leave device out to use what there is")
    return Accelerator(str(wanted))

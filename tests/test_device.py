"""The device class: what is used was waited for, and what is used again was let go, on any device.

No accelerator is needed. `LateDevice` moves nothing before somebody waits, and spoils what is let go, so that a wait that is
missing, or memory let go too early, changes the numbers. The streams of `Accelerator` are replaced by ones that take notes.
"""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
import packhorse.trainer
from packhorse.device import Accelerator, CpuDevice, Transfer, find_device
from packhorse.memory import Ledger, Pool, make_like, map_bytes
from toys import zoo

pytestmark = pytest.mark.usefixtures("graphs_are_shared")


def spoil(tensor: Tensor) -> None:
    tensor.detach().view(torch.uint8).fill_(0xFF)  # NaN in every floating-point type


def map_spoiled(nbytes: int) -> Tensor:
    memory = map_bytes(nbytes)
    spoil(memory)
    return memory


class LateDevice(CpuDevice):
    """A device as late as it may be."""

    def __init__(self) -> None:
        self.pending: dict[int, Transfer] = {}
        self.lock = threading.Lock()

    def take(self, nbytes: int, kind: str) -> Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def give(self, tensor: Tensor, kind: str) -> None:
        spoil(tensor)

    def count(self, nbytes: int, kind: str) -> None:
        pass

    def upload(self, tensor: Tensor) -> Transfer:
        transfer = Transfer(make_like(tensor, map_spoiled), object(), tensor)
        with self.lock:
            self.pending[id(transfer.event)] = transfer
        return transfer

    download = upload

    def wait(self, transfer: Transfer) -> Tensor:
        with self.lock:
            if self.pending.pop(id(transfer.event), None):
                assert transfer.source is not None
                transfer.tensor.copy_(transfer.source)
        return transfer.tensor

    wait_on_host = wait

    def release(self, tensor: Tensor) -> None:
        spoil(tensor)


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"strategy": "resident"}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_nothing_is_used_before_it_is_waited_for(
    name: str, options: dict[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as on the CPU, which are those of the plain loop."""
    model, make, loss = zoo(name)
    batches = [make(4) for _ in range(3)]

    def train(store: Path) -> tuple[list[float], dict[str, Tensor]]:
        streamed = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(streamed.parameters(), lr=1e-3)
        choices = {"strategy": "relay", "microbatches": 2, "store": store if where == "disk" else None, **options}
        with ph.Trainer(streamed, optimizer, batches[0], loss=loss, **choices) as trainer:
            return [trainer.step(batch) for batch in batches], dict(trainer.state_dict())

    expected_losses, expected = train(tmp_path / "cpu")
    device = LateDevice()
    monkeypatch.setattr(packhorse.trainer, "find_device", lambda *_: device)
    losses, state = train(tmp_path / "late")
    assert losses == expected_losses
    for tensor_name, tensor in expected.items():
        assert torch.equal(state[tensor_name], tensor), tensor_name
    assert not device.pending, "every transfer was waited for"


class Stream:
    """Notes what is asked of it."""

    def __init__(self, name: str, notes: list[str]):
        self.name, self.notes, self.count = name, notes, 0

    def record_event(self) -> "Event":
        self.count += 1
        self.notes.append(f"{self.name} records {self.count}")
        return Event(self.name, self.count, self.notes)

    def wait_event(self, event: "Event") -> None:
        self.notes.append(f"{self.name} waits for {event.stream} {event.number}")

    def __enter__(self) -> None:
        self.notes.append(f"in {self.name}:")

    def __exit__(self, *_: object) -> None:
        self.notes.append("end")


class Event:
    def __init__(self, stream: str, number: int, notes: list[str]):
        self.stream, self.number, self.notes = stream, number, notes

    def synchronize(self) -> None:
        self.notes.append(f"host waits for {self.stream} {self.number}")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, list[str]]:
    notes: list[str] = []
    names = iter(["up", "down"])
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(next(names), notes))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream("compute", notes))
    return Accelerator("cpu"), notes


def test_an_upload_waits_for_the_compute_that_used_its_memory(accelerator: tuple[Accelerator, list[str]]) -> None:
    device, notes = accelerator
    first = device.upload(torch.arange(4.0))
    assert notes == ["compute records 1", "up waits for compute 1", "in up:", "up records 1", "end"]
    notes.clear()
    assert torch.equal(device.wait(first), torch.arange(4.0))
    assert notes == ["compute waits for up 1"]
    notes.clear()
    device.release(first.tensor)
    again = device.upload(torch.ones(4))
    assert again.tensor is first.tensor, "the same memory"
    assert notes == ["compute records 2", "up waits for compute 2", "in up:", "up records 2", "end"]


def test_a_download_waits_for_the_compute_that_made_it(accelerator: tuple[Accelerator, list[str]]) -> None:
    device, notes = accelerator
    source = torch.arange(4.0)
    transfer = device.download(source)
    assert notes == ["compute records 1", "down waits for compute 1", "in down:", "down records 1", "end"]
    assert transfer.source is source, "kept alive until it has been read"
    notes.clear()
    device.wait_on_host(transfer)
    assert notes == ["host waits for down 1"]


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ph.PackhorseError, match="there is no accelerator here; leave device out"):
        find_device("cuda", Pool(Ledger()))


def test_fetches_run_ahead_of_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of a segment starts before the segment in front of it runs."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    batch = (torch.randn(4, 64), torch.randn(4, 64))
    trainer = ph.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        loss=lambda y, b: nn.functional.mse_loss(y, b[1]),
        strategy="relay",
        microbatches=2,
        store=tmp_path,
    )
    trainer.step(batch)
    order = [str(record.action) for record in trainer.records]
    segments = max(record.action.segment or 0 for record in trainer.records)
    assert segments > 2
    for s in range(1, segments):
        assert order.index(f"{s}FETCH") < order.index(f"{s - 1}F0")
    trainer.close()

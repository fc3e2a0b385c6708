"""Stores without their model, and checkpoints for others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import packhorse as ph
import packhorse.checkpoint
import packhorse.tasks
from crash import STEPS, assert_equal, make_trainer, read_state, train
from packhorse.archive import check_store, describe_store, export_store, reclaim
from packhorse.errors import StoreError
from packhorse.weights import SafetensorsFiles

pytestmark = pytest.mark.usefixtures("captured_once")


# -- tools


def test_ls_check_export_gc(trained: Path, tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    copy = tmp_path / "s"
    shutil.copytree(trained, copy)
    described = describe_store(copy)
    assert described["step"] == 3 and described["model"] == "Sequential" and described["closed"]
    count, problems, compared = check_store(copy)
    assert count > described["bytes"]["master"] and not problems and compared
    (copy / "blocks-7").mkdir()
    (copy / "manifest.json.new").write_text("half")
    assert reclaim(copy) > described["bytes_on_disk"] // 4
    assert not (copy / "blocks-7").exists() and check_store(copy)[1] == []
    export_store(copy, tmp_path / "out")
    with make_trainer(copy) as trainer:
        saved = trainer.save(tmp_path / "saved")
        assert [p.name for p in saved] == ["model.safetensors"]
        assert saved[0].read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
        train(trainer)
    assert_equal(read_state(copy)[1], expected[STEPS], "after gc")


def test_a_directory_that_is_no_store(tmp_path: Path) -> None:
    for tool in (describe_store, check_store, reclaim):
        with pytest.raises(StoreError, match=r"is no store: there is no manifest\.json"):
            tool(tmp_path)


class Tied(nn.Module):
    """A tied weight, a buffer that is not saved, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.odd = nn.Parameter(torch.randn(6, 8).t())
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.outer(torch.relu(self.inner(x))) * self.scale @ self.odd)


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("shard", [100, 1 << 30])
def test_save_and_load(tmp_path: Path, where: str, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor once, under its first name, in order of its dimensions; read again, all values are the same."""
    monkeypatch.setattr(packhorse.tasks, "capture", ph.capture)
    monkeypatch.setattr("packhorse.checkpoint.SHARD", shard)
    batch = (torch.randn(4, 8), torch.randn(4, 6))
    loss = lambda y, b: nn.functional.mse_loss(y, b[1])  # noqa: E731

    def make(store: Path | None, **options: Any) -> ph.Trainer:
        model = Tied()
        return ph.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss, store=store, microbatches=2, **options
        )

    with make(tmp_path / "a" if where == "disk" else None) as trainer:
        trainer.step(batch)
        files = trainer.save(tmp_path / "saved")
        state = dict(trainer.state_dict())
        if where == "disk":
            trainer.close()
            export_store(tmp_path / "a", tmp_path / "exported")
            for file in files:
                assert file.read_bytes() == (tmp_path / "exported" / file.name).read_bytes()
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (shard == 100)
    found = {name: tensor.load() for name, tensor in SafetensorsFiles(tmp_path / "saved").items()}
    assert found.keys() == state.keys() - {"outer.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    with make(tmp_path / "b" if where == "disk" else None, weights=tmp_path / "saved") as again:
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_saving_beside_other_weights_is_refused(tmp_path: Path) -> None:
    with make_trainer(tmp_path / "s") as trainer:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other.safetensors").write_bytes(b"")
        with pytest.raises(StoreError, match=r"already holds other\.safetensors"):
            trainer.save(tmp_path / "out")


def test_a_save_that_fails_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.checkpoint.SHARD", 100)
    write_shard, written = packhorse.checkpoint._write_shard, []
    with make_trainer(tmp_path / "s") as trainer:
        files = trainer.save(tmp_path / "out")
        before = {file: file.read_bytes() for file in files}
        assert len(files) > 2
        train(trainer, 2)

        def fail(path: Path, *arguments: Any) -> None:
            written.append(path)
            if len(written) == 2:
                raise OSError(28, "No space left on device")
            write_shard(path, *arguments)

        monkeypatch.setattr("packhorse.checkpoint._write_shard", fail)
        with pytest.raises(StoreError, match="No space left"):
            trainer.save(tmp_path / "out")
        assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_buffers_read_from_files_have_the_models_own_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in half precision are common; a batch norm's statistics stay what the model has."""
    monkeypatch.setattr(packhorse.tasks, "capture", ph.capture)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    halves = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_file(halves, tmp_path / "model.safetensors")
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    with ph.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        loss=lambda y, b: nn.functional.mse_loss(y, b[1]),
        weights=tmp_path / "model.safetensors",
    ) as trainer:
        trainer.step(batch)
        assert {name: t.dtype for name, t in trainer.state_dict().items()} == {
            name: t.dtype for name, t in nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict().items()
        }

"""Parts that train apart, at the edges: single rows, hand-overs that died, labels and choices that cannot work."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import packhorse as ph
from launch import run_ranks
from packhorse.sil.rows import RowsWriter
from packhorse.weights import SafetensorsFiles
from test_sil import assert_equal, make_data, make_model, make_trainer, values

pytestmark = pytest.mark.usefixtures("divided_graphs_are_shared")


def make_normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )


# -- memory


@pytest.mark.parametrize("options", [{}, {"strategy": "relay"}, {"strategy": "relay", "on_disk": True}], ids=str)
def test_a_closed_trainer_leaves_no_cycles(options: dict[str, Any], tmp_path: Path) -> None:
    """Else what a part took would stay beside the next one until Python happens to look for cycles."""

    def train() -> list[Any]:
        model = make_model()
        x, y = next(iter(make_data()))
        optimizer = torch.optim.Adam(model.parameters())
        store = {"store": tmp_path / str(len(list(tmp_path.iterdir())))} if "on_disk" in options else {}
        chosen: Any = {key: value for key, value in options.items() if key != "on_disk"} | store

        def loss(output: Tensor, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(output, batch[1])

        with ph.Trainer(model, optimizer, (x, y), loss=loss, **chosen) as trainer:
            trainer.step((x, y))
            held = [trainer, optimizer, trainer._case, trainer._executor, trainer._store]
        return [weakref.ref(one) for one in held]

    train()  # what torch does once may leave something
    gc.collect()
    gc.disable()
    try:
        assert [type(ref()) for ref in train() if ref() is not None] == []
    finally:
        gc.enable()


# -- single rows


def test_a_single_row_is_evaluated() -> None:
    model, data = make_normed(), make_data(rows=33)
    with make_trainer(model, cuts=["1"], labels="readout") as trainer:
        trainer.fit(make_data())
        x, y = data.x, data.y
        model.eval()
        assert trainer.evaluate(data) == pytest.approx(float((model(x).argmax(1) == y).float().mean()))


def test_a_single_row_goes_through_a_part_without_a_norm() -> None:
    """The norm is behind the cut, and rows that were handed on come in batches of at least two."""
    data = make_data(rows=33)
    with make_trainer(make_normed(), cuts=["1"], labels="readout") as trainer:
        trainer.fit(data)
        assert trainer.standings[1].rows == 33
    with (
        make_trainer(make_normed(), cuts=["4"], labels="readout") as trainer,
        pytest.raises(ph.BatchError, match="one row"),
    ):
        trainer.fit(data)
    with make_trainer(make_normed(), cuts=["4"], labels="readout", batch_sizes=[16, None]) as trainer:
        trainer.fit(data)
        assert trainer.standings[0].rows == 33


# -- what died


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_hand_over_of_a_second_fit_that_died(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(store: Path, resume: bool = False) -> dict[str, Tensor]:
        model, data = make_model(), make_data()
        with make_trainer(model, parts=3, mode=mode, store=store, resume=resume) as trainer:
            trainer.fit(data, 1)
            trainer.fit(data, 2)
        return values(model)

    expected, appended, append = train(tmp_path / "whole"), 0, RowsWriter.append

    def die(self: RowsWriter, columns: Any) -> None:
        nonlocal appended
        appended += 1
        if appended == 2 * 6 + 3:  # two hand-overs of six batches, and half of the next
            raise KeyboardInterrupt
        append(self, columns)

    monkeypatch.setattr(RowsWriter, "append", die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "store")
    monkeypatch.undo()
    assert_equal(train(tmp_path / "store", resume=True), expected)


def test_what_an_evaluation_left_that_died_goes(tmp_path: Path) -> None:
    with make_trainer(store=tmp_path / "store") as trainer:
        left = tmp_path / "store" / "scratch-left"
        left.mkdir()
        trainer.fit(make_data())
    with make_trainer(store=tmp_path / "store", resume=True):
        assert not left.exists()


def test_two_processes_do_not_train_in_one_store(tmp_path: Path) -> None:
    with make_trainer(store=tmp_path / "store"), pytest.raises(ph.StoreError, match="in use by process"):
        make_trainer(store=tmp_path / "store", resume=True)
    make_trainer(store=tmp_path / "store", resume=True).close()


def test_orders_of_a_loader_with_a_generator_of_its_own_are_the_same_after_a_crash(tmp_path: Path) -> None:
    data = make_data()

    def train(store: Path, *, dies_at: int | None = None, resume: bool = False) -> dict[str, Tensor]:
        model = make_model()
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(TensorDataset(data.x, data.y), 16, shuffle=True, generator=generator)

        def tell(progress: Any) -> None:
            if (progress.phase, progress.step) == ("recover", dies_at):
                raise KeyboardInterrupt

        options: Any = {"strategy": "relay", "store": store, "resume": resume, "progress": tell}
        with make_trainer(model, **options) as trainer:
            trainer.fit(loader, 1)
            trainer.recover(loader, 2)
        return values(model)

    expected = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "store", dies_at=8)
    assert_equal(train(tmp_path / "store", resume=True), expected)


def test_ranks_save_once(tmp_path: Path) -> None:
    """All call it; were all to write, one would find its files gone."""

    def work(rank: int) -> dict[str, Tensor]:
        os.environ["OMP_NUM_THREADS"] = "1"
        model = make_model()
        with make_trainer(model, store=tmp_path / "store") as trainer:
            trainer.fit(make_data())
            for _ in range(5):
                files = trainer.save(tmp_path / "joined")
            assert all(file.exists() for file in files)
        return values(model)

    found = run_ranks(2, work)
    assert_equal(found[1], found[0])
    saved = SafetensorsFiles(tmp_path / "joined")
    assert_equal({name: saved[name].load() for name in found[0]}, found[0])


# -- what cannot work


class Broken:
    """Labels that fail in one way each."""

    def __init__(self, width: int, **methods: Any):
        self.width = width
        self.__dict__.update(methods)

    def loss(self, output: Tensor, classes: Tensor) -> Tensor:
        return output.square().mean()

    def scores(self, output: Tensor) -> Tensor:
        return output[:, :4]

    def imitate(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        return torch.zeros(len(classes), self.width)


def fail(*_: Any) -> Tensor:
    raise ValueError("my labels are broken")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"loss": fail}, r"loss\(\) of the labels at cut 0 failed .*ValueError: my labels are broken"),
        (
            {"loss": lambda o, c: o.square().mean(1)},
            r"loss\(\) .* gives float32\[2\] .* expected a floating-point tensor \[\]",
        ),
        ({"loss": lambda o, c: torch.zeros(())}, "does not depend on the output"),
        ({"scores": lambda o: o.sum()}, r"scores\(\) .* gives float32\[\] .* \[2, 4\]"),
        ({"scores": 3}, r"without scores\(\)"),
        ({"imitate": lambda c, g: torch.zeros(len(c), 3)}, r"imitate\(\) .* gives float32\[2, 3\] .* \[2, 16\]"),
    ],
)
def test_labels_are_tried_before_anything_is_trained(methods: Any, message: str) -> None:
    with pytest.raises(ph.PackhorseError, match=message):
        make_trainer(labels=lambda site: Broken(site.shape[0], **methods), mode="parallel")


def test_a_scheme_that_makes_nothing_and_one_with_slots() -> None:
    with pytest.raises(ph.PackhorseError, match=r"NoneType without loss\(\)"):
        make_trainer(labels=lambda site: None)

    class Slotted:
        __slots__ = ()

        def __call__(self, site: ph.sil.Site) -> Any:
            return Broken(site.shape[0])

    with make_trainer(labels=Slotted()) as trainer:
        assert "Slotted" in trainer.report()


def test_inputs_without_rows_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 30), nn.Linear(30, 4)

        def forward(self, u: Tensor, w: Tensor) -> Tensor:
            return self.b(self.a(u).relu() * w)

    model, (x, y) = Scaled(), next(iter(make_data()))
    with pytest.raises(ph.BatchError, match=r"is float32\[30\] beside 16 rows; .* make it a buffer of the model"):
        ph.SegmentedTrainer(
            model, torch.optim.Adam(model.parameters()), ((x, torch.ones(30)), y), num_classes=4, parts=2
        )


@pytest.mark.parametrize("seed", [20_000_000_000, (1 << 64) - 1, -3])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    with make_trainer(seed=seed, mode="parallel") as trainer:
        trainer.fit(make_data())
        assert trainer.evaluate(make_data()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"progress": 3}, "progress is 3, expected a function"),
        ({"scheduler": 3}, "scheduler is 3, expected a function"),
        ({"loss": 3}, "loss is 3, expected a function"),
    ],
)
def test_choices_of_another_kind(options: Any, message: str) -> None:
    with pytest.raises(ph.PackhorseError, match=message):
        make_trainer(**options)


def test_numbers_of_other_libraries() -> None:
    with make_trainer(num_classes=np.int64(4), batch_sizes=[None, np.int32(8)]) as trainer:
        assert trainer.batch_sizes == [None, 8]
        trainer.fit(make_data(), np.int64(1))


def test_a_schedule_that_asks_for_more_than_the_trainer_has() -> None:
    def plateau(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    with (
        make_trainer(scheduler=plateau) as trainer,
        pytest.raises(ph.PackhorseError, match=r"ReduceLROnPlateau.step\(\) wants metrics"),
    ):
        trainer.fit(make_data())


def test_a_cut_behind_what_is_frozen() -> None:
    model = make_model()
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    with pytest.raises(ph.PackhorseError, match=r"nothing before it is trained|no parameter has a part"):
        make_trainer(model)


def test_a_closed_trainer_says_so() -> None:
    trainer = make_trainer(mode="parallel")
    trainer.close()
    with pytest.raises(ph.PackhorseError, match="this trainer is closed"):
        trainer.evaluate(make_data())

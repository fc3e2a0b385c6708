"""Parts that train apart, at the edges: single rows, hand-overs that died, labels and choices that cannot work."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from typer.testing import CliRunner

import packhorse as ph
from launch import run_ranks
from packhorse.cli import app
from packhorse.ranks.world import World
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


def test_ranks_recover_in_the_arrangement_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, the network that was just measured decides."""
    asked, arranged, arrange = ph.Ranks(pipeline=2, order="1f1b"), [], World.arrange

    def take_note(world: World, ranks: ph.Ranks) -> None:
        arranged.append((ranks.data, ranks.pipeline, ranks.order))
        arrange(world, ranks)

    def work(rank: int) -> Any:
        with make_trainer(store=tmp_path / "store", ranks=asked) as trainer:
            trainer.fit(make_data())
            trainer.recover(make_data())
        return arranged

    monkeypatch.setattr(World, "arrange", take_note)
    assert run_ranks(2, work) == [[(1, 2, "1f1b")]] * 2
    with pytest.raises(ph.RanksError, match="1 x 2 = 2, but 1 processes were started"):
        make_trainer(ranks=asked)
    with pytest.raises(ph.RanksError, match=r"ranks is 2, expected ph.Ranks"):
        make_trainer(ranks=2)


# -- again


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_dropout_is_another_each_time(mode: Any, tmp_path: Path) -> None:
    """The rate is 0 and rows come in order: were the masks the same, so would be the losses."""
    data = make_data(seed=None)

    def train(store: str, times: int, resume: bool = False) -> dict[tuple[int, str], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        losses: dict[tuple[int, str], list[float]] = {}
        with ph.SegmentedTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            next(iter(data)),
            num_classes=4,
            cuts=["3"],
            mode=mode,
            store=tmp_path / store,
            resume=resume,
            progress=lambda p: losses.setdefault((p.part, p.phase), []).append(p.loss),
        ) as trainer:
            for _ in range(times):
                trainer.fit(data)
                trainer.recover(data)
        return losses

    whole = train("whole", 2)
    for key in ((0, "fit"), (2, "recover")):
        assert len(set(whole[key])) == len(whole[key]) == 12
    train("store", 1)
    assert train("store", 2, resume=True) == {key: losses[6:] for key, losses in whole.items()}


def test_parts_and_phases_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def make(*arguments: Any, seed: int, **options: Any) -> ph.Trainer:
        seeds.append(seed)
        return ph.Trainer(*arguments, seed=seed, **options)

    monkeypatch.setattr("packhorse.sil.trainer.Trainer", make)
    for _ in range(2):
        with make_trainer(seed=5) as trainer:
            for _ in range(2):
                trainer.fit(make_data())
                trainer.recover(make_data())
    assert len(set(seeds)) == 6 and seeds[6:] == seeds[:6]


class Told(list[Any]):
    """A loader that remembers which epochs it was gone through in."""

    def __init__(self) -> None:
        super().__init__(make_data())
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_epochs_of_recoveries_count_on(tmp_path: Path) -> None:
    loader = Told()
    with make_trainer() as trainer:
        trainer.recover(loader, 2)
        trainer.recover(loader, 1)
    assert loader.epochs == [0, 1, 2]
    with make_trainer(store=tmp_path / "store") as trainer:
        trainer.recover(make_data(), 2)
    loader = Told()
    with make_trainer(store=tmp_path / "store", resume=True) as trainer:
        trainer.recover(loader, 2)
        trainer.recover(loader, 1)
    assert loader.epochs == [2]


def test_a_rate_that_is_a_tensor_outlives_a_schedule() -> None:
    model, rate = make_model(), torch.tensor(1e-2)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with ph.SegmentedTrainer(
        model,
        optimizer,
        next(iter(make_data())),
        num_classes=4,
        parts=2,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
    ) as trainer:
        trainer.recover(make_data())
        assert torch.equal(rate, torch.tensor(1e-2)) and optimizer.param_groups[0]["lr"] is rate
        recovered = values(model)
        trainer.fit(make_data())
    assert not any(torch.equal(recovered[name], value) for name, value in values(model).items())


# -- loaders whose rows can be counted


class Stream(IterableDataset[Any]):
    """Rows one after another, and how many."""

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Any:
        data = make_data()
        return zip(data.x, data.y, strict=True)


def make_dataset() -> TensorDataset:
    return TensorDataset(make_data().x, make_data().y)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: DataLoader(Stream(), 16), 3),
        (lambda: DataLoader(Stream(), 20, drop_last=True), 3),
        (lambda: DataLoader(make_dataset(), batch_sampler=BatchSampler(RandomSampler(range(96)), 16, False)), 3),
        (lambda: DataLoader(make_dataset(), batch_sampler=BatchSampler(RandomSampler(range(96)), 40, True)), 3),
        (lambda: DataLoader(make_dataset(), batch_sampler=BatchSampler(SubsetRandomSampler(range(40)), 16, False)), 2),
    ],
    ids=["stream", "whole batches of a stream", "sampler", "whole batches of a sampler", "some rows"],
)
def test_rows_are_counted_by_what_batches_them(make: Any, steps: int) -> None:
    counted: list[int] = []

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        counted.append(steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    with make_trainer(batch_sizes=32, scheduler=schedule) as trainer:
        trainer.fit(make())
        assert counted == [s.steps for s in trainer.standings] == [steps, steps]


def test_rows_that_do_not_make_up_the_batches_are_not_counted() -> None:
    class Some(DataLoader[Any]):
        """Fewer batches than its data set would make."""

        def __len__(self) -> int:
            return 4

    with (
        make_trainer(batch_sizes=32, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR) as trainer,
        pytest.raises(ph.PackhorseError, match="a scheduler needs to know how many steps there are"),
    ):
        trainer.fit(Some(make_dataset(), 16))


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
        ({"store": 3}, "store is 3, expected a directory"),
        ({"device": "nope"}, "device is 'nope', expected one that torch knows"),
        ({"device": "nope", "mode": "parallel"}, "device is 'nope', expected one that torch knows"),
        ({"device": "meta"}, "device is 'meta', but"),
        ({"device": [1]}, r"device is \[1\], expected one that torch knows"),
        ({"parts": 2.0}, "parts is 2.0, expected a number of at least 1"),
        ({"parts": True}, "parts is True, expected a number of at least 1"),
        ({"batch_sizes": np.array([8.0, 8.0])}, "batch_sizes is 8.0 for part 0, expected a whole number"),
        ({"batch_sizes": np.array(2.5)}, r"batch_sizes is array\(2.5\) for part 0, expected a whole number"),
        ({"batch_sizes": np.array([8])}, "batch_sizes has 1 entries for 2 parts"),
    ],
)
def test_choices_of_another_kind(options: Any, message: str) -> None:
    with pytest.raises(ph.PackhorseError, match=message):
        make_trainer(**options)


def test_numbers_of_other_libraries() -> None:
    with make_trainer(num_classes=np.int64(4), batch_sizes=[None, np.int32(8)]) as trainer:
        assert trainer.batch_sizes == [None, 8]
        trainer.fit(make_data(), np.int64(1))
    for sizes in (np.array([16, 8]), torch.tensor([16, 8])):
        with make_trainer(parts=np.int64(2), refine=np.int64(1), batch_sizes=sizes) as trainer:
            assert (trainer.num_parts, trainer.batch_sizes) == (2, [16, 8])
            trainer.fit(make_data(), np.array([1, 2]))
            assert [s.epochs for s in trainer.standings] == [(1,), (2,)]


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


def test_a_closed_trainer_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(mode="parallel", store=tmp_path / "store")
    trainer.close()
    left = sorted(tmp_path.rglob("*"))
    verbs: list[Any] = [trainer.evaluate, trainer.fit, lambda data: trainer.fit(data, only=0), trainer.recover]
    for verb in verbs:
        with pytest.raises(ph.PackhorseError, match="this trainer is closed"):
            verb(make_data())
    assert sorted(tmp_path.rglob("*")) == left


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file.py").touch()
    with pytest.raises(ph.StoreError, match=r"file.py is a file, expected a directory"):
        make_trainer(store=tmp_path / "file.py")
    with make_trainer() as trainer, pytest.raises(ph.PackhorseError, match="directory is None, expected a directory"):
        trainer.save(None)  # type: ignore[arg-type]  # that is what is tried


@pytest.mark.parametrize(("kind", "name"), [(Tensor.tolist, "list"), (Tensor.numpy, "ndarray")])
def test_classes_that_are_no_tensor(kind: Any, name: str) -> None:
    x, y = next(iter(make_data()))
    model = make_model()
    with pytest.raises(ph.BatchError, match=rf"y is a {name}, expected a tensor of classes.* torch.as_tensor\(y\)"):
        ph.SegmentedTrainer(model, torch.optim.Adam(model.parameters()), (x, kind(y)), num_classes=4, parts=2)
    with make_trainer() as trainer, pytest.raises(ph.BatchError, match=f"y is a {name}"):
        trainer.fit([(x, kind(y))])


@pytest.mark.parametrize("verb", ["fit", "recover", "evaluate"])
def test_inputs_in_nested_lists_are_told_in_a_line(verb: str) -> None:
    x, y = next(iter(make_data()))
    for given in (x.tolist(), (x, x.tolist()), {"a": x.tolist()}):
        with make_trainer() as trainer, pytest.raises(ph.BatchError, match="numbers in nested lists") as raised:
            getattr(trainer, verb)([(given, y)])
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--test", {"x": torch.zeros(2, 784)}, "--test .*other.safetensors has no tensor 'y'"),
        (
            "--test",
            {"x": torch.zeros(2, 784), "y": torch.zeros(2)},
            r"--test .*other.safetensors: y is float32\[2\], expected one integer class a row",
        ),
        (
            "--test",
            {"x": torch.zeros(2, 784), "y": torch.tensor([0, 7])},
            "--test .*: y has classes from 0 to 7, expected 0 to 3",
        ),
        ("--data", {"x": torch.zeros(2, 784)}, "--data .*other.safetensors has no tensor 'y'"),
        (
            "--data",
            {"x": torch.zeros(2, 784), "y": torch.zeros(2)},
            r"y is float32\[2\], expected one integer class a row",
        ),
    ],
)
def test_files_of_the_command_line(option: str, content: Any, message: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, 784), "y": torch.arange(4, dtype=torch.uint8)}, tmp_path / "good.safetensors")
    save_file(content, tmp_path / "other.safetensors")
    good, other = str(tmp_path / "good.safetensors"), str(tmp_path / "other.safetensors")
    given = {"--data": good} | {option: other}
    arguments = [text for pair in given.items() for text in pair]
    with pytest.raises(ph.PackhorseError, match=message):
        CliRunner().invoke(app, ["sil", "--model", "mlp", "--rows", "4", *arguments], catch_exceptions=False)

"""Parts that train apart: same values as plain loops over the parts, stores, processes, faults, wrong inputs."""

import copy
import errno
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import packhorse as ph
from launch import run_ranks
from packhorse.case import LEAST_KEPT
from packhorse.data import Labelled
from packhorse.estimate import KEPT, Estimate
from packhorse.models import MLP
from packhorse.sil import Hadamard, Readout, Site, Uniform, apart
from packhorse.sil.hadamard import shortfall
from packhorse.sil.labels import Reading
from packhorse.sil.rows import INDEX, Rows, RowsWriter, cut_rows
from packhorse.sil.source import _resize
from packhorse.sil.standing import Standing
from packhorse.weights import SafetensorsFiles

WIDTHS = (12, 16, 16, 16, 4)
pytestmark = pytest.mark.usefixtures("divided_graphs_are_shared")


def make_data(rows: int = 96, batch: int = 16, seed: int | None = 3) -> Labelled:
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 12, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    return Labelled(centres[y] + 0.5 * torch.randn(rows, 12, generator=generator), y, batch, seed=seed)


def make_trainer(model: nn.Module | None = None, **options: Any) -> ph.SegmentedTrainer:
    model = model or make_model()
    data = make_data()
    options = {"num_classes": 4, "labels": "hadamard"} | options
    if "parts" not in options and "cuts" not in options:
        options["cuts"] = ["layers.1"]
    return ph.SegmentedTrainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), next(iter(data)), **options)


def make_model(device: str = "cpu") -> MLP:
    torch.manual_seed(0)
    with torch.device(device):
        return MLP(WIDTHS)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(found: Any, expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train_plainly(model: MLP, labels: Any, cut: int, epochs: int, activated: bool, noise: float, seed: int = 0) -> None:
    """The oracle: ordinary loops, one for the layers before the cut, one for those behind it on what the first made."""
    data, last = make_data(), len(model.layers) - 1

    def run(x: Tensor, first: int, stop: int) -> Tensor:
        for i in range(first, stop):
            x = model.layers[i](x)
            if i < last and (i < stop - 1 or activated):
                x = x.relu()
        return x

    optimizer = torch.optim.Adam(model.layers[:cut].parameters(), lr=1e-2)
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            labels.loss(run(x, 0, cut), y).backward()
            optimizer.step()
    with torch.no_grad():
        kept = [(run(x, 0, cut), y) for x, y in data]
    x, y = (torch.cat(column) for column in zip(*kept, strict=True))
    optimizer = torch.optim.Adam(model.layers[cut:].parameters(), lr=1e-2)
    for epoch in range(epochs):
        first = (seed * 1009 + 1) * 1_000_003 + 2 * epoch
        order, shaken = torch.Generator().manual_seed(first), torch.Generator().manual_seed(first + 1)
        for chosen in torch.randperm(len(y), generator=order).split(16):
            optimizer.zero_grad()
            inside = x[chosen]
            if noise:
                inside = inside + noise * inside.std() * torch.randn(inside.shape, generator=shaken)
            inside = inside if activated else inside.relu()
            F.cross_entropy(run(inside, cut, last + 1), y[chosen]).backward()
            optimizer.step()


@pytest.mark.parametrize("scheme", [Uniform(), Hadamard(), Readout()], ids=["uniform", "hadamard", "readout"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_parts_one_after_another_are_plain_loops(scheme: Any, noise: float) -> None:
    expected = make_model()
    train_plainly(expected, scheme(Site(0, (16,), 4, 0)), 2, 2, scheme.activated, noise)
    model = make_model()
    with make_trainer(model, labels=scheme, noise=noise) as trainer:
        trainer.fit(make_data(), epochs=2)
    assert_equal(values(model), values(expected))


@pytest.mark.parametrize(
    "options", [{"strategy": "relay"}, {"strategy": "relay", "microbatches": 3}, {"memory": "3GiB"}]
)
def test_parts_by_relay_on_disk_give_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for more in ({"microbatches": options.get("microbatches")}, {**options, "store": tmp_path / "store"}):
        model = make_model()
        with make_trainer(model, **more) as trainer:
            trainer.fit(make_data(), epochs=2)
            assert trainer.standings[0].on_disk == ("strategy" in more)
        results.append(values(model))
    assert_equal(results[1], results[0])


def test_a_model_without_memory_is_trained_part_by_part(tmp_path: Path) -> None:
    with make_trainer(make_model("meta"), store=tmp_path / "store", parts=3, labels="readout") as trainer:
        trainer.fit(make_data(), epochs=6)
        accuracy = trainer.evaluate(make_data(seed=None))
        trainer.save(tmp_path / "joined")
        assert all(p.is_meta for p in trainer.model.parameters())
    joined = make_model()
    joined.load_state_dict({name: tensor.load() for name, tensor in SafetensorsFiles(tmp_path / "joined").items()})
    data = make_data(seed=None)
    with torch.no_grad():
        assert accuracy == pytest.approx((joined(data.x).argmax(1) == data.y).float().mean().item())
    assert accuracy > 0.8


def test_accuracy_is_the_joined_models_and_read_outs_are_told() -> None:
    model = make_model()
    with make_trainer(model, parts=2) as trainer:
        trainer.fit(make_data(), epochs=4)
        data = make_data(seed=None)
        accuracy = trainer.evaluate(data)
        with torch.no_grad():
            assert accuracy == pytest.approx((model(data.x).argmax(1) == data.y).float().mean().item())
        described = trainer.describe()
        assert [s.accuracy for s in trainer.standings] == [p["accuracy"] for p in described["parts"]]
        assert trainer.standings[0].accuracy is not None and trainer.standings[0].accuracy > 0.5
        learned = trainer.division.crossings[0].shape[0] * 4
        assert described["exchanged_bytes"] == 96 * (learned + 8)  # what was handed on, and its class, once
        assert described["conventional"]["pipeline_bytes"] == 2 * 4 * 96 * learned  # there and back, four epochs
        assert "part 0" in trainer.report() and "in one piece" in trainer.report()


def test_a_run_that_died_goes_on_with_the_part_it_was_at(tmp_path: Path) -> None:
    expected = make_model()
    with make_trainer(expected, parts=3, store=tmp_path / "whole") as trainer:
        trainer.fit(make_data(), epochs=2)

    class Dies(Exception):
        pass

    def die(progress: Any) -> None:
        if progress.part == 1 and progress.step == 4:
            raise Dies

    with pytest.raises(Dies), make_trainer(parts=3, store=tmp_path / "s", progress=die) as trainer:
        trainer.fit(make_data(), epochs=2)
    seen: set[int] = set()
    model = make_model()
    with make_trainer(
        model, parts=3, store=tmp_path / "s", resume=True, progress=lambda p: seen.add(p.part)
    ) as trainer:
        assert [s.done for s in trainer.standings] == [True, False, False]
        trainer.fit(make_data(), epochs=2)
    assert seen == {1, 2}
    assert_equal(values(model), values(expected))


def test_on_disk_a_part_goes_on_at_its_last_step(tmp_path: Path) -> None:
    expected = make_model()
    with make_trainer(expected, strategy="relay", store=tmp_path / "whole") as trainer:
        trainer.fit(make_data(seed=None), epochs=2)

    def die(progress: Any) -> None:
        if progress.step == 8:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        make_trainer(strategy="relay", store=tmp_path / "s", progress=die) as trainer,
    ):
        trainer.fit(make_data(seed=None), epochs=2)
    steps: list[tuple[int, int]] = []
    model = make_model()
    with make_trainer(
        model, strategy="relay", store=tmp_path / "s", resume=True, progress=lambda p: steps.append((p.part, p.step))
    ) as trainer:
        trainer.fit(make_data(seed=None), epochs=2)
    assert steps[0] == (0, 9)
    assert_equal(values(model), values(expected))


def test_a_store_of_another_run_is_refused(tmp_path: Path) -> None:
    make_trainer(store=tmp_path / "s").close()
    with pytest.raises(ph.StoreError, match="holds a run; pass resume=True"):
        make_trainer(store=tmp_path / "s")
    with pytest.raises(ph.StoreError, match="another labels"):
        make_trainer(store=tmp_path / "s", resume=True, labels="uniform")
    with pytest.raises(ph.StoreError, match="another cuts"):
        make_trainer(store=tmp_path / "s", resume=True, cuts=["layers.0"])


def test_a_run_with_other_epochs_is_not_taken_for_the_same(tmp_path: Path) -> None:
    with make_trainer(store=tmp_path / "s") as trainer:
        trainer.fit(make_data(), epochs=2)
    with (
        make_trainer(store=tmp_path / "s", resume=True) as trainer,
        pytest.raises(ph.StoreError, match="part 0 was trained for 2 epochs, but 3 are asked"),
    ):
        trainer.fit(make_data(), epochs=3)


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_fit_again_trains_further(mode: Any, tmp_path: Path) -> None:
    """Also where another process takes over between the two, and there is what the first recovered."""
    whole = make_model()
    with make_trainer(whole, mode=mode, store=tmp_path / "whole") as trainer:
        trainer.fit(make_data(), epochs=2)
        first = values(whole)
        trainer.recover(make_data(), epochs=1)
        recovered = values(whole)
        trainer.fit(make_data(), epochs=1)
        assert not any(torch.equal(first[name], value) for name, value in values(whole).items())
    with make_trainer(make_model(), mode=mode, store=tmp_path / "s") as trainer:
        trainer.fit(make_data(), epochs=2)
        trainer.recover(make_data(), epochs=1)
    model = make_model()
    with make_trainer(model, mode=mode, store=tmp_path / "s", resume=True) as trainer:
        assert_equal(values(model), recovered)
        trainer.fit(make_data(), epochs=2)
        trainer.recover(make_data(), epochs=1)
        assert_equal(values(model), recovered)  # nothing was done twice
        trainer.fit(make_data(), epochs=1)
    assert_equal(values(model), values(whole))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strategy", ["auto", "relay"])
def test_recovered_values_are_those_of_a_resumed_run(device: str, strategy: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": tmp_path / "s", "strategy": strategy, "labels": "readout"}
    with make_trainer(make_model(device), **options) as trainer:
        trainer.fit(make_data(), epochs=1)
        before = trainer.evaluate(make_data(seed=None))
        trainer.recover(make_data(), epochs=6)
        recovered = trainer.evaluate(make_data(seed=None))
        trainer.save(tmp_path / "one")
    assert recovered > before
    with make_trainer(make_model(device), resume=True, **options) as trainer:
        assert trainer.evaluate(make_data(seed=None)) == recovered
        trainer.save(tmp_path / "two")
    one, two = (dict(SafetensorsFiles(tmp_path / name).items()) for name in ("one", "two"))
    assert_equal({n: t.load() for n, t in two.items()}, {n: t.load() for n, t in one.items()})


def test_a_recovery_that_died_goes_on_at_its_last_step(tmp_path: Path) -> None:
    def run(model: nn.Module, store: str, progress: Any = None, resume: bool = False) -> None:
        options: dict[str, Any] = {"strategy": "relay", "store": tmp_path / store, "progress": progress}
        with make_trainer(model, resume=resume, **options) as trainer:
            trainer.fit(shuffled(), epochs=1)
            trainer.recover(shuffled(), epochs=2)

    def shuffled() -> Any:
        data = make_data(seed=None)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), 16, shuffle=True)

    def die(progress: Any) -> None:
        if progress.phase == "recover" and progress.step == 8:
            raise KeyboardInterrupt

    expected, model, steps = make_model(), make_model(), []
    run(expected, "whole")
    torch.manual_seed(77)  # orders follow from the run's seed, not from what else draws
    with pytest.raises(KeyboardInterrupt):
        run(make_model(), "s", die)
    run(model, "s", lambda p: steps.append((p.phase, p.step)), resume=True)
    assert steps == [("recover", step) for step in range(9, 13)]
    assert_equal(values(model), values(expected))


def test_recovery_is_ordinary_training_of_the_joined_model() -> None:
    model = make_model()
    with make_trainer(model) as trainer:
        trainer.fit(make_data(), epochs=1)
        expected = copy.deepcopy(model)
        optimizer = torch.optim.Adam(expected.parameters(), lr=1e-2)
        for x, y in make_data():
            optimizer.zero_grad()
            F.cross_entropy(expected(x), y).backward()
            optimizer.step()
        trainer.recover(make_data(), epochs=1)
    assert_equal(values(model), values(expected))


def test_recovery_by_relay_of_a_model_without_memory(tmp_path: Path) -> None:
    with make_trainer(make_model("meta"), strategy="relay", store=tmp_path / "s", labels="readout") as trainer:
        trainer.fit(make_data(), epochs=4)
        before = trainer.evaluate(make_data(seed=None))
        trainer.recover(make_data(), epochs=4)
        assert trainer.evaluate(make_data(seed=None)) >= before > 0.5


# -- at once


def test_parts_at_once_in_processes_of_their_own() -> None:
    model = make_model()
    with make_trainer(model, mode="parallel", parts=2) as trainer:
        trainer.fit(make_data(), epochs=8)
        assert [s.epochs for s in trainer.standings] == [(8,), (8, 1)]
        assert trainer.evaluate(make_data(seed=None)) > 0.8


def test_parts_at_once_by_relay_are_refined_too(tmp_path: Path) -> None:
    results = []
    for more in ({}, {"strategy": "relay", "store": tmp_path / "s"}):
        model = make_model()
        with make_trainer(model, mode="parallel", parts=2, refine=2, **more) as trainer:
            trainer.fit(make_data(), epochs=3)
            assert [s.epochs for s in trainer.standings] == [(3,), (3, 2)]
            assert [s.steps for s in trainer.standings] == [18, 30]
        results.append(values(model))
    assert_equal(results[1], results[0])


def test_parts_at_once_tell_how_far_they_are() -> None:
    told: list[Any] = []
    with make_trainer(mode="parallel", parts=2, progress=told.append) as trainer:
        trainer.fit(make_data(), epochs=2)
        trainer.recover(make_data(), epochs=1)
    for key, steps in {(0, "fit"): 12, (1, "fit"): 12, (1, "refine"): 6, (2, "recover"): 6}.items():
        assert [p.step for p in told if (p.part, p.phase) == key] == list(range(1, steps + 1)), key


def test_processes_of_parts_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import os, time, test_sil
class Slow:
    def __iter__(self):
        print(os.getpid(), flush=True)
        time.sleep(60)
test_sil.make_trainer(mode="parallel", parts=2).fit(Slow(), epochs=1)
"""
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_is_running(child) for child in children):
        assert time.monotonic() < deadline, "children outlived their parent"
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_what_a_process_says_when_it_dies() -> None:
    with (
        make_trainer(mode="parallel") as trainer,
        pytest.raises(ph.PackhorseError, match=r"part 0 ended with 1:[\s\S]*no rows"),
    ):
        trainer.fit(_Failing(), epochs=1)


class _Failing:
    def __iter__(self) -> Any:
        raise ValueError("no rows")


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_sil
trainer = test_sil.make_trainer(mode="parallel", parts=2, store={str(tmp_path / "store")!r})
trainer.fit(test_sil.make_data(), epochs=8)
print("accuracy", trainer.evaluate(test_sil.make_data(seed=None)))
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("accuracy")]
    assert len(found) == 2 and found[0] == found[1] > 0.8


def test_ranks_recover_together_and_refuse_what_they_must_not_take_over(tmp_path: Path) -> None:
    """A store that holds a run is refused by all ranks, not waited for; none is refused too."""

    def work(rank: int) -> Any:
        data, said = make_data(), []
        with make_trainer(mode="parallel", parts=2, store=tmp_path / "s", labels="readout") as trainer:
            trainer.fit(data, epochs=4)
            before = trainer.evaluate(make_data(seed=None))
            trainer.recover(data, epochs=4)
            after, recovered = trainer.evaluate(make_data(seed=None)), values(trainer.model)
        for options in ({"store": tmp_path / "s"}, {"store": None}, {"store": tmp_path / "s", "resume": True}):
            try:
                with make_trainer(mode="parallel", parts=2, labels="readout", **options) as trainer:
                    assert_equal(values(trainer.model), recovered)
                said.append("taken up")
            except ph.PackhorseError as error:
                said.append(str(error))
        return before, after, recovered, said

    (before, after, one, said), (_, _, two, same) = run_ranks(2, work)
    assert_equal(one, two)
    assert after >= before > 0.5
    assert said == same and "holds a run; pass resume=True" in said[0] and "pass store=DIRECTORY" in said[1]
    assert said[2] == "taken up"


def test_ranks_share_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert [apart.is_mine(i) for i in range(4)] == [False, True, False, True]


# -- any model


class Maps(nn.Module):
    """A small convolutional net with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.drop, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.drop(self.body(x).relu())
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """A transformer with a padding mask made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return self.head(x.mean(1))


@pytest.mark.parametrize("positions", ["pooled", "each"])
@pytest.mark.parametrize("kind", [Uniform, Hadamard, Readout])
def test_feature_maps_with_batch_norm_and_dropout(kind: Any, positions: Any) -> None:
    x, y = torch.randn(24, 3, 6, 6), torch.randint(4, (24,))
    model = Maps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ph.SegmentedTrainer(
        model, optimizer, (x[:8], y[:8]), num_classes=4, cuts=["norm", "body"], labels=kind(positions=positions)
    ) as trainer:
        trainer.fit(Labelled(x, y, 8, seed=0), epochs=2)
        accuracy = trainer.evaluate(Labelled(x, y, 8, seed=None))
        model.eval()
        with torch.no_grad():
            assert accuracy == pytest.approx((model(x).argmax(1) == y).float().mean().item())
        assert int(model.norm.num_batches_tracked) == 6


def test_sequences_and_what_crosses_beside_the_value(tmp_path: Path) -> None:
    tokens, y = torch.randint(20, (24, 5)), torch.randint(4, (24,))
    model = Tokens()
    optimizer = torch.optim.Adam(model.parameters())
    rows = [{"tokens": tokens[i : i + 8]} for i in range(0, 24, 8)]
    loader = list(zip(rows, y.split(8), strict=True))
    with ph.SegmentedTrainer(
        model, optimizer, loader[0], num_classes=4, cuts=["blocks.0"], labels="readout", store=tmp_path / "s"
    ) as trainer:
        trainer.fit(loader, epochs=2)
        accuracy = trainer.evaluate(loader)
        model.eval()
        with torch.no_grad():
            assert accuracy == pytest.approx((model(tokens).argmax(1) == y).float().mean().item())


def test_a_scheme_of_ones_own(tmp_path: Path) -> None:
    class Mine:
        activated = True

        def __call__(self, site: Site) -> Any:
            return self

        def loss(self, output: Tensor, classes: Tensor) -> Tensor:
            return F.cross_entropy(output[:, :4], classes)

        def scores(self, output: Tensor) -> Tensor:
            return output[:, :4]

        def imitate(self, classes: Tensor, generator: torch.Generator) -> Tensor:
            return F.one_hot(classes, 16).float()

    with make_trainer(labels=Mine(), store=tmp_path / "s") as trainer:
        trainer.fit(make_data(), epochs=4)
        assert trainer.evaluate(make_data(seed=None)) > 0.7
    with make_trainer(labels=Mine(), store=tmp_path / "s", resume=True) as trainer:  # another object, the same scheme
        assert trainer.standings[0].done


def test_rates_batch_sizes_groups_and_schedules() -> None:
    model = make_model()
    data, rates = make_data(), []
    groups = [
        {"params": list(model.layers[:2].parameters()), "weight_decay": 0.1},
        {"params": list(model.layers[2:].parameters())},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def schedule(made: torch.optim.Optimizer, steps: int) -> Any:
        rates.append((made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"], steps))
        return torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)

    with ph.SegmentedTrainer(
        model,
        optimizer,
        next(iter(data)),
        num_classes=4,
        cuts=["layers.1"],
        rates=[1e-2, 5e-3],
        batch_sizes=[16, 32],
        scheduler=schedule,
    ) as trainer:
        trainer.fit(data, epochs=[1, 2])
        assert [s.steps for s in trainer.standings] == [6, 6]
    assert rates == [(1e-2, 0.1, 6), (5e-3, 0.01, 6)]


def test_a_schedule_of_recovery_ends_with_it() -> None:
    """Else what is trained next would be trained at the rate that it ended with, which a cosine makes zero."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    with ph.SegmentedTrainer(
        model,
        optimizer,
        next(iter(make_data())),
        num_classes=4,
        parts=2,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
    ) as trainer:
        trainer.recover(make_data(), epochs=1)
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before


def test_parts_trained_on_machines_that_never_talk_come_together(tmp_path: Path) -> None:
    together, apart_model = make_model(), make_model()
    options: dict[str, Any] = {"mode": "parallel", "parts": 2}
    with make_trainer(together, store=tmp_path / "together", **options) as trainer:
        trainer.fit(make_data(), epochs=2)
    for i in range(2):
        with make_trainer(store=tmp_path / f"machine{i}", **options) as trainer:
            trainer.fit(make_data(), epochs=2, only=i)
    shutil.copytree(tmp_path / "machine1" / "part1", tmp_path / "machine0" / "part1")
    with make_trainer(apart_model, store=tmp_path / "machine0", resume=True, **options) as trainer:
        trainer.fit(make_data(), epochs=2)
    assert_equal(values(apart_model), values(together))


def test_parts_are_balanced_by_memory() -> None:
    """The net of the paper: two parts are cut after the first layer, three after the first and the second."""
    model = MLP()
    example = torch.randn(256, 784), torch.randint(26, (256,))
    for parts, cuts, ratio in ((2, ["layers.0"], 0.58), (3, ["layers.0", "layers.1"], 0.47)):
        with ph.SegmentedTrainer(
            model, torch.optim.Adam(model.parameters()), example, num_classes=26, parts=parts
        ) as trainer:
            assert [s.modules[-1] for s in trainer.standings[:-1]] == cuts
            described = trainer.describe()
            assert described["tensor_ratio"] < ratio < described["planned_ratio"]  # of so small a net malloc keeps much


def test_what_running_a_part_showed_replaces_what_was_reckoned() -> None:
    """Unless it showed nothing, and no less was planned with."""

    def expect(standing: Standing, peak: int, kept: int) -> int:
        standing.expect(Estimate(peak={"host": peak}, kinds={"host": {KEPT: kept}}), before=1000, batch=20)
        return standing.planned_bytes

    def make() -> Standing:
        return Standing(("a",), 10, planned_bytes=500, flops_per_row=1.0, crossing_bytes_per_row=0)

    assert expect(make(), 2000, LEAST_KEPT + 1) == 1020
    assert expect(make(), 1400, LEAST_KEPT + 1) == 420
    assert expect(make(), 2000, LEAST_KEPT) == 500
    assert expect(make(), 1400, LEAST_KEPT) == 420
    refined = make()
    assert expect(refined, 2000, LEAST_KEPT + 1) == 1020
    refined.epochs = (1,)
    assert expect(refined, 1500, LEAST_KEPT + 1) == 1020, "the most that any of its trainings takes"


# -- labels


@given(st.integers(2, 40), st.integers(2, 64), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_codes_stand_for_their_classes(classes: int, width: int, seed: int) -> None:
    y = torch.arange(classes)
    for scheme in (Uniform(), Hadamard(), Readout()):
        if isinstance(scheme, Hadamard) and classes > width:
            continue
        one, two = (scheme(Site(0, (width,), classes, seed)) for _ in range(2))
        assert torch.equal(one.codes, two.codes)  # type: ignore[attr-defined]  # all who know the seed agree
        assert not torch.equal(one.codes, scheme(Site(1, (width,), classes, seed)).codes)  # type: ignore[attr-defined]
        if not isinstance(scheme, Readout):
            assert torch.equal(one.scores(one.codes).argmax(1), y)  # type: ignore[attr-defined]
        made = one.imitate(y, torch.Generator().manual_seed(0))
        assert made.shape == (classes, width) and made.isfinite().all()


@given(st.integers(2, 200), st.data())
@settings(deadline=None, max_examples=60)
def test_codes_of_signs_are_as_orthogonal_as_their_length_allows(width: int, data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, width))
    codes = Hadamard()(Site(0, (width,), classes, data.draw(st.integers(0, 9)))).codes  # type: ignore[attr-defined]
    assert codes.shape == (classes, width) and torch.equal(codes.abs(), torch.ones(classes, width))
    largest = (codes @ codes.T - width * torch.eye(classes)).abs().max().item()
    assert largest <= shortfall(classes, width)
    if math.log2(width).is_integer() or (width, classes) == (12, 12):
        assert largest == 0


def test_few_lengths_have_no_orthogonal_codes() -> None:
    assert [n for n in range(4, 200, 4) if shortfall(10, n)] == []  # two matrices side by side, if not one
    assert max(shortfall(n, n) / n for n in range(16, 200)) < 0.18


@pytest.mark.parametrize(
    ("shape", "is_map"), [((7,), False), ((5, 7), False), ((7, 4), True), ((7, 4, 4), True), ((7, 3, 4, 4), True)]
)
@pytest.mark.parametrize("positions", ["pooled", "each"])
@pytest.mark.parametrize("grid", [1, 2])
def test_values_are_read_as_vectors_and_back(shape: tuple[int, ...], is_map: bool, positions: Any, grid: int) -> None:
    reading = Reading(shape, is_map, positions, grid)
    vectors = torch.randn(3, reading.width)
    value = reading.spread(vectors)
    assert value.shape == (3, *shape)
    found = reading.vectors(value)
    assert found.shape[-1] == reading.width
    if all(size % grid == 0 for size in shape[1:]):  # else cells overlap
        assert torch.allclose(found if found.ndim == 2 else found.mean(1), vectors, atol=1e-6)


# -- rows on disk


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_rows_come_back_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("rows")
    count = data.draw(st.integers(1, 40))
    columns = {
        "a": torch.randn(count, 3, 2),
        "b": torch.randint(100, (count,)),
        "c": torch.randn(count, 5, dtype=torch.bfloat16),
        "d": torch.rand(count, 2) > 0.5,
    }
    sizes = data.draw(st.integers(1, 50))
    with RowsWriter(directory) as writer:
        for i in range(0, count, sizes):
            writer.append({name: column[i : i + sizes] for name, column in columns.items()})
    order = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=60)))
    with Rows(directory) as rows:
        assert len(rows) == count and rows.nbytes == writer.nbytes
        found = rows.read(order)
        batches = list(rows.batches(data.draw(st.integers(1, 50)), torch.Generator().manual_seed(1)))
    assert all(torch.equal(found[name], column[order]) for name, column in columns.items())
    shuffled = torch.cat([batch["b"] for batch in batches])
    assert torch.equal(shuffled.sort().values, columns["b"].sort().values)


def test_rows_that_are_not_all_there_do_not_count(tmp_path: Path) -> None:
    writer = RowsWriter(tmp_path)
    writer.append({"a": torch.ones(3, 2)})
    writer.close()
    with pytest.raises(ph.StoreError, match="no complete rows"):
        Rows(tmp_path)
    with RowsWriter(tmp_path) as writer:
        writer.append({"a": torch.ones(3, 2)})
    os.truncate(tmp_path / "column0.bin", 20)
    with pytest.raises(ph.StoreError, match="has 20 bytes, expected 24"):
        Rows(tmp_path)
    (tmp_path / INDEX).write_bytes(b"packhorse 0\n{}")
    with pytest.raises(ph.StoreError, match="damaged"):
        Rows(tmp_path)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = RowsWriter(tmp_path)
    writer.append({"a": torch.ones(3, 2)})
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ph.StoreError, match="failed after 3: No space left on device; make room and resume"):
        writer.append({"a": torch.ones(3, 2)})
    writer.close()


# -- wrong inputs


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        return self.c(y + self.b(y).tanh())


class Bucket(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).sum(1).clamp(max=8)


class Counts(nn.Module):
    """Numbers come first."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket, self.embed, self.head = Bucket(), nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(self.bucket(x)))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (make_model, {"parts": 9}, ph.PartitionError, "at most 4 parts that train apart, but 9 are asked"),
        (make_model, {"parts": 0}, ph.PartitionError, "expected a number of at least 1"),
        (make_model, {"cuts": ["layers.9"]}, ph.PartitionError, "no module named 'layers.9'"),
        (Skips, {"cuts": ["b"]}, ph.PartitionError, "2 values that training changes cross there"),
        (make_model, {"labels": "codes"}, ph.PackhorseError, "expected one of uniform, hadamard, readout"),
        (make_model, {"labels": 3}, ph.PackhorseError, "labels is a int, expected a name or a scheme"),
        (make_model, {"mode": "both"}, ph.PackhorseError, "mode is 'both'"),
        (make_model, {"parts": 2, "cuts": ["layers.0"]}, ph.PackhorseError, "give either parts"),
        (make_model, {"cuts": "layers.0"}, ph.PackhorseError, "expected a list of module names"),
        (make_model, {"num_classes": 1}, ph.PackhorseError, "num_classes is 1"),
        (make_model, {"num_classes": 3}, ph.BatchError, "y has classes from 0 to 3, expected 0 to 2"),
        (
            lambda: MLP((12, 16, 40)),
            {"num_classes": 40, "parts": 2},
            ph.PackhorseError,
            "40 classes need codes of at least",
        ),
        (
            make_model,
            {"num_classes": 5},
            ph.PackhorseError,
            "num_classes is 5, but the model's output has 4 scores a row",
        ),
        (make_model, {"rates": [1e-3] * 3}, ph.PackhorseError, "rates has 3 entries for 2 parts"),
        (make_model, {"rates": ["fast", 1]}, ph.PackhorseError, "rates is 'fast' for part 0"),
        (make_model, {"batch_sizes": 0}, ph.PackhorseError, "batch_sizes is 0 for part 0, expected a whole number"),
        (make_model, {"batch_sizes": [16, 2.5]}, ph.PackhorseError, "batch_sizes is 2.5 for part 1"),
        (make_model, {"refine": -1}, ph.PackhorseError, "refine is -1"),
        (make_model, {"refine": 0.5}, ph.PackhorseError, "refine is 0.5"),
        (make_model, {"noise": "much"}, ph.PackhorseError, "noise is 'much'"),
        (make_model, {"noise": float("nan")}, ph.PackhorseError, "noise is nan"),
    ],
)
def test_wrong_choices(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(make(), **options)


def test_a_cut_whose_value_is_no_float() -> None:
    model = Counts()
    x, y = torch.randn(8, 12), torch.randint(4, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ph.PartitionError, match="floating-point value that training can change, but what crosses there is int64"
    ):
        ph.SegmentedTrainer(model, optimizer, (x, y), num_classes=4, cuts=["bucket"])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((torch.randn(8, 12), torch.randn(8)), "expected one integer class a row"),
        ((torch.randn(8, 12), torch.randn(8, dtype=torch.cfloat)), "expected one integer class a row"),
        ((torch.randn(8, 12), torch.zeros(8, 4, dtype=torch.long)), r"int64\[8, 4\], expected one integer class a row"),
        (torch.randn(8, 12), r"a batch is a Tensor, expected \(x, y\)"),
    ],
)
def test_targets_that_are_no_classes(example: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(ph.BatchError, match=message):
        ph.SegmentedTrainer(model, torch.optim.Adam(model.parameters()), example, num_classes=4, parts=2)


def test_a_weight_in_two_parts_is_refused() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    model[2].weight = model[0].weight  # type: ignore[union-attr, assignment]
    with pytest.raises(ph.PartitionError, match="is used in parts 0 and 1, which would train it apart"):
        make_trainer(model, cuts=["0"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_classes_are_integers_of_any_kind(dtype: torch.dtype) -> None:
    data, models = make_data(seed=None), [make_model(), make_model()]
    for model, kind in zip(models, (torch.int64, dtype), strict=True):
        pairs = [(x, y.to(kind)) for x, y in data]
        optimizer = torch.optim.Adam(model.parameters())
        with ph.SegmentedTrainer(model, optimizer, pairs[0], num_classes=4, cuts=["layers.1"]) as trainer:
            trainer.fit(pairs)
            trainer.recover(pairs)
    assert_equal(values(models[1]), values(models[0]))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ((pair for pair in make_data()), "a generator, which can be gone through once"),
        ([], "no batch in epoch 1 of 1"),
        (3, "the loader is a int"),
        ([torch.ones(3)], "a batch is a Tensor"),
        ([(torch.randn(8, 12), torch.full((8,), 4))], "y has classes from 4 to 4, expected 0 to 3"),
    ],
)
def test_loaders_that_cannot_be_trained_on(loader: Any, message: str, tmp_path: Path) -> None:
    with make_trainer(store=tmp_path / "s") as trainer:
        for verb in (trainer.fit, trainer.recover):
            with pytest.raises(ph.BatchError, match=message):
                verb(loader, 1)
        if not isinstance(loader, Iterator):  # which can be gone through once
            with pytest.raises(ph.BatchError):
                trainer.evaluate(loader)
        assert not any(s.done or s.phases for s in trainer.standings)
        trainer.fit(make_data())  # nothing is lost


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "3", [1, 0], [1, 2, 3]])
def test_epochs_that_are_no_number_of_times(epochs: Any) -> None:
    with make_trainer() as trainer:
        with pytest.raises(ph.PackhorseError, match="epochs"):
            trainer.fit(make_data(), epochs)
        with pytest.raises(ph.PackhorseError, match="epochs"):
            trainer.recover(make_data(), epochs)


# -- what strangers bring


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_other_precisions(precision: Any, mode: Any) -> None:
    model = make_model()
    with make_trainer(model, precision=precision, mode=mode) as trainer:
        trainer.fit(make_data(), epochs=8)
        assert trainer.evaluate(make_data(seed=None)) > 0.9
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())


def make_normed() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in ((12, 16), (16, 16)):
        layers += [nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def test_no_row_is_left_alone_with_a_batch_norm() -> None:
    """Which plain PyTorch refuses; batches of stored rows are cut so that there is none."""
    model = make_normed()
    with make_trainer(model, cuts=["2"], batch_sizes=16) as trainer:
        trainer.fit(make_data(rows=97, batch=40))
        assert [s.steps for s in trainer.standings] == [6, 6]
    assert all(torch.isfinite(b).all() for b in model.buffers())
    with make_trainer(make_normed(), cuts=["2"]) as trainer, pytest.raises(ph.BatchError, match="batch has one row"):
        trainer.fit(make_data(rows=97, batch=16))


@given(rows=st.integers(0, 40), size=st.integers(1, 12), pieces=st.lists(st.integers(1, 9), max_size=12))
def test_rows_are_cut_alike_wherever_they_come_from(rows: int, size: int, pieces: list[int]) -> None:
    sizes = cut_rows(rows, size)
    assert sum(sizes) == rows
    assert all(n == size for n in sizes[:-1])
    assert size == 1 or rows <= 1 or 1 not in sizes
    columns = [{"x": column} for column in torch.arange(sum(pieces)).split(pieces)] if pieces else []
    resized = [batch["x"] for batch in _resize(columns, size)]
    assert [len(x) for x in resized] == cut_rows(sum(pieces), size)
    assert not pieces or torch.equal(torch.cat(resized), torch.arange(sum(pieces)))


def test_a_loader_that_ends_for_good_spoils_nothing(tmp_path: Path) -> None:
    class Once:
        """A loader whose second `iter` goes on where the first has ended."""

        def __init__(self) -> None:
            self.batches = iter(list(make_data()))

        def __iter__(self) -> Any:
            return self.batches

    with make_trainer(store=tmp_path / "s") as trainer, pytest.raises(ph.BatchError, match="begins anew, and resume"):
        trainer.fit(Once())
    model = make_model()
    with make_trainer(model, store=tmp_path / "s", resume=True) as trainer:
        trainer.fit(make_data())
        assert trainer.standings[1].steps == 6


def test_modules_of_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            names = ("segment", "columns", "index", "bind", "hold", "division", "is_last", "role", "pieces")
            self.names = names
            for i, name in enumerate(names):
                self.add_module(name, nn.Linear(12 if i == 0 else 16, 4 if i == len(names) - 1 else 16))

        def forward(self, x: Tensor) -> Tensor:
            for name in self.names[:-1]:
                x = self.get_submodule(name)(x).relu()
            return self.get_submodule(self.names[-1])(x)  # type: ignore[no-any-return]

    with make_trainer(Named(), parts=3) as trainer:
        trainer.fit(make_data())
        assert 0 <= trainer.evaluate(make_data()) <= 1


class Masked(nn.Module):
    """An encoder that takes another way in evaluation, where cuts inside of it find no place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding).mean(1))  # type: ignore[no-any-return]


def test_parts_end_where_evaluation_passes_too() -> None:
    model = Masked()
    tokens = torch.randint(20, (16, 6), generator=torch.Generator().manual_seed(0))
    x = {"tokens": tokens, "padding": tokens == 3}
    example = (x, tokens[:, 0] % 4)
    with ph.SegmentedTrainer(
        model, torch.optim.Adam(model.parameters()), example, num_classes=4, parts=2, labels="hadamard"
    ) as trainer:
        trainer.fit([example])
        trainer.evaluate([example])
    with pytest.raises(ph.PartitionError, match="at most 2 parts"):
        ph.SegmentedTrainer(model, torch.optim.Adam(model.parameters()), example, num_classes=4, parts=3)


class AskingMore(torch.optim.SGD):
    def __init__(self, params: Any, why: str):
        super().__init__(params, lr=0.1)


def test_optimizers_whose_constructor_asks_for_more() -> None:
    found = []
    for kind in (lambda p: AskingMore(p, "because"), lambda p: torch.optim.SGD(p, lr=0.1)):
        model = make_model()
        with ph.SegmentedTrainer(
            model, kind(model.parameters()), next(iter(make_data())), num_classes=4, cuts=["layers.1"]
        ) as trainer:
            trainer.fit(make_data())
        found.append(values(model))
    assert_equal(*found)


def test_states_that_a_constructor_makes() -> None:
    model = make_model()
    before = values(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    with ph.SegmentedTrainer(model, optimizer, next(iter(make_data())), num_classes=4, cuts=["layers.1"]) as trainer:
        trainer.fit(make_data())
    assert all(not torch.equal(before[name], value) for name, value in values(model).items())


def test_an_optimizer_without_a_part_is_refused_at_once() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.layers[0].parameters())
    with pytest.raises(ph.PackhorseError, match=r"part 1 .* has no parameter in the optimizer"):
        ph.SegmentedTrainer(model, optimizer, next(iter(make_data())), num_classes=4, cuts=["layers.1"])


def test_rates_are_not_those_of_an_earlier_schedule() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    seen: list[float] = []

    def schedule(part: torch.optim.Optimizer, steps: int) -> Any:
        seen.append(part.param_groups[0]["lr"])
        found = torch.optim.lr_scheduler.LambdaLR(part, lambda _: 1.0)
        seen.append(part.param_groups[0]["lr"])
        return found

    example = next(iter(make_data()))
    with ph.SegmentedTrainer(
        model, optimizer, example, num_classes=4, cuts=["layers.1"], rates=[0.03, 0.02], scheduler=schedule
    ) as trainer:
        trainer.fit(make_data())
    assert seen == [0.03, 0.03, 0.02, 0.02]


def test_steps_are_counted_beforehand() -> None:
    data = torch.utils.data.TensorDataset(make_data().x, make_data().y)
    some = torch.utils.data.RandomSampler(data, replacement=True, num_samples=200)
    loaders: list[tuple[Any, int]] = [
        (torch.utils.data.DataLoader(data, 16, sampler=some), 13),
        (torch.utils.data.DataLoader(data, 40, drop_last=True), 5),
        (list(make_data()), 6),
        (make_data(), 6),
    ]
    for loader, steps in loaders:
        counted: list[int] = []

        def schedule(optimizer: Any, steps: int, counted: list[int] = counted) -> Any:
            counted.append(steps)
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

        with make_trainer(batch_sizes=16, scheduler=schedule) as trainer:
            trainer.fit(loader)
            assert counted == [s.steps for s in trainer.standings] == [steps, steps]


def test_later_parts_have_batches_like_the_loaders() -> None:
    for loader in (make_data(batch=32), list(make_data(batch=32))):
        with make_trainer() as trainer:  # whose example has 16 rows
            trainer.fit(loader)
            assert [s.steps for s in trainer.standings] == [3, 3]


@pytest.mark.parametrize(
    ("layers", "shape", "is_map"),
    [
        ([nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 10, 4)], (8, 10), True),
        ([nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 10, 4)], (8, 10), True),
        ([nn.Linear(12, 8), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 8, 4)], (3, 8), False),
    ],
    ids=["convolution", "norm", "linear"],
)
def test_maps_are_told_from_sequences(layers: list[nn.Module], shape: tuple[int, ...], is_map: bool) -> None:
    model = nn.Sequential(*layers)
    cut = str(len(layers) - 3)
    example = (torch.randn(8, 3, 12), torch.randint(4, (8,)))
    seen: list[Site] = []

    def scheme(site: Site) -> Any:
        seen.append(site)
        return Readout()(site)

    optimizer = torch.optim.Adam(model.parameters())
    with ph.SegmentedTrainer(model, optimizer, example, num_classes=4, cuts=[cut], labels=scheme) as trainer:
        trainer.fit([example])
    assert [(site.shape, site.is_map) for site in seen] == [(shape, is_map)]


def make_scheme(site: Site) -> Any:
    return Hadamard()(site)


def test_a_function_as_scheme_is_known_again(tmp_path: Path) -> None:
    with make_trainer(labels=make_scheme, store=tmp_path / "s") as trainer:
        trainer.fit(make_data())
    with make_trainer(labels=make_scheme, store=tmp_path / "s", resume=True) as trainer:
        assert all(standing.done for standing in trainer.standings)


def test_a_run_is_taken_up_with_the_same_choices(tmp_path: Path) -> None:
    with make_trainer(store=tmp_path / "s") as trainer:
        trainer.fit(make_data())
        trainer.recover(make_data(), epochs=2)
    with pytest.raises(ph.StoreError, match="another batch_sizes"):
        make_trainer(store=tmp_path / "s", resume=True, batch_sizes=8)
    model = make_model()
    with pytest.raises(ph.StoreError, match="another optimizer: Adam, here SGD"):
        ph.SegmentedTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            next(iter(make_data())),
            num_classes=4,
            labels="hadamard",
            cuts=["layers.1"],
            store=tmp_path / "s",
            resume=True,
        )
    with make_trainer(store=tmp_path / "s", resume=True) as trainer:
        trainer.fit(make_data())
        with pytest.raises(ph.StoreError, match="trained for 2 epochs, but 3 are asked"):
            trainer.recover(make_data(), epochs=3)


def test_a_generator_will_do_to_evaluate() -> None:
    with make_trainer() as trainer:
        assert trainer.evaluate(pair for pair in make_data(seed=None)) == trainer.evaluate(make_data(seed=None))


def test_a_name_that_classes_have() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 4)

        def forward(self, y: Tensor) -> Tensor:
            return self.b(self.a(y).relu())  # type: ignore[no-any-return]

    model = Takes()
    x, y = next(iter(make_data()))
    with pytest.raises(ph.BatchError, match="x has a value 'y'"):
        ph.SegmentedTrainer(model, torch.optim.Adam(model.parameters()), ({"y": x}, y), num_classes=4, parts=2)


def test_a_cut_before_any_parameter() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ph.PartitionError, match="no parameter has a part in what crosses there"):
        make_trainer(model, cuts=["0"])

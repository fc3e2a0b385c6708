"""One version and a spare: a step that was interrupted is finished, bit for bit, or refused by name; never undone by halves."""

import errno
import itertools
import os
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import crash
import packhorse as ph
import packhorse.search
import packhorse.tasks
from crash import (
    STEPS,
    Recorder,
    assert_equal,
    is_interrupted,
    make_trainer,
    read_state,
    replay,
    run_kills,
    survive,
    train,
)
from packhorse.archive import check_store, describe_store, export_store, reclaim
from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool
from packhorse.store import MASTER, Block, make_block
from packhorse.store.files import FileSystem
from packhorse.store.places import Spares
from packhorse.units import format_bytes

pytestmark = pytest.mark.usefixtures("captured_once")

KNOT = {"model_kind": "knot", "momentum": 0.9}


@pytest.fixture(scope="module")
def knot(captured_once: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """All values after every step of an undisturbed run of the other model."""
    return crash.reference(tmp_path_factory.mktemp("knot"), **KNOT)


@pytest.fixture(scope="module")
def clipped(captured_once: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return crash.reference(tmp_path_factory.mktemp("clipped"), **KNOT, clip_norm=0.5)


# -- kills


@pytest.mark.parametrize(
    "options",
    [{}, {"durability": "power", "clip_norm": 0.5}, KNOT],
    ids=["process", "power, deferred", "skips, ties, momentum"],
)
def test_killed_at_any_point(tmp_path: Path, options: dict[str, Any]) -> None:
    counts = run_kills(tmp_path, 8, versions=1, **options)
    assert counts["killed by time"] + counts["killed in an operation"] >= 8


# -- crashes between operations


def record_step(tmp_path: Path, **options: Any) -> tuple[Path, list[tuple[Any, ...]]]:
    """A store after two steps, and the operations of the third."""
    recorder, durability = Recorder(), options.pop("durability", "process")
    store = ph.DiskStore(tmp_path / "s", durability=durability, versions=1, filesystem=recorder)
    with make_trainer(store, **options) as trainer:
        train(trainer, 2)
        trainer.state_dict()  # ends what is under way
        shutil.copytree(tmp_path / "s", tmp_path / "before")
        recorder.operations.clear()
        train(trainer, 3)
        trainer.state_dict()
        return tmp_path / "before", list(recorder.operations)


def finish(store: Path, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """What a run that resumes finds before its first step."""
    with make_trainer(store, versions=1, **options) as trainer:
        assert trainer.steps == read_state_of(trainer)
    return read_state(store)


def read_state_of(trainer: ph.Trainer) -> int:
    return int(trainer._store.read_manifest()["facts"]["step"])  # type: ignore[index]


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
def test_a_crash_between_any_two_operations(
    tmp_path: Path, knot: list[dict[str, Tensor]], clipped: list[dict[str, Tensor]], deferred: bool
) -> None:
    options = {**KNOT, "clip_norm": 0.5} if deferred else KNOT
    expected = clipped if deferred else knot
    before, operations = record_step(tmp_path, **options)
    found = []
    for count in range(len(operations) + 1):
        replay(before, tmp_path / "crashed", operations[:count], tmp_path / "s")
        interrupted = is_interrupted(tmp_path / "crashed")
        step, values = finish(tmp_path / "crashed", **options)
        assert step == (3 if interrupted or count == len(operations) else 2), count
        assert_equal(values, expected[step], f"after {count} operations")
        found.append((step, interrupted))
    assert found == sorted(found, key=lambda f: f[0]), "once something is updated there is no way back"
    assert sum(interrupted for _, interrupted in found) > 10
    assert found[-1] == (3, False)


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
def test_power_loss_with_writes_dropped_and_reordered(
    tmp_path: Path, knot: list[dict[str, Tensor]], clipped: list[dict[str, Tensor]], deferred: bool
) -> None:
    options = {**KNOT, "clip_norm": 0.5} if deferred else KNOT
    expected = clipped if deferred else knot
    before, operations = record_step(tmp_path, durability="power", **options)
    random, seen = Random(0), set()
    for count in range(0, len(operations) + 1, 3):
        replay(before, tmp_path / "crashed", survive(operations[:count], random), tmp_path / "s")
        step, values = finish(tmp_path / "crashed", durability="power", **options)
        assert_equal(values, expected[step], f"after {count} operations")
        seen.add(step)
    assert seen == {2, 3}


# -- failures in the process


class Full(FileSystem):
    """From some write on to files whose name has `where` in it, there is no space left."""

    def __init__(self, where: str, writes: int):
        self.where, self.left, self.armed = where, writes, False
        self.paths: dict[int, str] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = path.name
        return descriptor

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.armed and self.where in self.paths[descriptor]:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, view, offset)


def interrupt(store: Path, where: str = "step.journal", writes: int = 3, **options: Any) -> StoreError:
    """A store whose third step was interrupted: by default after three updates."""
    system = Full(where, writes)
    trainer = make_trainer(ph.DiskStore(store, versions=1, filesystem=system), **options)
    train(trainer, 2)
    trainer.state_dict()
    system.armed = True
    with pytest.raises(StoreError, match="No space left") as failure:
        end_step(trainer, 3)
    for _ in range(500):  # what is stashed may still be on its way to the disk
        if trainer._pool._in_use:
            time.sleep(0.01)
    assert trainer._pool._in_use == 0, "no buffer is on loan after a failure"
    if is_journaled(trainer):
        with pytest.raises(ph.PackhorseError, match="could not be undone"):
            trainer.step(next(iter(trainer.data)))
    trainer.close()
    return failure.value


def end_step(trainer: ph.Trainer, step: int) -> None:
    train(trainer, step)
    trainer.state_dict()


def is_journaled(trainer: ph.Trainer) -> bool:
    return bool(trainer._store.journal.records)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("where", "writes"), [("step.journal", 3), ("momentum", 4), ("manifest", 0), ("small", 0)])
@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
def test_a_full_disk_in_the_middle(
    tmp_path: Path,
    knot: list[dict[str, Tensor]],
    clipped: list[dict[str, Tensor]],
    where: str,
    writes: int,
    deferred: bool,
) -> None:
    """The error says that there is no way back; a run that resumes when there is space again finishes the step."""
    options = {**KNOT, "clip_norm": 0.5} if deferred else KNOT
    failure = interrupt(tmp_path / "s", where, writes, **options)
    assert any("one version" in note and "resume=True finishes" in note for note in failure.__notes__)
    assert describe_store(tmp_path / "s")["interrupted"]["step"] == 3
    with make_trainer(tmp_path / "s", **options) as trainer:
        assert trainer.steps == 3 and trainer.plan.rolls
        train(trainer)
    assert_equal(read_state(tmp_path / "s")[1], (clipped if deferred else knot)[STEPS], where)


def test_an_interrupt_in_the_middle(
    tmp_path: Path, knot: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way ends; the rest is done by the run that resumes."""
    with make_trainer(tmp_path, versions=1, **KNOT) as trainer:
        train(trainer, 2)
        backwards = itertools.count()
        backward = trainer._executor.handlers["B"]

        def stop(*arguments: Any) -> None:
            if next(backwards) == 6:
                raise KeyboardInterrupt
            backward(*arguments)

        monkeypatch.setitem(trainer._executor.handlers, "B", stop)
        with pytest.raises(KeyboardInterrupt) as failure:
            train(trainer, 3)
        assert any("resume=True finishes the step" in note for note in failure.value.__notes__)
    assert is_interrupted(tmp_path)
    with make_trainer(tmp_path, **KNOT) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], knot[STEPS], "interrupted")


def test_a_failure_before_the_first_update_is_undone(tmp_path: Path, knot: list[dict[str, Tensor]]) -> None:
    system = Full("step", 0)
    with make_trainer(ph.DiskStore(tmp_path, versions=1, filesystem=system), **KNOT) as trainer:
        train(trainer, 2)
        batch = next(iter(trainer.data))
        trainer.state_dict()
        system.armed = True
        with pytest.raises(StoreError, match=r"step.bin.*No space left") as failure:
            trainer.step(batch)
        assert any("as it was after step 2" in note for note in failure.value.__notes__)
        system.armed = False
        trainer.step(batch)
        train(trainer)
    assert_equal(read_state(tmp_path)[1], knot[STEPS], "repeated")


class Explodes(nn.Module):
    """Its gradient is not finite below the square root of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * 0).abs().sqrt())


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deferred, nothing is updated. Eager, there is no way back, and resuming says why it cannot go on."""
    cut = packhorse.search.partition
    monkeypatch.setattr(packhorse.search, "partition", lambda graph, *_: cut(graph, "finest"))
    monkeypatch.setattr(packhorse.tasks, "capture", ph.capture)
    batch = next(iter(crash.Positions()))

    def make() -> ph.Trainer:
        torch.manual_seed(0)
        model = Explodes()
        return ph.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            batch,
            loss=crash.classify,
            store=ph.DiskStore(tmp_path, versions=1),
            update="deferred" if deferred else "eager",
            resume=True,
        )

    trainer = make()
    with pytest.raises(ph.NumericsError, match=r"gradient of first\.\w+ .*not finite") as failure:
        trainer.step(batch)
    trainer.close()
    assert is_interrupted(tmp_path) is not deferred
    if deferred:
        assert any("as it was after step 0" in note for note in failure.value.__notes__)
        make().close()
    else:
        with pytest.raises(ph.NumericsError, match=r"gradient of first\.\w+ .*not finite"):
            make()


# -- damage


def test_flipped_bytes_are_found_or_change_nothing(tmp_path: Path, knot: list[dict[str, Tensor]]) -> None:
    """In the journal, what it says of the batch, boundary gradients, parked gradients. A damaged last record counts as torn:

    what it told of is done again, unless it is gone, which its checksum tells.
    """
    interrupt(tmp_path / "s", **KNOT)
    opened = ph.DiskStore(tmp_path / "s")
    journal = opened.find_unfinished()
    assert journal is not None
    last = journal.records[-1]
    opened.close()
    assert last["parked"] and len(last["gradients"]) >= 4, "a weight used thrice, and skips"
    stashed = [(tmp_path / "s/stash.bin", offset, used) for _, offset, _, used, _, _ in last["gradients"]]
    size = os.path.getsize
    everywhere = [(tmp_path / "s" / name, 0, size(tmp_path / "s" / name)) for name in ("step.journal", "step.bin")]
    random, found, places = Random(1), {"refused": 0, "finished": 0}, [*everywhere * 20, *stashed]
    for path, start, nbytes in places:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "s", copy)
        at = start + random.randrange(nbytes)
        flip(copy / path.name, at, 1 << random.randrange(8))
        if path.name != "step.journal":
            with pytest.raises(StoreError, match=rf"{path.name}.* is damaged"):
                finish(copy, **KNOT)
            found["refused"] += 1
            continue
        try:
            step, values = finish(copy, **KNOT)
        except StoreError as error:
            found["refused"] += " is damaged" in str(error)
        else:
            assert_equal(values, knot[step], f"byte {at} of {path}")
            found["finished"] += 1
    assert sum(found.values()) == len(places) and found["refused"] > 10


def flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_a_damaged_gradient_that_waits_is_found(tmp_path: Path) -> None:
    for i, options in enumerate((KNOT, {**KNOT, "clip_norm": 0.5})):
        store = tmp_path / str(i)
        interrupt(store, **options)
        gradients = next(store.glob("blocks-*/gradient.bin"))
        for at in range(0, gradients.stat().st_size, 1024):  # wherever it waits
            flip(gradients, at, 1)
        with pytest.raises(StoreError, match=r"gradient, part 1 of 1.* of .*gradient.bin is damaged"):
            finish(store, **options)


def test_a_block_that_was_updated_is_checked(tmp_path: Path) -> None:
    interrupt(tmp_path / "s", **KNOT)
    assert check_store(tmp_path / "s")[1] == []
    opened = ph.DiskStore(tmp_path / "s")
    opened.open_as_it_is(Pool(Ledger()))
    name = next(iter(opened.journal.records[0]["blocks"]))
    block, places = opened.files.blocks[name], opened.files.places
    (offset, _), *_ = places.ranges(block, MASTER, places.runs(block, MASTER, write=False), 0, block.numel)
    path = opened.files.path / "master.bin"
    opened.close()
    flip(path, offset + 5, 2)
    _, problems, _ = check_store(tmp_path / "s")
    assert len(problems) == 1 and f"block {name} (master" in problems[0]


# -- going on


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "resident", "versions": 2},
        {"versions": 2},
        {"update": "deferred"},
        {"overlap": False},
        {"memory": "4GiB"},
    ],
    ids=str,
)
def test_an_interrupted_step_is_finished_as_it_was_begun(
    tmp_path: Path, knot: list[dict[str, Tensor]], options: dict[str, Any]
) -> None:
    """Whatever the run that resumes is like."""
    interrupt(tmp_path / "s", **KNOT)
    with make_trainer(tmp_path / "s", **{**KNOT, **options}) as trainer:
        assert trainer.steps == 3
        train(trainer)
    step, values = read_state(tmp_path / "s")
    assert step == STEPS and describe_store(tmp_path / "s")["rolls_forward"] is (options.get("versions") != 2)
    assert_equal(values, knot[STEPS], str(options))


def test_an_interrupted_step_is_finished_before_all_else(tmp_path: Path) -> None:
    store = tmp_path / "s"
    interrupt(store, **KNOT)
    with pytest.raises(StoreError, match="holds step 2 and parts of step 3, which was interrupted; resume the run"):
        export_store(store, tmp_path / "out")
    with pytest.raises(StoreError, match="holds a run at step 2; pass resume=True"):
        make_trainer(store, **KNOT, resume=False)
    with pytest.raises(StoreError, match="resume once with the options of that run"):
        make_trainer(store, **KNOT, durability="none")
    reclaim(store)
    assert finish(store, **KNOT)[0] == 3
    reclaim(store)
    assert not (store / "step.bin").exists() and finish(store, **KNOT)[0] == 3


def test_a_store_may_change_between_one_version_and_two(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    for step, versions in enumerate((1, 2, 1, 2), start=1):
        with make_trainer(tmp_path, versions=versions) as trainer:
            train(trainer, step)
        assert describe_store(tmp_path)["versions"] == versions
    with make_trainer(tmp_path) as trainer:  # not asked, it stays as it is
        train(trainer)
        assert not trainer.plan.rolls
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "changed")


# -- space, and how it is chosen


def test_space_on_disk(tmp_path: Path) -> None:
    """Twins share one spare: n + 1 of them instead of 2 n."""
    with make_trainer(tmp_path / "two") as trainer:
        train(trainer, 2)
        blocks = trainer._layout.blocks
    with make_trainer(tmp_path / "one", versions=1) as trainer:
        train(trainer, 3)
        planned = trainer._case.disk_bytes
        assert trainer.plan.estimate.peak["disk"] > planned and "one version and a spare" in str(trainer.plan)
    once = sum(block.all_nbytes for block in blocks)
    together = [
        sum(b.all_nbytes for b in blocks if b.users[:1] == (s,)) for s in range(len(trainer._partition.segments))
    ]
    assert planned == once + max(together)
    for store, nbytes in (("one", once + max(together)), ("two", 2 * once)):
        files = list((tmp_path / store / "blocks-0").glob("*.bin"))
        assert sum(f.stat().st_size for f in files) == nbytes
        assert sum(f.stat().st_blocks * 512 for f in files) == nbytes


def test_the_disk_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[dict[str, Tensor]]) -> None:
    usage = shutil.disk_usage(tmp_path)
    with make_trainer(tmp_path / "two") as trainer:
        two, one = trainer._case.disk_bytes, trainer._case.rolling().disk_bytes
        assert not trainer.plan.rolls and trainer._store.versions == 2
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(one + two) // 2))
        with make_trainer(tmp_path / "one") as trainer:
            assert trainer.plan.rolls and trainer._store.rolls
            assert f"two versions would take {format_bytes(two)}" in str(trainer.plan)
            train(trainer, 2)
        with pytest.raises(StoreError, match=r"the store needs .* are free there"):
            make_trainer(tmp_path / "asked", versions=2)
    with make_trainer(tmp_path / "one") as trainer:  # there is room now, but it stays as it is
        assert trainer.plan.rolls
        train(trainer)
    assert_equal(read_state(tmp_path / "one")[1], expected[STEPS], "chosen")
    with make_trainer(tmp_path / "limited", memory=ph.Memory(disk=two)) as trainer:  # the stash takes some, too
        assert trainer.plan.rolls
    with pytest.raises(ph.BudgetError, match="disk space"):
        make_trainer(tmp_path / "refused", memory=ph.Memory(disk=one // 2))


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="versions is 3, expected 1 or 2"):
        ph.DiskStore(tmp_path, versions=3)
    with pytest.raises(StoreError, match="versions is 2, but with durability='none'"):
        ph.DiskStore(tmp_path, versions=2, durability="none")
    with pytest.raises(ph.PackhorseError, match="use strategy='relay', or update='deferred'"):
        make_trainer(tmp_path / "s", versions=1, strategy="resident")
    with make_trainer(tmp_path / "t", versions=1, strategy="resident", update="deferred") as trainer:
        train(trainer, 2)


# -- places


def make_blocks(sizes: list[int]) -> list[Block]:
    kinds = {MASTER: torch.float32, "exp_avg": torch.float32}
    return [make_block(str(i), [("w", torch.empty(n))], kinds, users=(i,)) for i, n in enumerate(sizes)]


@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=40))
def test_places_never_overlap(sizes: list[int], updates: list[int]) -> None:
    """Whatever is updated in which order: there is always room, and it is nobody's."""
    blocks = make_blocks(sizes)
    places = Spares(blocks)
    for block in blocks:
        places.publish(block)
    for number in updates:
        block = blocks[number % len(blocks)]
        written = places.runs(block, MASTER, write=True)
        current = [places.runs(b, MASTER, write=False) for b in blocks]
        used = [page for runs in (written, *current) for first, count in runs for page in range(first, first + count)]
        assert len(used) == len(set(used)) and max(used) < places.sizes[MASTER] // 4096 // 4
        covered = [places.ranges(block, MASTER, written, a, b) for a, b in block.units]
        assert sum(n for ranges in covered for _, n in ranges) == block.nbytes(MASTER)
        places.publish(block)
        described = places.describe()
        places.restore(described)
        assert places.describe() == described


def test_blocks_lie_in_few_runs() -> None:
    blocks = make_blocks([4096, 90_000, 90_000, 90_000, 20_000])
    places = Spares(blocks)
    for block in itertools.chain(blocks, *(reversed(blocks) for _ in range(50))):
        places.publish(block)
    assert max(len(places.runs(block, MASTER, write=False)) for block in blocks) <= 5

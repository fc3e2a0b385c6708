"""Disks that fail and files that are damaged: always an error with a name, never a wrong number."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import packhorse as ph
import packhorse.trainer
from crash import STEPS, Positions, assert_equal, make_trainer, read_state, train
from packhorse.archive import check_store
from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool
from packhorse.store import Stash
from packhorse.store.files import FileSystem

pytestmark = pytest.mark.usefixtures("captured_once")


# -- faults


class Faulty(FileSystem):
    """Fails, or does only a part, at the given reads or writes of files whose name has `where` in it."""

    def __init__(self, fault: str, where: str, at: int):
        self.fault, self.where, self.left, self.armed = fault, where, at, False
        self.paths: dict[int, str] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = str(path)
        return descriptor

    def _due(self, descriptor: int) -> bool:
        if not self.armed or self.where not in self.paths[descriptor]:
            return False
        self.left -= 1
        return self.left == 0 or (self.left < 0 and self.fault.startswith("short"))

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.fault.endswith("read") and self._due(descriptor):
            if self.fault == "failing read":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view = view[: max(len(view) // 8192 * 4096, 4096)]
        return super().read(descriptor, view, offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.fault in ("disk full", "failing write", "short write") and self._due(descriptor):
            if self.fault != "short write":
                code = errno.ENOSPC if self.fault == "disk full" else errno.EIO
                raise OSError(code, os.strerror(code))
            view = view[: max(len(view) // 8192 * 4096, min(4096, len(view)))]
        return super().write(descriptor, view, offset)


def end_two_steps(trainer: ph.Trainer, batch: Any) -> None:
    """A deferred step may fail when the next one looks at it."""
    for _ in range(2):
        end_step(trainer, batch)


def end_step(trainer: ph.Trainer, batch: Any) -> None:
    trainer.step(batch)
    trainer.state_dict()


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize(
    ("fault", "where", "text"),
    [
        ("disk full", "exp_avg.bin", "No space left on device"),
        ("failing write", "master.bin", "Input/output error"),
        ("failing read", "master.bin", "Input/output error"),
        ("disk full", "manifest", "No space left on device"),
        ("failing write", "small", "Input/output error"),
    ],
)
def test_a_fault_loses_nothing(
    tmp_path: Path, expected: list[dict[str, Tensor]], fault: str, where: str, text: str, at: int, deferred: bool
) -> None:
    """The error names the file; the last step is there, in this process and for the next one."""
    options = {"update": "deferred"} if deferred else {}
    system = Faulty(fault, where, 1 if where in ("manifest", "small") else at)
    trainer = make_trainer(ph.DiskStore(tmp_path / "s", filesystem=system), **options)
    batches = iter(trainer.data)
    trainer.step(next(batches))
    trainer.step(next(batches))
    trainer.state_dict()  # ends what is under way
    system.armed = True
    batch = next(batches)
    with pytest.raises(StoreError, match=where) as failure:
        end_two_steps(trainer, batch)
    assert text in str(failure.value)
    system.armed = False
    shutil.copytree(tmp_path / "s", tmp_path / "copy")  # as another process would find it
    committed, values = read_state(tmp_path / "copy")
    assert_equal(values, expected[committed], "after the fault")
    with make_trainer(tmp_path / "copy", **options) as resumed:
        train(resumed)
    assert_equal(read_state(tmp_path / "copy")[1], expected[STEPS], "resumed")
    trainer.close()


@pytest.mark.parametrize(
    ("fault", "where"), [("failing read", "exp_avg"), ("failing read", "master"), ("disk full", "exp_avg")]
)
def test_a_failed_step_gives_back_what_it_held(tmp_path: Path, fault: str, where: str) -> None:
    system = Faulty(fault, where, 2)
    with make_trainer(ph.DiskStore(tmp_path, filesystem=system)) as trainer:
        batches = iter(trainer.data)
        for armed in (False, False, True, False):
            system.armed = armed
            batch = next(batches)
            if armed:
                with pytest.raises(StoreError):
                    end_step(trainer, batch)
            else:
                end_step(trainer, batch)
            assert trainer._pool._in_use == 0, "no buffer is on loan between two steps"


def test_a_run_that_goes_on_elsewhere_is_named_before_its_files_are_read(tmp_path: Path) -> None:
    """The manifest of a run under way may be in the middle of being replaced."""
    with make_trainer(tmp_path) as trainer:
        train(trainer, 1)
        (tmp_path / "manifest.json").write_text("half")
        with pytest.raises(StoreError, match="in use"):
            make_trainer(tmp_path)


@pytest.mark.parametrize("fault", ["short read", "short write"])
def test_short_operations_are_completed(tmp_path: Path, expected: list[dict[str, Tensor]], fault: str) -> None:
    system = Faulty(fault, ".bin", 1)
    system.armed = True
    with make_trainer(ph.DiskStore(tmp_path, filesystem=system)) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], fault)


@pytest.mark.parametrize(("where", "at"), [("exp_avg", 3), ("manifest", 1), ("small", 1)])
@pytest.mark.parametrize("options", [{}, {"update": "deferred"}], ids=["eager", "deferred"])
def test_a_failed_step_can_be_repeated(
    tmp_path: Path, expected: list[dict[str, Tensor]], where: str, at: int, options: dict[str, Any]
) -> None:
    """In the same process: the batch whose step failed is given again. What failed in the background shows in the next verb."""
    system = Faulty("disk full", where, at)
    trainer = make_trainer(ph.DiskStore(tmp_path, filesystem=system), **options)
    batches = list(zip(range(STEPS), Positions(), strict=False))
    for i, batch in batches:
        trainer.state_dict()
        system.armed = i == 3
        if i == 3:
            with pytest.raises(StoreError, match="No space left") as failure:
                end_step(trainer, batch)
            assert trainer.steps == 3
            assert any("as it was after step 3" in note for note in failure.value.__notes__)
            system.armed = False
        trainer.step(batch)
    trainer.close()
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "repeated")


@pytest.mark.parametrize("options", [{}, {"update": "deferred"}], ids=["eager", "deferred"])
def test_an_interrupted_step_can_be_repeated(
    tmp_path: Path, expected: list[dict[str, Tensor]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that are under way end before anything is rolled back."""
    with make_trainer(ph.DiskStore(tmp_path, bytes_per_second=2e6), **options) as trainer:
        train(trainer, 2)
        batches = iter(trainer.data)
        batch = next(batches)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setitem(trainer._executor.handlers, "COMMIT", interrupt)  # at the end of a step
            with pytest.raises(KeyboardInterrupt):
                trainer.step(batch)
        assert trainer.steps == 2
        trainer.step(batch)
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "interrupted")


def test_an_interrupt_while_waiting_for_a_commit_does_not_forget_it(
    tmp_path: Path, expected: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolling back beside a commit would leave the versions of one step with the numbers of another."""
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
        batches = iter(trainer.data)
        batch = next(batches)
        trainer.state_dict()  # waits for the commits so far
        commit, go_on = trainer._store.commit, threading.Event()

        def slow(*arguments: Any) -> None:
            assert go_on.wait(20)
            commit(*arguments)

        monkeypatch.setattr(trainer._store, "commit", slow)
        trainer.step(batch)  # its commit waits
        pending = trainer._executor.pending["commit"]

        def interrupt() -> None:
            go_on.set()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pending, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.step(next(batches))
        assert trainer.steps == 3
    assert_equal(read_state(tmp_path)[1], expected[3], "interrupted")


def test_a_place_in_the_stash_is_not_written_while_it_is_read(tmp_path: Path) -> None:
    store = ph.DiskStore(tmp_path)
    store.claim()
    stash = Stash(Ledger(), store, 0)
    started, go_on = threading.Event(), threading.Event()
    first, second = torch.ones(4096), torch.zeros(4096)
    stash.put("first", first)
    while stash._kept["first"].buffer is not None:  # until it is written
        time.sleep(0.001)
    read = store.system.read

    def slow_read(*arguments: Any) -> int:
        started.set()
        go_on.wait()
        return read(*arguments)

    store.system.read = slow_read  # type: ignore[method-assign]
    found = stash.get("first")
    stash.drop("first")
    started.wait()
    stash.put("second", second)
    while stash._kept["second"].buffer is not None:
        time.sleep(0.001)
    go_on.set()
    assert torch.equal(found.result(), first)
    stash.clear()
    store.close()
    stash.close()


# -- damage


def committed_places(store: Path) -> list[tuple[Path, int, int]]:
    """Files and ranges of bytes that the last commit consists of."""
    opened = ph.DiskStore(store)
    manifest = opened.open_as_it_is(Pool(Ledger()))
    places = [(store / "manifest.json", 0), (opened.files.path / "header.json", 0)]
    places.append((store / f"small-{manifest['small']['number']}.safetensors", 0))
    found = [(path, start, path.stat().st_size) for path, start in places]
    for block in opened.files.blocks.values():
        for kind in block.kinds:
            runs = opened.files.places.runs(block, kind, write=False)
            ranges = opened.files.places.ranges(block, kind, runs, 0, block.numel)
            found += [(opened.files.path / f"{kind}.bin", offset, nbytes) for offset, nbytes in ranges]
    opened.close()
    return found


def test_every_flipped_byte_is_found(trained: Path) -> None:
    random = Random(0)
    places = committed_places(trained)
    for _ in range(1000):
        path, start, size = random.choice(places)
        at, mask = start + random.randrange(size), 1 << random.randrange(8)
        flip(path, at, mask)
        try:
            _, problems, _ = check_store(trained)
        except StoreError as error:
            problems = [str(error)]
        assert problems and path.name in problems[0], f"byte {at} of {path.name} is damaged, and nobody says so"
        flip(path, at, mask)
    assert check_store(trained)[1] == []


def flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_a_damaged_block_stops_training(trained: Path, tmp_path: Path) -> None:
    """Never a wrong number: the run ends with the name of the block."""
    for i, (path, start, size) in enumerate(committed_places(trained)):
        copy = tmp_path / str(i)
        shutil.copytree(trained, copy)
        flip(copy / path.relative_to(trained), start + size // 3, 4)
        with pytest.raises(StoreError, match=f"{path.name}.* (is damaged|cannot be read)|block .*damaged"):
            resume_and_train(copy)


def resume_and_train(store: Path) -> None:
    with make_trainer(store) as trainer:
        train(trainer)


@pytest.mark.parametrize(
    "name", ["manifest.json", "small", "blocks-0/header.json", "blocks-0/master.bin", "blocks-0/exp_avg.bin"]
)
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_missing_and_truncated_files(trained: Path, tmp_path: Path, name: str, how: str) -> None:
    copy = tmp_path / "s"
    shutil.copytree(trained, copy)
    if name == "small":
        name = next(path.name for path, _, _ in committed_places(copy) if path.name.startswith("small"))
    path = copy / name
    path.unlink() if how == "missing" else os.truncate(path, path.stat().st_size // 2)
    if name == "manifest.json" and how == "missing":
        return  # a directory without manifest is an empty store
    with pytest.raises(StoreError, match=path.name):
        make_trainer(copy)

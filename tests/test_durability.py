"""Runs that die at any point: killed, or cut between any two operations on files. None may lose a committed step."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

import packhorse as ph
import packhorse.trainer
from crash import assert_equal, make_trainer, read_state, train
from packhorse.store.files import FileSystem

pytestmark = pytest.mark.usefixtures("captured_once")


# -- kills


def run_kills(tmp_path: Path, kills: int, **options: Any) -> dict[str, int]:
    """In a process of its own, whose threads do not stand in the way of a fork."""
    program = (
        "import json, sys; from pathlib import Path; import crash; crash.capture_once();"
        "print(json.dumps(crash.kill_many(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(kills), json.dumps(options)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("options", [{}, {"durability": "power", "clip_norm": 0.5}], ids=["process", "power, deferred"])
def test_killed_at_any_point(tmp_path: Path, options: dict[str, Any]) -> None:
    counts = run_kills(tmp_path, 16, **options)
    assert counts["killed by time"] + counts["killed in an operation"] >= 16


# -- crashes between operations


class Recorder(FileSystem):
    """Notes every operation that changes something, with what it wrote."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.paths: dict[int, Path] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        count = super().write(descriptor, view, offset)
        self.operations.append(("write", self.paths[descriptor], bytes(view[:count]), offset))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(("sync", self.paths[descriptor]))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.operations.append(("replace", source, target))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.operations.append(("sync directory", path))


def record_step(tmp_path: Path, durability: Any) -> tuple[Path, list[tuple[Any, ...]]]:
    """A store after two steps, and the operations of the third."""
    recorder = Recorder()
    trainer = make_trainer(ph.DiskStore(tmp_path / "s", durability=durability, filesystem=recorder))
    train(trainer, 2)
    trainer.state_dict()  # ends what is under way
    shutil.copytree(tmp_path / "s", tmp_path / "before")
    recorder.operations.clear()
    train(trainer, 3)
    trainer.state_dict()
    operations = list(recorder.operations)
    trainer.close()
    return tmp_path / "before", operations


def replay(before: Path, target: Path, operations: list[tuple[Any, ...]], origin: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(before, target)
    for kind, path, *rest in operations:
        moved = target / path.relative_to(origin)
        if kind == "write":
            content, offset = rest
            with open(moved, "r+b" if moved.exists() else "w+b") as file:
                if not moved.name.endswith(".bin") and offset == 0:
                    file.truncate(0)
                file.seek(offset)
                file.write(content)
        elif kind == "replace" and moved.exists():
            os.replace(moved, target / rest[0].relative_to(origin))


def assert_old_or_new(store: Path, expected: list[dict[str, Tensor]], where: str) -> int:
    step, values = read_state(store)
    assert step in (2, 3), where
    assert_equal(values, expected[step], where)
    return step


def test_a_crash_between_any_two_operations(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    before, operations = record_step(tmp_path, "process")
    found = []
    for count in range(len(operations) + 1):
        replay(before, tmp_path / "crashed", operations[:count], tmp_path / "s")
        found.append(assert_old_or_new(tmp_path / "crashed", expected, f"after {count} operations"))
    assert found == sorted(found) and found[0] == 2 and found[-1] == 3
    assert found.count(3) == 1, "only the last operation commits"


def test_power_loss_with_writes_dropped_and_reordered(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    """What was not synced when the power went may have reached the disk or not, in any order, and torn."""
    before, operations = record_step(tmp_path, "power")
    random, seen = Random(0), Counter[int]()
    for count in range(len(operations) + 1):
        for _ in range(4):
            survivors = survive(operations[:count], random)
            replay(before, tmp_path / "crashed", survivors, tmp_path / "s")
            seen[assert_old_or_new(tmp_path / "crashed", expected, f"after {count} operations")] += 1
    assert seen[2] and seen[3]


def survive(operations: list[tuple[Any, ...]], random: Random) -> list[tuple[Any, ...]]:
    """Those that were synced, in order; of the others some, in any order, writes perhaps in part."""
    synced: set[int] = set()
    for i, (kind, path, *_) in enumerate(operations):
        if kind == "sync":
            synced |= {j for j in range(i) if operations[j][:2] == ("write", path)}
        elif kind == "sync directory":
            synced |= {j for j in range(i) if operations[j][0] == "replace"}
    kept = [operations[i] for i in sorted(synced)]
    loose = [
        operations[i] for i in range(len(operations)) if i not in synced and operations[i][0] in ("write", "replace")
    ]
    random.shuffle(loose)
    for operation in loose:
        if random.random() < 0.5:
            if operation[0] == "write" and random.random() < 0.5:
                operation = (*operation[:2], operation[2][: len(operation[2]) // 2], operation[3])
            kept.append(operation)
    return kept

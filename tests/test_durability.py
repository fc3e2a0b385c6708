"""Runs that die at any point: killed, or cut between any two operations on files. None may lose a committed step."""

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

import packhorse as ph
from crash import Recorder, assert_equal, make_trainer, read_state, replay, run_kills, survive, train

pytestmark = pytest.mark.usefixtures("captured_once")


# -- kills


@pytest.mark.parametrize("options", [{}, {"durability": "power", "clip_norm": 0.5}], ids=["process", "power, deferred"])
def test_killed_at_any_point(tmp_path: Path, options: dict[str, Any]) -> None:
    counts = run_kills(tmp_path, 16, **options)
    assert counts["killed by time"] + counts["killed in an operation"] >= 16


# -- crashes between operations


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

"""A rank dies: all end, and go on together from the last step that all of them have."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import packhorse as ph
import toys
from launch import find_port, run_ranks
from packhorse.archive import check_store, describe_store, export_store, reclaim
from packhorse.ranks.world import find_world

STEPS = 4
pytestmark = pytest.mark.usefixtures("graphs_are_shared")


def train(
    store: Path | ph.DiskStore,
    ranks: ph.Ranks | None,
    strategy: str,
    die_at: float | None = None,
    steps: int = STEPS,
    resume: bool = True,
) -> dict[str, Any]:
    """Goes on to the last step, or dies: `die_at` 1.5 is before the action in the middle of the second step."""
    torch.manual_seed(0)
    model, make_batch, loss = toys.zoo("gpt")
    torch.manual_seed(1)
    batches = [make_batch(8) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    with ph.Trainer(
        model,
        optimizer,
        batches[0],
        loss=loss,
        strategy=strategy,  # type: ignore[arg-type]  # it checks
        microbatches=4,
        store=store,
        resume=resume,
        ranks=ranks,
    ) as trainer:
        if die_at is not None:
            _die_at(trainer, die_at)
        while trainer.steps < steps:
            trainer.step(batches[trainer.steps])
        return dict(trainer.state_dict())


def _die_at(trainer: ph.Trainer, moment: float) -> None:
    handlers = trainer._executor.handlers

    def watched(handler: Any) -> Any:
        def run(task: Any, action: Any) -> None:
            if task.step + len(task.times) / 2 / len(task.program.actions) >= moment:
                os.kill(os.getpid(), signal.SIGKILL)
            handler(task, action)

        return run

    trainer._executor.handlers = {kind: watched(handler) for kind, handler in handlers.items()}


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(ph.Ranks(data=2), "relay"), (ph.Ranks(pipeline=2), "pipeline")],
    ids=["relay", "pipeline"],
)
def test_a_rank_that_is_killed_ends_all_and_all_go_on(ranks: ph.Ranks, strategy: str, tmp_path: Path) -> None:
    expected = run_ranks(2, lambda rank: train(tmp_path / "whole", ranks, strategy))
    chance = random.Random(0)
    for i in range(2):
        store, victim, moment = tmp_path / str(i), chance.randrange(2), chance.uniform(0, STEPS)
        found = run_ranks(
            2,
            lambda rank, store=store, victim=victim, moment=moment: train(
                store, ranks, strategy, moment if rank == victim else None
            ),
            expect_failure=True,
        )
        assert found[victim] == "ended without a word"
        assert "another rank has ended or is stuck" in found[1 - victim] or isinstance(found[1 - victim], dict)
        for values in run_ranks(2, lambda rank, store=store: train(store, ranks, strategy)):
            for name, value in expected[0].items():
                assert torch.equal(values[name], value), f"{name} after a kill of {victim} at {moment}"


@pytest.mark.parametrize("how", ["killed", "fails"])
def test_all_ranks_end_soon_after_one(how: str, tmp_path: Path) -> None:
    """Not only after the patience of those who wait, and as programs end: nobody ends them from outside."""
    script = tmp_path / "train.py"
    end = "os.kill(os.getpid(), signal.SIGKILL)" if how == "killed" else "raise MemoryError('none left')"
    script.write_text(
        f"""
import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import packhorse as ph, test_rank_faults as t
if os.environ["RANK"] == "3":
    forward = ph.execute.Executor._backward
    def die(self, task, action):
        if task.step == 1 and action.microbatch:
            {end}
        forward(self, task, action)
    ph.execute.Executor._backward = die
t.train(t.Path({str(tmp_path / "store")!r}), ph.Ranks(data=2, pipeline=2), "pipeline")
"""
    )
    environment = os.environ | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    environment.pop("PACKHORSE_PATIENCE", None)
    children = [
        subprocess.Popen([sys.executable, str(script)], env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(4)
    ]
    ended = [children[3].wait(120)]
    started = time.monotonic()
    said = [child.communicate(timeout=60)[1].decode() for child in children[:3]]
    assert time.monotonic() - started < 30
    assert ended[0] and all(child.returncode for child in children)
    assert all("another rank has ended or is stuck" in text for text in said)


def test_what_cannot_even_begin_is_told_alike() -> None:
    """Once a connection is known to be broken, gloo refuses the next message at once instead of letting it be waited for."""

    def work(rank: int) -> None:
        world = find_world()
        assert world is not None
        world.arrange(ph.Ranks(pipeline=2))
        world.gather_objects(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until it is known
            world.send(torch.zeros(1), 1, 0, backward=False)
            time.sleep(0.01)

    told, _ = run_ranks(2, work, expect_failure=True)
    assert told.startswith("RanksError: rank 0: a message to stage 1 did not happen: another rank has ended"), told


@pytest.mark.parametrize(
    "runs",
    [
        [(ph.Ranks(data=4), "relay"), (ph.Ranks(data=2), "relay"), (None, "relay")],
        [(None, "relay"), (ph.Ranks(pipeline=2), "pipeline"), (ph.Ranks(data=2), "resident")],
    ],
    ids=["4 parts, 2, 1", "1, a pipeline, replicas"],
)
def test_other_ranks_go_on(runs: list[tuple[ph.Ranks | None, str]], tmp_path: Path) -> None:
    """Each takes another step of the same run."""
    expected = train(tmp_path / "whole", None, "relay", steps=len(runs))
    for step, (ranks, strategy) in enumerate(runs, 1):

        def work(rank: int, ranks: Any = ranks, strategy: str = strategy, step: int = step) -> Any:
            return train(tmp_path / "store", ranks, strategy, steps=step)

        found = work(0) if ranks is None else run_ranks(ranks.size, work)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    left = {path.name for path in (tmp_path / "store").iterdir()}
    assert not any("x" in name for name in left) or "manifest.json" not in left


def test_the_run_of_other_ranks_is_not_begun_beside(tmp_path: Path) -> None:
    run_ranks(2, lambda rank: train(tmp_path, ph.Ranks(data=2), "relay", steps=1))
    with pytest.raises(ph.StoreError, match="holds a run of 2 ranks at step 1; pass resume=True"):
        train(tmp_path, None, "relay", resume=False)


def test_the_tools_know_the_stores_of_several_ranks(tmp_path: Path) -> None:
    ranks = ph.Ranks(pipeline=2)
    values, _ = run_ranks(2, lambda rank: train(ph.DiskStore(tmp_path), ranks, "pipeline", steps=2))
    described = describe_store(tmp_path)
    assert (described["step"], described["ranks"], described["closed"]) == (2, 2, True)
    count, problems, compared = check_store(tmp_path)
    assert count >= described["bytes"]["master"] and not problems and compared
    (checkpoint,) = export_store(tmp_path, tmp_path / "out")
    for name, value in load_file(checkpoint).items():
        assert torch.equal(value, values[name]), name
    with pytest.raises(ph.StoreError, match="a run of 2 ranks, whose earlier versions"):
        reclaim(tmp_path)


def test_parts_of_tensors_are_not_exported(tmp_path: Path) -> None:
    """A weight of four pages, of which each rank has less than all."""

    def work(rank: int) -> None:
        torch.manual_seed(0)
        model, batch = torch.nn.Linear(128, 128), (torch.randn(4, 128), torch.randn(4, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        options: Any = {"strategy": "relay", "microbatches": 2, "store": tmp_path}
        with ph.Trainer(model, optimizer, batch, loss=lambda y, b: (y - b[1]).square().mean(), **options) as trainer:
            trainer.step(batch)

    run_ranks(2, work)
    with pytest.raises(ph.StoreError, match=r"no rank has all of weight.*resume the run with one process"):
        export_store(tmp_path, tmp_path / "out")


def test_ranks_need_two_versions(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        return train(ph.DiskStore(tmp_path, versions=1), ph.Ranks(data=2), "relay")

    for error in run_ranks(2, work, expect_failure=True):
        assert "several ranks need two" in error


def test_torchrun_starts_them_again(tmp_path: Path) -> None:
    """The same script, whose second rank is killed once, ends with the numbers of an undisturbed run."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import torch, packhorse as ph, test_rank_faults
torch.set_num_threads(1)
dies = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
values = test_rank_faults.train(Path({str(tmp_path / "store")!r}), None, "relay", 60 if dies else None)
if os.environ["RANK"] == "0":
    torch.save(values, {str(tmp_path / "values.pt")!r})
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = run_ranks(2, lambda rank: train(tmp_path / "whole", ph.Ranks(data=2), "relay"))[0]
    for name, value in torch.load(tmp_path / "values.pt").items():
        assert torch.equal(value, expected[name]), name

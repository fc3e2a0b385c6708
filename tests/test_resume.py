"""Runs that go on: with other choices, after others, from where the data stood."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
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
from crash import STEPS, Positions, assert_equal, make_trainer, read_state, train
from packhorse.archive import describe_store
from packhorse.errors import StoreError
from packhorse.store.encode import decode, encode
from packhorse.store.files import Lock
from reference import assert_same_run, train_plain

pytestmark = pytest.mark.usefixtures("captured_once")


# -- resuming


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "resident"},
        {"memory": "4GiB"},
        {"durability": "power"},
        {"durability": "none"},
        {"overlap": False},
    ],
    ids=str,
)
def test_another_way_of_running_goes_on_with_the_same_numbers(
    tmp_path: Path, expected: list[dict[str, Tensor]], options: dict[str, Any]
) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
    with make_trainer(tmp_path, **options) as trainer:
        train(trainer, 4)
    with make_trainer(tmp_path) as trainer:
        train(trainer)
    step, values = read_state(tmp_path)
    assert step == STEPS
    assert_equal(values, expected[STEPS], str(options))


def test_another_partition_lays_the_store_out_anew(
    tmp_path: Path, expected: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
    cut = packhorse.search.partition
    with monkeypatch.context() as patch:
        patch.setattr(packhorse.search, "partition", lambda graph: cut(graph, 3))
        with make_trainer(tmp_path) as trainer:
            assert len(trainer._layout.blocks) == 2
            train(trainer, 4)
    assert [p.name for p in tmp_path.glob("blocks-*")] == ["blocks-1"]
    with make_trainer(tmp_path) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "laid out twice")


@pytest.mark.parametrize("choices", [{"microbatches": 3}, {"precision": "bf16"}], ids=str)
def test_choices_that_change_numbers_change_no_others(
    tmp_path: Path, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on with other microbatches or another precision is the plain loop that changes in the middle, too."""
    monkeypatch.setattr(packhorse.tasks, "capture", ph.capture)
    model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4))
    batches = [next(iter(at(position))) for position in range(4)]
    before: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        if before:
            optimizer.load_state_dict(before[-1].state_dict())
        before.append(optimizer)
        return optimizer

    plain = copy.deepcopy(model)
    for part, options in ((batches[:2], {"microbatches": 2}), (batches[2:], {"microbatches": 2, **choices})):
        run = train_plain(plain, make_optimizer, part, crash.classify, **options)
        plain.load_state_dict(run.state)
        streamed = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(streamed.parameters(), lr=1e-2)
        with ph.Trainer(
            streamed,
            optimizer,
            batches[0],
            loss=crash.classify,
            store=tmp_path,
            resume=True,
            strategy="relay",
            **options,
        ) as trainer:
            assert_same_run(trainer, [trainer.step(batch) for batch in part], run, str(options))


def at(position: int) -> Positions:
    data = Positions()
    data.position = position
    return data


def test_without_durability_only_a_closed_store_is_resumed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "s", durability="none")
    train(trainer, 2)
    shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    trainer.close()
    with pytest.raises(StoreError, match="durability='none' and was not closed"):
        make_trainer(tmp_path / "crashed", durability="none")
    with make_trainer(tmp_path / "s", durability="none") as trainer:
        assert trainer.steps == 2


def test_a_store_that_was_only_looked_at_stays_resumable(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    """Another durability lays it out anew; nothing is trained before it is closed."""
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
    with make_trainer(tmp_path, durability="none") as trainer:
        trainer.save(tmp_path / "out")
    with make_trainer(tmp_path, durability="none") as trainer:
        train(trainer, 3)
    with make_trainer(tmp_path) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "looked at")


def test_a_failure_that_changed_nothing_costs_nothing(tmp_path: Path) -> None:
    """Without durability a step that failed after it wrote cannot be taken back; one that failed before need not be."""
    with make_trainer(tmp_path, durability="none") as trainer:
        train(trainer, 1)
        inputs, labels = next(iter(trainer.data))
        with pytest.raises(ph.NumericsError):
            trainer.step((inputs * torch.inf, labels))
        train(trainer, 3)
    with make_trainer(tmp_path, durability="none") as trainer:
        assert trainer.steps == 3


def test_parameters_may_be_frozen_and_thawed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen keeps its value and loses its states; thawed, it starts with new ones."""
    monkeypatch.setattr(packhorse.tasks, "capture", ph.capture)
    batches = [next(iter(at(position))) for position in range(3)]

    def resume(frozen: bool) -> ph.Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4))
        model[2].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return ph.Trainer(
            model, optimizer, batches[0], loss=crash.classify, store=tmp_path, resume=True, strategy="relay"
        )

    values = []
    for frozen, batch in zip((False, True, False), batches, strict=True):
        with resume(frozen) as trainer:
            trainer.step(batch)
            values.append(dict(trainer.state_dict()))
    assert torch.equal(values[0]["2.weight"], values[1]["2.weight"])
    assert not torch.equal(values[0]["0.weight"], values[1]["0.weight"])
    assert not torch.equal(values[1]["2.weight"], values[2]["2.weight"])


def test_a_trainer_that_could_not_be_made_leaves_the_store_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 1)
        state = trainer.state_dict()
    with pytest.raises(StoreError, match="closed"):
        state["0.0.weight"]
    with monkeypatch.context() as patch:
        patch.setattr(packhorse.tasks, "capture", ph.capture)
        other = nn.Sequential(nn.Linear(24, 4))
        with pytest.raises(StoreError, match="another model"):
            ph.Trainer(
                other,
                torch.optim.AdamW(other.parameters()),
                next(iter(Positions())),
                loss=crash.classify,
                store=tmp_path,
                resume=True,
            )
    with make_trainer(tmp_path) as trainer:
        assert trainer.steps == 1


def test_a_store_in_use_names_its_holder(tmp_path: Path) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 1)
        with pytest.raises(StoreError, match=rf"in use by process {os.getpid()} on .* since .*; wait until it ends"):
            make_trainer(tmp_path)
        assert f"process {os.getpid()}" in describe_store(tmp_path)["in_use_by"]
    assert describe_store(tmp_path)["in_use_by"] is None
    (tmp_path / "lock").write_text("process 999999 on elsewhere since long ago")  # left by one that was killed
    with make_trainer(tmp_path) as trainer:
        assert trainer.steps == 1


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from pathlib import Path; from packhorse.store.files import Lock;"
        "Lock(Path(sys.argv[1])).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "lock")], timeout=60)
    assert "process" in (tmp_path / "lock").read_text()
    Lock(tmp_path / "lock").take()


def test_a_loader_that_reads_ahead(tmp_path: Path) -> None:
    """Its position is read on entry of step(), so the batch after a resume is the next one."""

    class ReadsAhead(Positions):
        def __iter__(self) -> Any:
            waiting = deque[Any]()
            for batch in super().__iter__():
                waiting.append((batch, self.position))
                if len(waiting) > 2:
                    batch, self.given = waiting.popleft()
                    yield batch

        def state_dict(self) -> dict[str, int]:
            return {"position": getattr(self, "given", 0)}

    def run(steps: int) -> list[float]:
        model = crash.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ReadsAhead()
        example = (torch.randn(6, 24), torch.randint(4, (6,)))
        losses = []
        with ph.Trainer(
            model, optimizer, example, loss=crash.classify, store=tmp_path, resume=True, data=data, microbatches=2
        ) as trainer:
            for batch in data:
                if trainer.steps >= steps:
                    break
                losses.append(trainer.step(batch))
        return losses

    interrupted = run(3) + run(5)
    shutil.rmtree(tmp_path)
    assert interrupted == run(5)


def test_what_cannot_be_committed_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd(Positions):
        def state_dict(self) -> Any:
            return {"position": 0, "file": open}

    model = crash.make_model()
    with pytest.raises(StoreError, match=r"data.state_dict\(\)\['file'\] is a builtins.builtin_function_or_method"):
        ph.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.randn(6, 24), torch.randint(4, (6,))),
            loss=crash.classify,
            store=tmp_path,
            data=Odd(),
        )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(values)
def test_encoded_values_come_back(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert found == value and type(found) is type(value)


def test_encoded_tensors_and_orders_come_back() -> None:
    for tensor in (torch.randn(3, 4), torch.tensor(True), torch.zeros(0, 2), torch.randn(3).bfloat16()):
        found = decode(json.loads(json.dumps(encode(tensor, "tensor"))))
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    for other in (OrderedDict(b=1, a=2), deque([1, 2]), frozenset([3])):
        assert decode(json.loads(json.dumps(encode(other, "value")))) == other

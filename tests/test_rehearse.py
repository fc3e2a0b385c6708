"""The rehearsal: segments run beforehand on made-up values, and what a plan makes of their times."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packhorse as ph
import toys
from packhorse import rehearse, search
from packhorse.memory import TYPICAL, Heap, Ledger, Pool, resident_bytes
from packhorse.models import load_task
from packhorse.optimizer import Stepper
from packhorse.partition import partition
from packhorse.price import Price
from packhorse.rehearse import Rehearsed
from packhorse.running import Running

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph() -> ph.Graph:
    task = load_task("gpt-tiny", rows=4)
    return ph.capture(task.model, task.example, task.loss)


@pytest.mark.parametrize("name", toys.ZOO)
def test_every_segment_of_the_zoo_runs_on_made_up_values(name: str) -> None:
    model, make_batch, loss = toys.zoo(name)
    graph = ph.capture(model, make_batch(4), loss)
    segments = partition(graph).segments
    for resident in (True, False):
        prices, _ = rehearse.run(segments, 2, resident, CPU)
        assert all(price is not None and price.forward > 0 and price.building > 0 for price in prices)


def test_made_up_values_are_unlike_and_stay_in_bounds() -> None:
    """Through layers without norms, too: numbers too small or too large take other times."""
    model = nn.Sequential(*(layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())))
    graph = ph.capture(model, torch.ones(4, 64), lambda y, _: y.sum())
    pool = Pool(Ledger())
    values: dict[str, torch.Tensor] = {}
    for segment in partition(graph, segments=10).segments:
        running = Running(Heap(Ledger(), keeps=True, ceiling=None), lambda *_: None)
        play = rehearse._Play(segment, 4, CPU, running, pool, values)
        play.forward("building")
    found = values[segment.inputs[0]]
    assert 1e-3 < found.std() < 1e3 and found.unique().numel() > found.numel() // 4


@pytest.mark.parametrize("name", ["llama", "t5", "resnet"])
def test_so_do_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    model, make_batch, loss = toys.hugging_face(name)
    graph = ph.capture(model, make_batch(4), loss)
    assert None not in rehearse.run(partition(graph).segments, 3, False, CPU)[0]


def test_a_process_of_its_own_answers_for_each(graph: ph.Graph) -> None:
    segments = partition(graph).segments
    prices, grown = rehearse.rehearse([segments[0], segments[-1]], 4, True, "cpu")
    assert len(prices) == 2 and all(price is not None and price.building > 0 for price in prices)
    assert grown is None or 0 < grown < 1 << 30


def test_what_cannot_run_is_priced_by_rates() -> None:
    rehearsed = Rehearsed()
    assert rehearsed.refine("block", 4, False, Price(1.0, 1.0, 1.0, 2.0)) == Price(1.0, 1.0, 1.0, 2.0)


def test_other_rows_and_other_kinds_are_corrected_alike() -> None:
    rehearsed = Rehearsed()
    rehearsed.found["block", 4, False] = (Price(2.0, 3.0, 3.0, 4.0), Price(1.0, 1.0, 1.0, 2.0))
    rehearsed.found["head", 4, False] = (Price(1.0, 1.0, 1.0, 1.0), Price(1.0, 1.0, 1.0, 2.0))
    assert rehearsed.refine("block", 4, False, Price(9.0, 9.0, 9.0, 9.0)) == Price(2.0, 3.0, 3.0, 4.0)
    assert rehearsed.refine("block", 8, False, Price(2.0, 2.0, 2.0, 4.0)) == Price(4.0, 6.0, 6.0, 8.0)
    assert rehearsed.refine("norm", 8, True, Price(2.0, 2.0, 2.0, 4.0)) == Price(3.0, 4.0, 4.0, 5.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rehearsals that take a second each way, without running: how many kinds were asked for, at how many rows."""
    asked: list[tuple[int, int]] = []

    def answer(segments: Any, rows: int, resident: bool, device: str, stays: bool = False) -> Any:
        asked.append((len(segments), rows))
        return [Price(1.0, 1.0, 1.0, 1.0)] * len(segments), 1 << 30

    monkeypatch.setattr(rehearse, "rehearse", answer)
    monkeypatch.setattr(search, "LONG", 0.0)
    monkeypatch.setattr(search, "join_small", lambda part, least: part)
    return asked


def test_a_plan_here_takes_the_times_of_the_rehearsal(graph: ph.Graph, asked: list[tuple[int, int]]) -> None:
    plan = ph.make_plan(graph, strategy="resident", microbatches=2)
    assert asked == [(6, 2)]  # all of them: what malloc keeps depends on all that stays
    assert plan.estimate.kinds["host"]["kept by malloc and kernels"] > 700 << 20  # of 1 GiB that it grew
    assert plan.estimate.busy["compute"] == pytest.approx(plan.num_segments * 2 * 2, rel=0.01)
    assert any("were run on this machine" in reason for reason in plan.reasons)


def test_a_choice_that_stands_is_not_rehearsed_again(graph: ph.Graph, asked: list[tuple[int, int]]) -> None:
    plan = ph.make_plan(graph)
    assert asked == [(6, plan.rows)]


def test_layer_to_layer_two_of_a_kind_stand_for_all(graph: ph.Graph, asked: list[tuple[int, int]]) -> None:
    ph.make_plan(graph, strategy="relay", microbatches=2)
    assert asked == [(4, 2)]  # embedding, two blocks, head


def test_where_there_is_no_room_for_all_what_malloc_keeps_grows_with_them(
    graph: ph.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(segments: Any, *_: Any, **__: Any) -> Any:
        return [Price(1.0, 1.0, 1.0, 1.0)] * len(segments), 300 * len(segments)

    monkeypatch.setattr(rehearse, "rehearse", answer)
    segments = partition(graph).segments[1:5]  # twins
    likely = [rehearse.Likely("block", s, Price(0.1, 0.1, 0.1, 0.1), 100, 200, 100, 0) for s in segments]
    for room, kept in ((1 << 40, 4 * 300 - 900), (0, (2 * 300 - 500) * 900 // 500)):  # all four, or two of them
        rehearsed = Rehearsed()
        rehearsed.learn(likely, 2, True, "cpu", room)
        assert rehearsed.kept == {(2, True): int(rehearse.LET_KEEP * kept)}


def test_others_are_told_what_is_rehearsed(graph: ph.Graph, asked: list[tuple[int, int]]) -> None:
    told: list[rehearse.Invitation] = []
    segments = partition(graph).segments
    likely = [rehearse.Likely(s.index, s, Price(1.0, 1.0, 1.0, 1.0), 0, 0, 0, 0) for s in segments]
    rehearse.Rehearsed(tell=told.append).learn(likely, 2, True, "cpu", room=0)
    told[0].follow(graph, "cpu")
    assert asked == [(len(segments), 2)] * 2


def test_a_segment_that_fails_does_not_stop_the_others(graph: ph.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = partition(graph).segments
    whole = rehearse._Play.backward

    def backward(play: Any) -> None:
        if play.segment.index == 1:
            raise RuntimeError("an operator that only its author has")
        whole(play)

    monkeypatch.setattr(rehearse._Play, "backward", backward)
    prices, _ = rehearse.run(segments, 2, False, CPU)
    assert [s.index for s, price in zip(segments, prices, strict=True) if price is None] == [1]


def test_sums_are_as_precise_as_masters() -> None:
    model, example = nn.Sequential(nn.Linear(8, 8)), (torch.randn(4, 8), torch.randn(4, 8))
    graph = ph.capture(model, example, lambda output, batch: (output - batch[1]).square().mean(), precision="bf16")
    pool = Pool(Ledger())
    running = Running(Heap(Ledger(), keeps=False), lambda *_: None)
    (segment,) = partition(graph, 1).segments
    play = rehearse._Play(segment, 4, CPU, running, pool, None)
    play.forward("rebuilding")
    play.backward()
    assert play.parameters["0.weight"].dtype is torch.bfloat16
    assert {flat.dtype for total in play.sums.values() for flat in total.tensors.values()} == {torch.float32}
    play.forget_sums()
    assert not pool.mapped


def test_the_optimizer_is_timed_as_it_is() -> None:
    model = nn.Linear(4, 4)
    element, piece = Stepper(torch.optim.AdamW(model.parameters()), model).measure()
    assert 0 < element < 1e-6
    assert element < piece < 1e-2


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [(torch.optim.Adam, {}, 2.0), (torch.optim.Adam, {"fused": True}, 0.0), (torch.optim.SGD, {"momentum": 0.9}, 0.0)],
)
def test_what_a_step_allocates_on_the_way_is_found_by_stepping(kind: Any, options: Any, sizes: float) -> None:
    """Adam's square root, and what it is divided by, are there at the same time."""
    model = nn.Linear(4, 4)
    stepper = Stepper(kind(model.parameters(), lr=0.1, **options), model)
    assert stepper.temporaries("weight", 2) == pytest.approx(sizes, abs=0.01)


def test_a_rehearsal_that_breaks_the_budget_warns(
    graph: ph.Graph, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(search, "TYPICAL", -(1 << 30))
    plan = ph.make_plan(graph, strategy="relay", memory=resident_bytes() + (150 << 20))
    assert asked and "may take more than planned" in plan.reasons[-1]


def test_what_a_rehearsal_prints_beside_its_answer_does_no_harm(
    graph: ph.Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    segments = partition(graph).segments[:1]
    assert rehearse.rehearse(segments, 2, False, "cpu")[0] != [None]
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(9)")
    assert rehearse.rehearse(segments, 2, False, "cpu") == ([None], None)


def test_nothing_runs_for_a_machine_elsewhere(graph: ph.Graph, asked: list[tuple[int, int]]) -> None:
    ph.make_plan(graph, "laptop")
    assert not asked


def test_nothing_runs_for_which_there_is_no_room(
    graph: ph.Graph, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "available_bytes", lambda: TYPICAL)
    ph.make_plan(graph, strategy="relay", memory=resident_bytes() + (150 << 20))
    assert not asked


def test_a_model_without_twins_is_not_rehearsed_where_it_does_not_fit(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that take part have their parameters in memory: of a model without repeated blocks that is all of it."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2048 + 8 * i, 2056 + 8 * i), nn.ReLU()) for i in range(16)]  # 17 MB each
    graph = ph.capture(nn.Sequential(*layers), (torch.randn(4, 2048),), lambda y, _: y.sum())
    budget = resident_bytes() + (1 << 30)
    monkeypatch.setattr(search, "available_bytes", lambda: TYPICAL + (150 << 20))
    ph.make_plan(graph, strategy="relay", on_disk=True, memory=budget)
    assert not asked
    monkeypatch.setattr(search, "available_bytes", lambda: TYPICAL + (600 << 20))
    ph.make_plan(graph, strategy="relay", on_disk=True, memory=budget)
    assert asked


def test_modules_that_run_as_they_are_do_not_leave_this_process() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)

    graph = ph.capture(nn.Sequential(nn.Linear(4, 4), Untraceable()), (torch.randn(4, 4),), lambda y, _: y.sum())
    assert graph.opaque
    segments = partition(graph).segments
    assert rehearse.rehearse(segments, 4, True, "cpu") == ([None] * len(segments), None)


@pytest.mark.parametrize(
    ("resident", "expected"), [(True, Price(2.0, 2.0, 2.0, 1.0)), (False, Price(2.0, 1.0, 1.0, 1.0))]
)
def test_of_twins_the_one_that_ran_last_in_each_direction_counts(
    graph: ph.Graph, monkeypatch: pytest.MonkeyPatch, resident: bool, expected: Price
) -> None:
    """Backward goes the other way round, and with it what is computed again."""
    monkeypatch.setattr(
        rehearse, "rehearse", lambda *_, **__: ([Price(1.0, 1.0, 1.0, 1.0), Price(2.0, 2.0, 2.0, 2.0)], 0)
    )
    rehearsed = Rehearsed()
    twins = [rehearse.Likely("block", s, Price(3.0, 3.0, 3.0, 3.0), 0, 0, 0, 0) for s in partition(graph).segments[1:3]]
    assert rehearsed.learn(twins, 2, resident, "cpu", room=0)
    assert rehearsed.refine("block", 2, resident, Price(3.0, 3.0, 3.0, 3.0)) == expected

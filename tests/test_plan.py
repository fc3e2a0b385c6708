"""Plans: the fastest that fits, what is refused and how, files of plans, and the estimate behind them."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packhorse as ph
import toys
from packhorse.case import Case
from packhorse.estimate import Choices, estimate
from packhorse.estimate.walk import Walk
from packhorse.layout import make_layout
from packhorse.models import GPT, GPTConfig
from packhorse.models.zoo import predict_tokens
from packhorse.optimizer import Stepper
from packhorse.outline import Outline
from packhorse.plan import find_fingerprint

MIB = 1 << 20


def gpt(rows: int = 16, layers: int = 8, width: int = 256) -> Any:
    config = GPTConfig(layers, 4, width, 64, 512)
    with torch.device("meta"):
        model = GPT(config)
    tokens = torch.randint(config.vocabulary, (rows, config.context + 1))
    return model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, predict_tokens


@pytest.fixture(scope="module")
def graph() -> ph.Graph:
    return ph.capture(*gpt())


@pytest.fixture(scope="module")
def machine() -> ph.Machine:
    return ph.Machine.load("laptop")


# -- choosing


def test_without_a_budget_everything_stays(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine)
    assert (plan.strategy, plan.on_disk) == ("resident", False)
    assert plan.estimate.peak["host"] == sum(plan.estimate.kinds["host"].values())
    assert plan.estimate.bottleneck == "compute" and plan.estimate.seconds > 0


@pytest.fixture(scope="module")
def least(graph: ph.Graph, machine: ph.Machine) -> int:
    """The smallest budget that works, as a refusal names it."""
    with pytest.raises(ph.BudgetError, match="the smallest budget that works is") as refusal:
        ph.make_plan(graph, machine, memory=TYPICAL + 10 * MIB, on_disk=True)
    words = str(refusal.value).split("smallest budget that works is ")[1].split()
    return int(float(words[0]) * {"MiB": MIB, "GiB": 1 << 30}[words[1]]) + MIB


TYPICAL = 400 * MIB


def test_the_smallest_budget_that_a_refusal_names_works(graph: ph.Graph, machine: ph.Machine, least: int) -> None:
    plan = ph.make_plan(graph, machine, memory=least, on_disk=True)
    assert plan.estimate.peak["host"] <= least
    with pytest.raises(ph.BudgetError):
        ph.make_plan(graph, machine, memory=least - 8 * MIB, on_disk=True)


@settings(deadline=None, max_examples=15)
@given(extra=st.integers(0, 600))
def test_what_is_chosen_fits_and_more_memory_is_never_slower(
    graph: ph.Graph, machine: ph.Machine, least: int, extra: int
) -> None:
    budget = least + extra * MIB
    plan = ph.make_plan(graph, machine, memory=budget)
    more = ph.make_plan(graph, machine, memory=budget + 50 * MIB)
    assert plan.estimate.peak["host"] <= budget
    assert more.estimate.seconds <= plan.estimate.seconds * 1.02


def test_a_tight_budget_goes_to_disk_or_to_more_microbatches(graph: ph.Graph, machine: ph.Machine, least: int) -> None:
    free = ph.make_plan(graph, machine)
    tight = ph.make_plan(graph, machine, memory=least)
    assert free.estimate.peak["host"] > least >= tight.estimate.peak["host"]
    assert tight.strategy == "relay" and tight.on_disk and tight.microbatches > 1
    assert "disk" in tight.estimate.peak and tight.estimate.moved["read"] > 0


def test_the_cheapest_change_that_a_refusal_names_works(graph: ph.Graph, machine: ph.Machine, least: int) -> None:
    with pytest.raises(ph.BudgetError, match="cheapest change: give store=DIRECTORY"):
        ph.make_plan(graph, machine, memory=least, on_disk=False)
    with pytest.raises(ph.BudgetError, match=r"cheapest change: allow \d+ microbatches") as refusal:
        ph.make_plan(graph, machine, memory=least, on_disk=True, microbatches=1)
    count = int(str(refusal.value).split("allow ")[1].split()[0])
    ph.make_plan(graph, machine, memory=least, on_disk=True, microbatches=count)


def test_a_budget_below_the_process_itself_is_refused(graph: ph.Graph, machine: ph.Machine) -> None:
    with pytest.raises(
        ph.BudgetError, match=r"10.0 MiB: this process alone has 400.0 MiB before any training, the smallest"
    ):
        ph.make_plan(graph, machine, memory="10MiB")


@pytest.mark.parametrize("memory", ["2 parsecs", "many", "-1GiB", 0])
def test_an_unknown_amount_is_refused(graph: ph.Graph, machine: ph.Machine, memory: Any) -> None:
    with pytest.raises(ph.PackhorseError):
        ph.make_plan(graph, machine, memory=memory)


def test_a_disk_too_small_is_refused(graph: ph.Graph, machine: ph.Machine) -> None:
    with pytest.raises(ph.BudgetError, match="disk space"):
        ph.make_plan(graph, machine, memory=ph.Memory(disk="1MiB"), on_disk=True)


# -- machines one does not have


def test_on_an_accelerator_the_device_holds_the_running_segments_only(graph: ph.Graph) -> None:
    plan = ph.make_plan(graph, "v100-16gb", strategy="relay")
    deeper = ph.make_plan(ph.capture(*gpt(layers=32)), "v100-16gb", strategy="relay")
    assert deeper.estimate.peak["device"] <= plan.estimate.peak["device"] * 1.05
    assert deeper.estimate.peak["host"] > plan.estimate.peak["host"]
    assert {"up", "down"} <= plan.estimate.moved.keys()


def test_plain_needs_what_plain_needs(graph: ph.Graph) -> None:
    plan = ph.make_plan(graph, "v100-16gb")
    assert plan.plain.kinds["device"]["states"] == pytest.approx(12 * graph.num_parameters, rel=0.05)
    assert plan.plain.kinds["device"]["gradients"] == pytest.approx(4 * graph.num_parameters, rel=0.05)


# -- files


def test_a_plan_goes_to_a_file_and_back(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine, memory="1GiB", strategy="relay")
    assert ph.Plan.from_json(plan.to_json()) == plan


def test_what_a_file_pins_is_respected(graph: ph.Graph, machine: ph.Machine, tmp_path: Path) -> None:
    plan = ph.make_plan(graph, machine, strategy="relay", microbatches=2)
    fields = json.loads(plan.to_json())
    fields["microbatches"], fields["kept"] = 8, [3, 5]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    again = ph.make_plan(graph, machine, plan=path)
    assert (again.strategy, again.microbatches, again.kept, again.rows) == ("relay", 8, frozenset({3, 5}), 2)
    fields["pinned"] = ["microbatches"]
    path.write_text(json.dumps(fields))
    free = ph.make_plan(graph, machine, plan=path)
    assert (free.strategy, free.microbatches) == ("resident", 8)


def test_a_trainer_follows_a_plan(tmp_path: Path) -> None:
    model, batch, loss = gpt(rows=4, layers=3, width=64)
    plan = ph.make_plan(ph.capture(model, batch, loss), "laptop", strategy="relay", microbatches=2)
    path = tmp_path / "plan.json"
    path.write_text(dataclasses.replace(plan, kept=frozenset({1})).to_json())
    with ph.Trainer(model, torch.optim.AdamW(model.parameters()), batch, loss=loss, plan=path) as trainer:
        assert (trainer.plan.strategy, trainer.plan.microbatches, trainer.plan.kept) == ("relay", 2, frozenset({1}))
        trainer.step(batch)
        kinds = [str(record.action) for record in trainer.records]
        assert "1R0" not in kinds and "2F0" in kinds


def test_a_plan_of_another_model_is_refused(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine)
    for other in (gpt(layers=4), gpt(rows=8)):
        with pytest.raises(ph.PlanError, match="made for another model"):
            ph.make_plan(ph.capture(*other), machine, plan=plan)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}'])
def test_what_is_no_plan_is_refused(graph: ph.Graph, machine: ph.Machine, tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ph.PlanError, match="no plan as"):
        ph.make_plan(graph, machine, plan=path)
    with pytest.raises(ph.PlanError, match="no plan can be read"):
        ph.make_plan(graph, machine, plan=tmp_path / "missing.json")


def test_a_plan_that_pins_nonsense_is_refused(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine)
    fields = json.loads(plan.to_json())
    with pytest.raises(ph.PlanError, match="pins 'colour'"):
        ph.Plan.from_json(json.dumps(fields | {"pinned": ["colour"]}))
    with pytest.raises(ph.PackhorseError, match="cuts before node 100000"):
        ph.make_plan(graph, machine, plan=dataclasses.replace(plan, cuts=(100000,)))


def test_pins_that_contradict_are_refused(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine, strategy="relay", microbatches=2, on_disk=False)
    with pytest.raises(ph.PlanError, match="pins microbatches to 2, but 4 is asked"):
        ph.make_plan(graph, machine, microbatches=4, plan=plan)
    with pytest.raises(ph.PlanError, match="for a model in RAM"):
        ph.make_plan(graph, machine, on_disk=True, plan=plan)
    with pytest.raises(ph.PlanError, match="keeps segment 99"):
        ph.make_plan(graph, machine, plan=dataclasses.replace(plan, kept=frozenset({99})))
    with pytest.raises(ph.PlanError, match="pin both"):
        ph.make_plan(graph, machine, plan=dataclasses.replace(plan, kept=frozenset({1}), pinned=("kept",)))


# -- what people read


def test_a_plan_is_a_page(graph: ph.Graph, machine: ph.Machine, least: int) -> None:
    page = str(ph.make_plan(graph, machine, memory=least))
    for word in ("relay, ", "microbatches of at most", "host memory:", "disk:", "time:", "- plain PyTorch would take"):
        assert word in page, page


def test_after_the_first_step_planned_and_measured_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model, make_batch, loss = toys.zoo("gpt")
    batch = make_batch(4)
    with (
        caplog.at_level(logging.INFO, "packhorse"),
        ph.Trainer(model, torch.optim.AdamW(model.parameters()), batch, loss=loss) as trainer,
    ):
        trainer.step(batch)
        trainer.step(batch)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "time " in line and "planned" in line and "measured" in line and "host memory" in line
        assert "planned and measured: time" in trainer.report()


# -- the estimate


def make_case(graph: ph.Graph, plan: ph.Plan) -> Case:
    outline: Any = Outline(graph)
    stepper = Stepper(torch.optim.AdamW([p for _, p in outline.named_parameters()]), outline)
    part = ph.partition(graph)
    layout = make_layout(outline, part, stepper, on_disk=plan.on_disk, deferred=False)
    return Case(part, layout, graph.batch.rows, "fp32", "eager", plan.on_disk, 0)


@pytest.mark.parametrize("on_disk", [False, True])
def test_few_microbatches_stand_for_many(graph: ph.Graph, machine: ph.Machine, on_disk: bool) -> None:
    plan = ph.make_plan(graph, machine, strategy="relay", microbatches=16, on_disk=on_disk)
    case = make_case(graph, plan)
    walks = [
        estimate(case, plan.actions(n, case.weights), machine, Choices(1, 16 / n, False, frozenset(), plan.stash_bytes))
        for n in (16, 8, 4)
    ]
    for other in walks[1:]:
        assert other.seconds == pytest.approx(walks[0].seconds, rel=0.06)
        assert other.peak["host"] == pytest.approx(walks[0].peak["host"], rel=0.05)
        assert other.moved == pytest.approx(walks[0].moved, rel=0.01)


def test_nothing_stays_behind_a_walk(graph: ph.Graph, machine: ph.Machine) -> None:
    for strategy in ("resident", "relay"):
        for on_disk in (False, True):
            plan = ph.make_plan(graph, machine, strategy=strategy, microbatches=4, on_disk=on_disk)  # type: ignore[arg-type]
            case = make_case(graph, plan)
            choices = Choices(4, 1.0, strategy == "resident", plan.kept, plan.stash_bytes)
            walk = Walk(case, machine, choices, {})
            assert not list(walk.walk(plan.actions(4, case.weights))), "it waits for nobody"
            walk.updates.end()
            walk.tally.release(walk.lanes.now)
            left = {kind: n for (_, kind), n in walk.tally.live.items() if n and kind in MOVING}
            assert not left, f"{strategy}, on disk: {on_disk}"


MOVING = ("weights", "gradients", "graphs", "stash")


def test_what_a_kept_graph_and_the_stash_share_counts_once(graph: ph.Graph, machine: ph.Machine) -> None:
    plan = ph.make_plan(graph, machine, strategy="relay", microbatches=2, on_disk=False, memory="8GB")
    boundary = 16 * 64 * 256 * 4  # rows, tokens, width, bytes: gradients wait at one of them, values at none
    assert plan.kept and plan.estimate.kinds["host"]["stash"] == boundary
    device = ph.make_plan(graph, "v100-16gb", strategy="relay", microbatches=2, memory=ph.Memory(device="2GB"))
    assert device.kept and device.estimate.kinds["host"]["stash"] > boundary  # there it is a copy


def test_fingerprints_tell_models_apart(graph: ph.Graph) -> None:
    assert find_fingerprint(graph) == find_fingerprint(ph.capture(*gpt()))
    assert find_fingerprint(graph) != find_fingerprint(ph.capture(*gpt(width=128)))


def test_segments_that_share_their_code_but_not_their_sizes_are_priced_apart(machine: ph.Machine) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8 << i, 16 << i) for i in range(6)))
    graph = ph.capture(model, (torch.randn(64, 8), torch.randn(64, 512)), lambda y, b: (y - b[1]).square().mean())
    plan = ph.make_plan(graph, machine, strategy="relay")
    case = make_case(graph, plan)
    prices = [case.price(s, 64, machine, resident=False).forward for s in range(5)]
    assert prices == sorted(prices) and prices[4] > 2 * prices[2]
    footprints = [case.footprint(s, 64).forward for s in range(5)]
    assert footprints[4] == 16 * footprints[0]


def test_frozen_twins_are_priced_apart(machine: ph.Machine) -> None:
    model, batch, loss = gpt(layers=4)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    for parameter in (*model.tokens.parameters(), *model.positions.parameters()):
        parameter.requires_grad_(False)
    graph = ph.capture(model, batch, loss)
    case = make_case(graph, ph.make_plan(graph, machine, strategy="relay"))
    assert case.price(1, 4, machine, resident=False).backward == 0 < case.price(4, 4, machine, resident=False).backward
    assert case.footprint(1, 4).graph < case.footprint(4, 4).graph


@pytest.mark.parametrize(("rows", "wanted", "found"), [(9, 8, 5), (9, 9, 9), (8, 3, 3), (4, 100, 4)])
def test_as_many_microbatches_are_planned_as_run(machine: ph.Machine, rows: int, wanted: int, found: int) -> None:
    model, batch, loss = gpt(rows=rows, layers=2, width=32)
    plan = ph.make_plan(ph.capture(model, batch, loss), machine, strategy="relay", microbatches=wanted)
    assert plan.microbatches == found
    with ph.Trainer(
        model, torch.optim.SGD(model.parameters()), batch, loss=loss, strategy="relay", microbatches=wanted
    ) as trainer:
        trainer.step(batch)
        assert sum(record.action.kind == "F" and record.action.segment == 0 for record in trainer.records) == found

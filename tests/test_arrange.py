"""Several ranks, planned without any: how they share the work, what they wait for, what goes between them."""

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import packhorse as ph
import toys
from packhorse import lowering
from packhorse.cli import app
from packhorse.errors import MachineError, RanksError
from packhorse.models import GPT, GPTConfig
from packhorse.models.zoo import predict_tokens
from packhorse.schedule import Action, parse, show
from packhorse.units import parse_rate


def capture_gpt(layers: int = 8, width: int = 64, rows: int = 16) -> ph.Graph:
    import torch

    with torch.device("meta"):
        model = GPT(GPTConfig(layers, 4, width, 32, 256))
    tokens = torch.zeros(rows, 33, dtype=torch.int64)
    return ph.capture(model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, predict_tokens)


@pytest.fixture(scope="module")
def gpt() -> ph.Graph:
    return capture_gpt()


def plan(graph: ph.Graph, ranks: int | ph.Ranks, network: str = "1Gbit", **options: Any) -> ph.Plan:
    return ph.make_plan(graph, "laptop", ranks=ranks, network=network, **options)


# -- sums


def test_sums_of_the_first_segment_pass_those_that_wait() -> None:
    actions = parse("2B0 2UPDATE 1B0 1UPDATE 0B0 0UPDATE COMMIT")
    lowered = lowering.reduce(actions, pieces=[[1.0], [1.0], [1.0] * 6], pace=[1.0, 1.0, 1.0])
    assert show(lowered) == (
        "2B0 2REDUCE 2SUM0 2SUM1 2UPDATE 2SUM2 1B0 1REDUCE 1UPDATE 1SUM0 0B0 0REDUCE 0UPDATE "
        "0SUM0 2SUM3 2SUM4 2SUM5 COMMIT"
    )


def test_every_piece_is_summed_once_and_before_the_end() -> None:
    actions = parse("3B0 3B1 3UPDATE 2B0 2B1 2UPDATE 1B0 1B1 1UPDATE 0B0 0B1 0UPDATE COMMIT")
    pieces = [[1.0, 1.0, 0.2], [0.01], [1.0] * 5, [1.0, 0.9]]
    for pace in ((), [0.0] * 4, [0.3] * 4, [5.0] * 4):
        lowered = lowering.reduce(actions, pieces, pace)
        sums = [a for a in lowered if a.kind == "SUM"]
        assert sorted(sums) == [Action("SUM", s, i) for s, sizes in enumerate(pieces) for i in range(len(sizes))]
        assert [a for a in lowered if a.kind not in ("SUM", "REDUCE")] == actions
        for s in range(4):
            assert lowered.index(Action("REDUCE", s)) < lowered.index(Action("SUM", s, 0))


# -- what takes how long


def test_a_slow_network_takes_longer(gpt: ph.Graph) -> None:
    fast, slow = (plan(gpt, ph.Ranks(data=2), rate).estimate for rate in ("10Gbit", "1Mbit"))
    assert slow.seconds > 2 * fast.seconds
    assert slow.bottleneck == "network" and fast.moved["network"] == slow.moved["network"]


def test_two_replicas_send_what_a_ring_sends(gpt: ph.Graph) -> None:
    found = plan(gpt, ph.Ranks(data=2), strategy="resident")
    gradients = sum(p.nbytes for p in gpt.parameters.values())
    assert found.estimate.moved["network"] == pytest.approx(gradients, rel=0.01)


def test_replicas_of_stages_take_less_time_than_stages(gpt: ph.Graph) -> None:
    alone = plan(gpt, 1).estimate.seconds
    two, four = (plan(gpt, ranks, "10Gbit").estimate.seconds for ranks in (2, 4))
    assert four < two < alone


def test_a_step_waits_for_nothing_it_could_hide(gpt: ph.Graph) -> None:
    """At a rate at which sums take less than backward, only what comes last shows."""
    free, busy = (
        plan(gpt, ph.Ranks(data=2), rate, strategy="resident").estimate.seconds for rate in ("1000Gbit", "4Gbit")
    )
    assert busy < 1.15 * free


# -- what is chosen


def test_what_fits_no_rank_whole_is_cut_into_stages_or_parts(gpt: ph.Graph) -> None:
    graph = capture_gpt(layers=16, width=512)
    whole = plan(graph, ph.Ranks(data=4), strategy="resident").estimate.peak["host"]
    found = plan(graph, 4, memory=int(0.75 * whole), on_disk=False)
    assert found.ranks.pipeline > 1 or found.strategy == "relay"
    assert found.estimate.peak["host"] <= 0.75 * whole


def test_more_under_way_hides_the_time_of_messages(gpt: ph.Graph) -> None:
    near, far = (plan(gpt, ph.Ranks(pipeline=2), rate, microbatches=8).ranks for rate in ("100Gbit", "20Mbit"))
    assert near.ahead is not None and far.ahead is not None and far.ahead > 0 and near.ahead <= far.ahead


@pytest.mark.parametrize("ranks", [ph.Ranks(data=2, pipeline=4), ph.Ranks(pipeline=4)], ids=["replicas", "stages"])
@pytest.mark.parametrize("order", ["1f1b", "zero-bubble"])
def test_no_step_is_shorter_than_what_a_rank_computes(ranks: ph.Ranks, order: Any) -> None:
    found = plan(capture_gpt(rows=64), replace(ranks, order=order), microbatches=64)
    assert found.estimate.seconds >= found.estimate.busy["compute"]


def test_a_thousand_ranks_without_one() -> None:
    graph = capture_gpt(rows=1024)
    found = ph.make_plan(graph, "6x100gbit", ranks=1024)
    assert found.ranks.size == 1024 and found.estimate.seconds > 0


# -- what is refused


def test_it_must_be_known_how_fast_ranks_talk(gpt: ph.Graph) -> None:
    with pytest.raises(MachineError, match=r"how fast ranks on .* talk"):
        ph.make_plan(gpt, "laptop", ranks=2)


def test_more_stages_than_places(gpt: ph.Graph) -> None:
    model, make_batch, loss = toys.zoo("mlp")
    graph = ph.capture(model, make_batch(64), loss)
    with pytest.raises(RanksError, match="cannot be cut into 40 stages"):
        plan(graph, ph.Ranks(pipeline=40))


def test_on_the_command_line() -> None:
    run = CliRunner().invoke
    found = run(
        app, ["plan", "gpt-tiny", "--machine", "laptop", "--ranks", "2x2", "--network", "1Gbit", "--batch", "8"]
    )
    assert found.exit_code == 0 and "2 x the samples of 2 stages" in found.output
    refused = run(app, ["plan", "gpt-tiny", "--machine", "laptop", "--ranks", "2xmany"])
    assert refused.exit_code != 0 and "expected a number, or replicas x stages" in str(refused.exception)


def test_rates_as_people_write_them() -> None:
    assert parse_rate("1Gbit") == 125e6 and parse_rate("200 Mbit/s") == 25e6 and parse_rate("100MB/s") == 1e8
    with pytest.raises(ph.PackhorseError, match="no rate"):
        parse_rate("fast")

"""Our models: any partition gives the plain module's loss, gradients and buffers, bit for bit."""

import pytest
import torch

import packhorse as ph
from reference import Keyed, assert_partitions_same, assert_same, run_composed, run_plain, run_segments, seed_by_key
from toys import ZOO, zoo


@pytest.mark.parametrize("name", ZOO)
def test_any_partition_is_the_model(name: str) -> None:
    model, make, loss = zoo(name)
    graph = ph.capture(model, make(4), loss)
    assert not graph.opaque
    assert_partitions_same(model, graph, [make(4), make(3)], loss)


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet"])
def test_a_graph_captured_from_one_row_runs_any_number(name: str) -> None:
    model, make, loss = zoo(name)
    graph = ph.capture(model, make(1), loss)
    rows = [1, 2, 5] if name != "unet" else [2, 5]
    assert_partitions_same(model, graph, [make(n) for n in rows], loss, counts=(1, 3))


@pytest.mark.parametrize("name", ["gpt", "resnet50"])
def test_a_meta_model_gives_the_same_graph(name: str) -> None:
    model, make, loss = zoo(name)
    with torch.device("meta"):
        shell, _, _ = zoo(name)
    graph = ph.capture(shell, make(4), loss)
    assert_partitions_same(model, graph, [make(3)], loss, counts=(2, "finest"))


def test_dropout_by_keys_does_not_depend_on_the_partition() -> None:
    model, make, loss = zoo("gpt")
    graph, batch = ph.capture(model, make(4), loss), make(4)
    with Keyed(seed_by_key):
        expected = run_plain(model, batch, loss, seed=1)
    for count in (1, 2, 5, "finest"):
        partition = ph.partition(graph, count)
        assert_same(run_composed(model, partition, batch, seed=2, rng=seed_by_key), expected)
        assert_same(run_segments(model, partition, batch, seed=3, rng=seed_by_key), expected)


def test_recomputation_by_keys_repeats_the_forward() -> None:
    model, make, loss = zoo("gpt")
    graph, batch = ph.capture(model, make(4), loss), make(4)
    segment = ph.partition(graph, 3).segments[0]
    parameters = dict(model.named_parameters())
    first = segment(parameters, {}, graph.inputs(batch), seed_by_key)
    again = segment(parameters, {}, graph.inputs(batch), seed_by_key)
    assert all(torch.equal(first[name], again[name]) for name in segment.outputs)

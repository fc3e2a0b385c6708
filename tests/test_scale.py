"""Deep models at full width, on the meta device: minutes and megabytes, not hours and gigabytes."""

import time

import pytest
import torch

import packhorse as ph
from packhorse.models import GPT, GPTConfig, load_task
from packhorse.models.zoo import predict_tokens
from packhorse.partition.partition import SLACK
from reference import resident_memory


def imbalance(graph: ph.Graph, count: int) -> float:
    """The slowest segment against the best any cut could do: an equal share, or the largest indivisible piece."""
    largest = max(s.flops for s in ph.partition(graph, "finest").segments)
    slowest = max(s.flops for s in ph.partition(graph, count).segments)
    return slowest / max(graph.flops / count, largest)


def test_gpt2_xl_into_six() -> None:
    task = load_task("gpt2-xl")
    start = time.monotonic()
    graph = ph.capture(task.model, task.example, task.loss)
    partition = ph.partition(graph, 6)
    assert len(partition.segments) == 6
    assert time.monotonic() - start < 30
    assert graph.num_parameters == 1557611200
    assert imbalance(graph, 6) <= 1.05


def test_384_layers() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=384, heads=16, width=1024))
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    with resident_memory() as grown:
        start = time.monotonic()
        graph = ph.capture(model, {"tokens": tokens, "targets": tokens}, predict_tokens)
        blocks = ph.partition(graph)
        assert len(blocks.segments) == 386
        assert len(blocks.codes) <= 6
        assert imbalance(graph, 6) <= 1.05
        assert time.monotonic() - start < 120
        assert grown() <= 20


@pytest.mark.parametrize("name", ["resnet50", "unet"])
def test_convolutional_nets_into_four(name: str) -> None:
    task = load_task(name)
    assert imbalance(ph.capture(task.model, task.example, task.loss), 4) <= 1.15


def test_vgg16_into_four_is_the_best_there_is() -> None:
    """Its convolutions are too few and too large for 1.15: trying all cuts between any two operations shows it."""
    task = load_task("vgg16")
    graph = ph.capture(task.model, task.example, task.loss)
    sums = [0]
    for node in graph.nodes:
        sums.append(sums[-1] + node.flops)
    inner = sorted(set(sums[1:-1]))
    best = min(
        max(a, b - a, c - b, graph.flops - c)
        for i, a in enumerate(inner)
        for j, b in enumerate(inner[i + 1 :], i + 1)
        for c in inner[j + 1 :]
    )
    assert 1.19 < best / (graph.flops / 4) < 1.2
    assert max(s.flops for s in ph.partition(graph, 4).segments) <= SLACK * best

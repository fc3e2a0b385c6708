"""The whole path in seconds."""

import torch
from torch import nn

import packhorse as ph
from reference import assert_same, run_plain, run_segments


def test_the_whole_path() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = (torch.randn(6, 8), torch.randint(3, (6,)))

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    graph = ph.capture(model, batch, loss)
    partition = ph.partition(graph, segments=3, flops_per_byte=0)  # balance compute alone
    assert [segment.parameters for segment in partition.segments] == [
        ("0.weight", "0.bias"),
        ("3.weight", "3.bias"),
        ("5.weight", "5.bias"),
    ]
    assert_same(run_segments(model, partition, batch), run_plain(model, batch, loss))

"""A fully connected net; by default the six layers that the partitioned-training papers use on 28 x 28 letters."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Images or vectors [rows, ...] -> logits [rows, classes]."""

    def __init__(self, widths: Sequence[int] = (784, 512, 512, 256, 256, 128, 26)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)

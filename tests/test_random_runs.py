"""Random nets, skips, ties and buffers, run as lists of actions: relayed, and over ranks, they are what they are resident."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
from launch import run_ranks
from test_parity_random import OPERATIONS, RandomNet, batch, loss

SEEDS = range(4)
WIDTH = 256  # so that stages of a pipeline have layers, not only what is behind them


def make_net(seed: int) -> RandomNet:
    """A long one: what a step reads may be far behind."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    names = [name for name in OPERATIONS if name not in ("counter", "batch_norm")]
    return RandomNet([(chance.choice(names), chance.randrange(20), chance.randrange(20)) for _ in range(12)])


def train(
    model: nn.Module, batches: list[Any], loss: Any, strategy: Any, microbatches: int, **options: Any
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with ph.Trainer(
        model, optimizer, batches[0], loss=loss, strategy=strategy, microbatches=microbatches, **options
    ) as trainer:
        losses = [trainer.step(batch) for batch in batches]
        evaluated, predicted = trainer.evaluate(batches[0]), trainer.predict(batches[0])
        return {"losses": [*losses, evaluated], "predicted": predicted, **trainer.state_dict()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_net_is_relayed(seed: int, microbatches: int, tmp_path: Path) -> None:
    batches = [batch(6), batch(5)]
    expected = train(make_net(seed), batches, loss, "resident", microbatches)
    for store in (None, tmp_path / "store"):
        found = train(make_net(seed), batches, loss, "relay", microbatches, store=store)
        assert_same(found, expected)


class Skips(nn.Module):
    """What the fourth layer makes is read by those from `first` on; all are scaled by a buffer that none of them owns."""

    def __init__(self, first: int):
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.scale + x
            skip = x if i == 3 else skip
            x = x + skip if i >= self.first else x
        return x


class Twice(nn.Module):
    """A table that is looked up twice, and is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.encoder, self.decoder = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        known = self.encoder(self.words(x[:, 0]))
        return self.head(self.decoder(self.words(x[:, 1])) + known)


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def entropy(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def make_skips(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def make_words(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(50, (rows, 2, 12)), torch.randint(50, (rows, 12))


@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (lambda: Skips(4), ph.Ranks(pipeline=2, order="interleaved", chunks=2)),
        (lambda: Skips(5), ph.Ranks(pipeline=2, order="interleaved", chunks=2)),
        (lambda: Skips(4), ph.Ranks(pipeline=2, group=2)),
        (lambda: Skips(5), ph.Ranks(pipeline=3, order="zero-bubble")),
        (Twice, ph.Ranks(pipeline=2, order="1f1b")),
        (Twice, ph.Ranks(pipeline=3, order="1f1b")),
    ],
    ids=["skip to the next", "skip there and back", "streamed", "zero-bubble", "used three times", "on three ranks"],
)
def test_stages_with_skips_buffers_and_ties(make: Any, ranks: ph.Ranks) -> None:
    """With three microbatches, of which a streamed stage takes two at a time, so that one is alone."""
    rows, microbatches = (make_words, entropy) if make is Twice else (make_skips, squares), 3
    batches = [rows[0](12), rows[0](9)]

    def work(ranks: ph.Ranks | None) -> dict[str, Any]:
        torch.manual_seed(0)
        return train(make(), batches, rows[1], "resident" if ranks is None else "pipeline", microbatches, ranks=ranks)

    expected = work(None)
    for found in run_ranks(ranks.size, lambda rank: work(ranks)):
        assert_same(found, expected)


class Mirror(nn.Module):
    """What is made first is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(64, 64) for _ in range(10)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x)) + kept.pop()
        return x


def test_a_streamed_stage_sends_much_that_is_not_read_yet() -> None:
    """Eighty messages before the other rank can begin, which reads the last of them first."""

    def work(ranks: ph.Ranks | None) -> dict[str, Any]:
        torch.manual_seed(0)
        batches = [(torch.randn(16, 64), torch.randn(16, 64)) for _ in range(3)]
        return train(Mirror(), batches, squares, "resident" if ranks is None else "pipeline", 8, ranks=ranks)

    expected = work(None)
    for found in run_ranks(2, lambda rank: work(ph.Ranks(pipeline=2, group=8))):
        assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["relay", "resident", "pipeline"])
def test_microbatches_that_do_not_divide_the_rows(strategy: str) -> None:
    """Asked for five of twelve rows there are four; each rank has an odd one, or the only one."""
    batches = [make_skips(12)]

    def work(rank: int, strategy: str = strategy) -> dict[str, Any]:
        torch.manual_seed(0)
        return train(Skips(4), batches, squares, strategy, 5)

    expected = work(0, "resident")
    for found in run_ranks(2, work):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)

"""Several ranks train as one process does: the same numbers, whatever is cut and whoever sees which samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse as ph
import toys
from launch import run_ranks

def train(name: str, ranks: ph.Ranks | None, rows: int = 12, microbatches: int = 4, **options: Any) -> dict[str, Any]:
    """A few steps on batches of different sizes; all values afterwards."""
    torch.manual_seed(0)
    model, make_batch, loss = toys.zoo(name)
    torch.manual_seed(1)
    rate = 1e-2
    if name == "resnet50":  # so narrow, its batch norms multiply any rounding by thousands: more rows, and short steps
        rows, rate = 4 * rows, 1e-5
    batches = [make_batch(rows), make_batch(rows), make_batch(rows - 1)]
    make_optimizer = options.pop("optimizer", torch.optim.AdamW)
    trainer = ph.Trainer(
        model,
        make_optimizer(model.parameters(), lr=rate),
        batches[0],
        loss=loss,
        strategy=options.pop("strategy", "pipeline" if ranks is not None and ranks.pipeline > 1 else "resident"),
        microbatches=microbatches,
        ranks=ranks,
        **options,
    )
    with trainer:
        losses = [trainer.step(batch) for batch in batches]
        evaluated = trainer.evaluate(batches[0])
        predicted = trainer.predict(batches[0])
        values = dict(trainer.state_dict())
    return {"losses": losses, "evaluated": evaluated, "predicted": predicted, "values": values}


def assert_identical(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected["values"].items():
        assert torch.equal(found["values"][name], value), name
    assert found["evaluated"] == expected["evaluated"]
    assert torch.equal(found["predicted"], expected["predicted"])


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, value in expected["values"].items():
        torch.testing.assert_close(found["values"][name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50", "unet"])
@pytest.mark.parametrize("pipeline", [2, 3])
def test_a_pipeline_is_one_process(name: str, pipeline: int) -> None:
    expected = train(name, None)
    for found in run_ranks(pipeline, lambda rank: train(name, ph.Ranks(pipeline=pipeline))):
        assert_identical(found, expected)


def torch_sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50", "unet"])
@pytest.mark.parametrize("ranks", [ph.Ranks(data=2), ph.Ranks(data=2, pipeline=2)], ids=["data", "data x pipeline"])
def test_other_samples_on_other_ranks(name: str, ranks: ph.Ranks) -> None:
    expected = train(name, None, optimizer=torch_sgd)
    for found in run_ranks(ranks.size, lambda rank: train(name, ranks, optimizer=torch_sgd)):
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["gpt", "resnet50"])
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.5}, {"optimizer": torch.optim.Adafactor}], ids=["sgd", "clip", "whole"]
)
def test_relay_with_parts_of_the_state_on_each_rank(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    choices = {"optimizer": torch_sgd, "strategy": "relay"} | options
    expected = train(name, None, **choices)
    for store in (None, tmp_path / "store"):
        for found in run_ranks(2, lambda rank, store=store: train(name, ph.Ranks(data=2), store=store, **choices)):
            assert_close(found, expected)

"""Several ranks train as one process does: the same numbers, whatever is cut and whoever sees which samples."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packhorse as ph
import toys
from launch import run_ranks
from reference import train_plain

pytestmark = pytest.mark.usefixtures("graphs_are_shared")  # ranks are forked, and find those of runs before them


UNTIED = ("resnet50", "unet")


def make_task(name: str, rows: int, steps: int) -> tuple[nn.Module, list[Any], Any]:
    """A model, as many batches as steps, the last of another size, a loss."""
    torch.manual_seed(0)
    model, make_batch, loss = toys.zoo(name)
    torch.manual_seed(1)
    return model, [make_batch(rows) for _ in range(steps - 1)] + [make_batch(rows - 1)], loss


def train(
    name: str, ranks: ph.Ranks | None, rows: int = 12, microbatches: int = 4, steps: int = 3, **options: Any
) -> dict[str, Any]:
    """A few steps on batches of different sizes; all values afterwards."""
    model, batches, loss = make_task(name, rows, steps)
    make_optimizer = options.pop("optimizer", torch.optim.AdamW)
    trainer = ph.Trainer(
        model,
        make_optimizer(model.parameters(), lr=1e-2),
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


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gpt", ph.Ranks(pipeline=2, order="1f1b")),
        ("bert", ph.Ranks(pipeline=2)),
        ("resnet50", ph.Ranks(pipeline=2, order="1f1b")),
        ("gpt", ph.Ranks(pipeline=3, order="1f1b", ahead=0)),
        ("bert", ph.Ranks(pipeline=3, order="zero-bubble", ahead=2)),
        ("unet", ph.Ranks(pipeline=4)),
        ("gpt", ph.Ranks(pipeline=2, order="interleaved", chunks=2)),
        ("unet", ph.Ranks(pipeline=2, order="interleaved", chunks=3)),
        ("gpt", ph.Ranks(pipeline=2, order="zero-bubble")),
        ("resnet50", ph.Ranks(pipeline=3, order="zero-bubble", ahead=0)),
        ("unet", ph.Ranks(pipeline=2, order="zero-bubble")),
        ("gpt", ph.Ranks(pipeline=2, group=2)),
        ("resnet50", ph.Ranks(pipeline=2, group=3)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.pipeline} ranks, {value.order}, {value.group}",
)
def test_a_pipeline_is_one_process(name: str, ranks: ph.Ranks) -> None:
    expected = train(name, None)
    for found in run_ranks(ranks.size, lambda rank: train(name, ranks)):
        assert_identical(found, expected)


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"overlap": False}, {"precision": "bf16"}], ids=str)
def test_other_ways_to_run_a_pipeline(options: dict[str, Any]) -> None:
    expected = train("gpt", None, **options)
    for found in run_ranks(2, lambda rank: train("gpt", ph.Ranks(pipeline=2), **options)):
        assert_identical(found, expected)


def test_a_stage_that_is_streamed_from_disk(tmp_path: Path) -> None:
    expected = train("gpt", None)
    ranks = ph.Ranks(pipeline=2, group=2)
    for found in run_ranks(2, lambda rank: train("gpt", ranks, store=tmp_path / "run")):
        assert_identical(found, expected)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (ph.Ranks(pipeline=2), "auto"),
        (ph.Ranks(data=2), "resident"),
        (ph.Ranks(data=2), "relay"),
        (ph.Ranks(data=2, pipeline=2), "auto"),
        (ph.Ranks(pipeline=4, order="zero-bubble"), "auto"),
        (ph.Ranks(data=2, pipeline=3), "auto"),
    ],
    ids=["stages", "replicas", "parts", "both", "zero-bubble", "six"],
)
def test_what_was_planned_is_what_runs(ranks: ph.Ranks, strategy: Any) -> None:
    """One rank decides for all; what each then does, and sends, is what the plan says of it."""

    def work(rank: int) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model, make_batch, loss = toys.zoo("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = make_batch(12)
        trainer = ph.Trainer(model, optimizer, batch, loss=loss, ranks=ranks, strategy=strategy, microbatches=6)
        with trainer:
            trainer.step(batch)
            trainer.state_dict()  # waits for what is under way
            before = trainer._world.sent_bytes  # type: ignore[union-attr]  # there are others
            trainer.step(batch)
            trainer._settle()
            sent = trainer._world.sent_bytes - before  # type: ignore[union-attr]  # likewise
            plan, links = trainer.plan, trainer._case.links
            planned = plan.actions(6 // ranks.data, trainer._case.weights, links)
            assert [record.action for record in trainer.records] == planned
            assert plan.is_resident == (trainer._executor.running.heap.ceiling is None)  # no budget: all may stay
            return plan.ranks, plan.microbatches, plan.cuts, plan.pace, plan.strategy, sent, plan.estimate.moved

    found = run_ranks(ranks.size, work)
    assert all(other[:5] == found[0][:5] for other in found)
    assert found[0][0].ahead is not None or ranks.pipeline == 1
    for *_, sent, moved in found:
        assert sent == pytest.approx(moved["network"], rel=0.01)


def torch_sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        ("gpt", "resident", ph.Ranks(data=2)),
        ("bert", "resident", ph.Ranks(data=2)),
        ("resnet50", "resident", ph.Ranks(data=2)),
        ("unet", "resident", ph.Ranks(data=2)),
        ("gpt", "pipeline", ph.Ranks(data=2, pipeline=2)),
        ("resnet50", "pipeline", ph.Ranks(data=2, pipeline=2)),
        ("gpt", "resident", ph.Ranks(data=4)),
        ("bert", "relay", ph.Ranks(data=2)),
        ("resnet50", "relay", ph.Ranks(data=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.data}x{value.pipeline}",
)
def test_other_samples_on_other_ranks(name: str, strategy: str, ranks: ph.Ranks) -> None:
    """First gradients and ten steps are one process's; ten steps are also those of a plain loop that adds up as ranks do.

    Of two replicas that order is known, so without ties parameters are equal to the bit. ResNet50's ten steps can only be
    compared with that: its batch norms make so much of any rounding that of two plain loops, which add up in another order,
    losses are a tenth apart after ten steps of 1e-3.
    """
    size = 48 if name == "resnet50" else 12
    gradients = find_gradients(name, None, size, "resident")
    total = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
    for found in run_ranks(ranks.size, lambda rank: find_gradients(name, ranks, size, strategy)):
        for parameter, gradient in gradients.items():  # some are nothing but rounding, as of keys' biases
            limit = 1e-6 * gradient.norm() + 1e-8 * total
            assert (found[parameter] - gradient).norm() <= limit, parameter
    model, batches, loss = make_task(name, size, 10)
    plain = partial(torch_sgd, lr=1e-2)
    expected = train_plain(model, plain, batches, loss, microbatches=4, replicas=ranks.data, keyed=True)
    one = train_plain(model, plain, batches, loss, microbatches=4, keyed=True)
    options: dict[str, Any] = {"optimizer": torch_sgd, "strategy": strategy, "steps": 10}
    for found in run_ranks(ranks.size, lambda rank: train(name, ranks, size, **options)):
        assert found["losses"] == pytest.approx(expected.losses, rel=1e-6)
        if name != "resnet50":
            assert_close(found, {"losses": one.losses, "values": one.state})
        for parameter, value in expected.state.items():
            if name in UNTIED and "running" not in parameter:
                assert torch.equal(found["values"][parameter], value), parameter
            torch.testing.assert_close(found["values"][parameter], value, rtol=1e-5, atol=1e-5, msg=parameter)


def find_gradients(name: str, ranks: ph.Ranks | None, rows: int, strategy: Any) -> dict[str, torch.Tensor]:
    """Of a first step so long that nothing else is left of the parameters."""
    torch.manual_seed(0)
    model, make_batch, loss = toys.zoo(name)
    names = [name for name, _ in model.named_parameters()]
    torch.manual_seed(1)
    batch, rate = make_batch(rows), 2.0**20
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with ph.Trainer(model, optimizer, batch, loss=loss, strategy=strategy, microbatches=4, ranks=ranks) as trainer:
        before = dict(trainer.state_dict())
        trainer.step(batch)
        after = dict(trainer.state_dict())
    return {name: (before[name] - after[name]) / rate for name in names}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {}),
        ("gpt", {"clip_norm": 0.5}),
        ("gpt", {"optimizer": torch.optim.Adafactor}),
    ],
    ids=["gpt", "clipped", "tensors that stay whole"],
)
def test_relay_with_parts_of_the_state_on_each_rank(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    choices = {"optimizer": torch_sgd, "strategy": "relay"} | options
    expected = train(name, None, **choices)
    for store in (None, tmp_path / "store"):
        for found in run_ranks(2, lambda rank, store=store: train(name, ph.Ranks(data=2), store=store, **choices)):
            assert_close(found, expected)


# -- what is refused


def refusal(size: int, **options: Any) -> list[str]:
    """What the ranks say, each, of a run that cannot be."""
    return run_ranks(size, lambda rank: train("mlp", **{"ranks": None} | options), expect_failure=True)


def squared(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


@pytest.mark.parametrize("ranks", [ph.Ranks(data=2), ph.Ranks(pipeline=2)], ids=["replicas", "stages"])
def test_a_loss_that_is_not_finite_updates_nothing_anywhere(ranks: ph.Ranks) -> None:
    """The last row's: of two replicas, the second one's; of two stages, only the last sees it. Then training goes on."""

    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
        good = (torch.randn(8, 4), torch.randn(8, 1))
        bad = (good[0], torch.where(torch.arange(8)[:, None] == 7, torch.nan, good[1]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        strategy: Any = "pipeline" if ranks.pipeline > 1 else "resident"
        with ph.Trainer(
            model, optimizer, good, loss=squared, strategy=strategy, microbatches=4, ranks=ranks
        ) as trainer:
            before = dict(trainer.state_dict())
            with pytest.raises(ph.NumericsError, match="nothing was updated") as error:
                trainer.step(bad)
            after = dict(trainer.state_dict())
            trainer.step(good)
            return before, after, dict(trainer.state_dict()), str(error.value)

    told = run_ranks(2, work)
    for before, after, later, _ in told:
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not torch.equal(later["0.weight"], before["0.weight"])
    assert "microbatch 3 is nan" in told[1][3] and "a loss on another rank" in told[0][3]


def test_a_gradient_that_is_not_finite_on_one_stage_ends_all() -> None:
    """Only the first stage sees it, and with its segments updated in part it cannot go on."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.weight = nn.Linear(4, 64), nn.Linear(64, 1), nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x + self.weight.sqrt().sum()))

    def work(rank: int) -> None:
        torch.manual_seed(0)
        model, batch = Root(), (torch.randn(8, 4), torch.randn(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = ph.Trainer(model, optimizer, batch, loss=squared, strategy="pipeline", microbatches=4)
        for _ in range(3):
            trainer.step(batch)

    first, second = run_ranks(2, work, expect_failure=True)
    assert "GradientError: the gradient of weight" in first and "start all of them again, with resume=True" in first
    assert second.startswith("RanksError: "), second


def test_more_ranks_than_are_there_are_refused() -> None:
    for text in refusal(2, ranks=ph.Ranks(data=2, pipeline=2)):
        assert "ranks are 2 x 2 = 4, but 2 processes were started" in text


def test_more_stages_than_segments_are_refused() -> None:
    for text in refusal(2, ranks=ph.Ranks(pipeline=2, order="interleaved", chunks=40)):
        assert "MLP cannot be cut into 80 stages" in text


@pytest.mark.parametrize(
    ("differ", "message"),
    [
        (lambda rank: {"rows": 12 + rank}, "rank 1 has another batch than rank 0: 13 rows"),
        (lambda rank: {"name": ("mlp", "gpt")[rank]}, "rank 1 has another model than rank 0"),
        (lambda rank: {"microbatches": 2 + rank}, "rank 1 has another choice than rank 0"),
        (lambda rank: {"optimizer": (torch.optim.AdamW, torch.optim.Adam)[rank]}, "rank 1 has another optimizer"),
    ],
    ids=["batch", "model", "choice", "optimizer"],
)
def test_ranks_that_differ_are_refused(differ: Any, message: str) -> None:
    found = run_ranks(2, lambda rank: train(**{"name": "mlp", "ranks": None} | differ(rank)), expect_failure=True)
    for text in found:
        assert message in text


@pytest.mark.parametrize("strategy", ["resident", "relay", "pipeline"])
@pytest.mark.parametrize(
    ("differ", "message"),
    [
        (lambda trainer, batch: trainer.step(tuple(part[:11] for part in batch)), "another batch than rank 0: 11 rows"),
        (
            lambda trainer, batch: trainer.step(tuple(part.flip(0) for part in batch)),
            "another choice of samples than rank 0",
        ),
        (lambda trainer, batch: trainer.step((batch[0][:, :3], batch[1])), "another batch than rank 0: 12 rows"),
        (lambda trainer, batch: trainer.evaluate(batch), "another call than rank 0: evaluate, there step"),
    ],
    ids=["rows", "samples", "sizes", "call"],
)
def test_ranks_that_differ_later_are_refused(strategy: Any, differ: Any, message: str) -> None:
    """Of two, the second one's second batch: before anything comes of it, and nobody waits for what does not come."""

    def work(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
        batch = (torch.randn(12, 4), torch.randn(12, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = ph.Trainer(model, optimizer, batch, loss=squared, strategy=strategy, microbatches=4)
        trainer.step(batch)
        differ(trainer, batch) if rank else trainer.step(batch)

    for text in run_ranks(2, work, expect_failure=True):
        assert text.startswith("RanksError: rank 1 has " + message), text


def test_a_batch_with_fewer_rows_than_ranks_is_refused() -> None:
    def work(rank: int) -> None:
        model, make_batch, loss = toys.zoo("mlp")
        torch.manual_seed(0)
        batch = make_batch(4)
        trainer = ph.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss, strategy="resident")
        trainer.step(tuple(part[:1] for part in batch))

    for text in run_ranks(2, work, expect_failure=True):
        assert "1 rows, which make 1 microbatches for 2 ranks" in text


def test_one_process_is_no_pipeline() -> None:
    with pytest.raises(ph.RanksError, match="torchrun --nproc-per-node=2"):
        train("mlp", None, strategy="pipeline")
    with pytest.raises(ph.RanksError, match="but 1 processes were started"):
        train("mlp", ph.Ranks(data=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "ranks.data is 0"),
        ({"order": "gpipe"}, "expected one of 1f1b"),
        ({"chunks": 2}, "interleaved takes at least 2"),
        ({"ahead": -1}, "ranks.ahead is -1"),
    ],
)
def test_wrong_arrangements(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ph.RanksError, match=message):
        ph.Ranks(**fields)

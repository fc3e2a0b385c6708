"""What users meet when something is wrong: found, expected, what to do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
from packhorse.models import load_task
from packhorse.units import parse_bytes
from toys import zoo


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.fixture(scope="module")
def graph() -> ph.Graph:
    return ph.capture(net(), batch(), squared)


def test_more_segments_than_legal_cuts(graph: ph.Graph) -> None:
    with pytest.raises(ph.PartitionError, match=r"50 segments asked, but Sequential has \d+ legal cuts: at most \d+"):
        ph.partition(graph, 50)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "many"])
def test_a_number_of_segments_that_is_none(graph: ph.Graph, count: Any) -> None:
    with pytest.raises(ph.PartitionError, match="expected a number of at least 1"):
        ph.partition(graph, count)


def test_a_limit_below_the_largest_piece(graph: ph.Graph) -> None:
    with pytest.raises(ph.PartitionError, match=r"cannot be cut further and exceeds max_bytes=100; .* needs \d+ bytes"):
        ph.partition(graph, max_bytes=100)


def test_too_few_segments_for_the_limit(graph: ph.Graph) -> None:
    with pytest.raises(ph.PartitionError, match="it takes 2; raise max_bytes or ask for more segments"):
        ph.partition(graph, 1, max_bytes=1000)


def test_a_pinned_cut_at_no_module(graph: ph.Graph) -> None:
    with pytest.raises(ph.PartitionError, match=r"no module named 'h.7' runs in Sequential; modules that do: 0, 1, 2"):
        ph.partition(graph, cuts=["h.7"])


def test_a_pinned_cut_at_the_end() -> None:
    model, make, _ = zoo("mlp")
    graph = ph.capture(model, make(2), mode="predict")
    with pytest.raises(ph.PartitionError, match=r"'layers.5' ends the graph"):
        ph.partition(graph, cuts=["layers.5"])


def test_a_pinned_cut_where_none_is_legal() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    graph = ph.capture(model, batch(), squared)
    with pytest.raises(
        ph.PartitionError, match=r"no cut after '0': relu_ in 1 writes in place into what linear in 0 made"
    ):
        ph.partition(graph, cuts=["0"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(4, 8), "another structure than the example"),
        ({"x": torch.zeros(4, 8)}, "another structure than the example"),
        ((torch.zeros(4, 9), torch.zeros(4, 8)), r"batch value 0 is float32\[4, 9\], expected float32\[rows, 8\]"),
        ((torch.zeros(4, 8).long(), torch.zeros(4, 8)), r"is int64\[4, 8\], expected float32"),
        ((torch.zeros(4, 8), torch.zeros(3, 8)), "batch value 1 has 3 rows, expected 4"),
        ((torch.zeros(0, 8), torch.zeros(0, 8)), "expected at least 1"),
    ],
)
def test_a_batch_unlike_the_example(graph: ph.Graph, wrong: Any, message: str) -> None:
    with pytest.raises(ph.BatchError, match=message):
        ph.partition(graph, 2).compose({}, {}, wrong)


def test_loaders_make_lists_of_tuples(graph: ph.Graph) -> None:
    x, y = batch()
    found, expected = graph.inputs([x, y]), graph.inputs((x, y))
    assert all(found[name] is tensor for name, tensor in expected.items())


def test_one_row_and_a_batch_norm() -> None:
    """Plain PyTorch refuses it; the kernel by itself would make its statistics nan."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    graph = ph.capture(model, batch(), squared)
    with pytest.raises(
        ph.BatchError, match=r"one row, .*batch_norm in 1 would have one value a channel.*at least 2 rows"
    ):
        graph.inputs(tuple(tensor[:1] for tensor in batch()))
    assert not ph.capture(model, batch(), mode="predict").single_row


@pytest.mark.parametrize("example", [None, "text", {}, (), torch.zeros(0, 3), torch.tensor(1.0)])
def test_an_example_that_is_no_batch(example: Any) -> None:
    with pytest.raises(ph.BatchError, match="the example batch has no"):
        ph.capture(net(), example, squared)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda m: m[0].register_forward_hook(lambda *a: None), "module '0' has a forward hook"),
        (lambda m: m[0].register_forward_pre_hook(lambda *a: None), "module '0' has a forward pre-hook"),
        (lambda m: m[2].register_full_backward_hook(lambda *a: None), "module '2' has a backward hook"),
        (lambda m: m[0].weight.register_hook(lambda g: g), "parameter '0.weight' has a gradient hook"),
        (lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None), "'0.weight' has a gradient hook"),
    ],
)
def test_hooks_that_a_graph_cannot_hold(hook: Any, message: str) -> None:
    model = net()
    hook(model)
    with pytest.raises(ph.CaptureError, match=message):
        ph.capture(model, batch(), squared)


def test_a_hook_registered_while_the_model_runs() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.register_hook(lambda g: g * 2)
            return y

    with pytest.raises(ph.CaptureError, match="registers a hook on a tensor while it runs"):
        ph.capture(Hooked(), batch(), squared)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, r"the model returned a tensor float32\[.*8\], expected a floating-point scalar"),
        (lambda o, b: (o - b[1]).square(), r"loss '<lambda>' returned a tensor float32"),
        (lambda o, b: 3.0, "returned a float, expected a scalar tensor"),
        (lambda o, b: (o > 0).sum(), "expected a floating-point scalar"),
    ],
)
def test_a_loss_that_is_no_scalar(loss: Any, message: str) -> None:
    example = batch() if loss else batch()[0]
    with pytest.raises(ph.CaptureError, match=message):
        ph.capture(net(), example, loss)


def test_nothing_to_train() -> None:
    with pytest.raises(ph.CaptureError, match="only frozen parameters, nothing to train"):
        ph.capture(net().requires_grad_(False), batch(), squared)
    with pytest.raises(ph.CaptureError, match="no parameters, nothing to train"):
        ph.capture(nn.ReLU(), batch(), squared)
    assert ph.capture(net().requires_grad_(False), batch(), squared, mode="eval").flops > 0


def test_arguments_the_model_does_not_take() -> None:
    with pytest.raises(ph.CaptureError, match="forward takes no argument x; it takes input"):
        ph.capture(net(), {"x": torch.zeros(4, 8)})
    with pytest.raises(ph.CaptureError, match="takes 1 to 1 positional arguments, but the batch is a tuple of 2"):
        ph.capture(net(), batch())


def test_not_a_module_and_not_a_mode() -> None:
    with pytest.raises(ph.CaptureError, match=r"expected a torch.nn.Module"):
        ph.capture(lambda x: x, batch())  # type: ignore[arg-type]
    with pytest.raises(ph.CaptureError, match="mode is 'test', expected 'train', 'eval' or 'predict'"):
        ph.capture(net(), batch(), squared, mode="test")  # type: ignore[arg-type]


def test_a_lazy_module() -> None:
    with pytest.raises(ph.CaptureError, match=r"'0.weight' is not initialised yet"):
        ph.capture(nn.Sequential(nn.LazyLinear(8)), batch(), squared)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "unknown MODEL 'gpt3': did you mean gpt2"),
        ("missing.py:build", "there is no file missing.py"),
        ("/tmp", "the directory has no config.json"),
    ],
)
def test_an_unknown_model(name: str, message: str) -> None:
    with pytest.raises(ph.ModelError, match=message):
        load_task(name)


@pytest.mark.parametrize("text", ["", "2 gigs", "-1GiB", "GiB", "1e9"])
def test_an_amount_of_memory_that_is_none(text: str) -> None:
    with pytest.raises(ph.PackhorseError, match="no amount of memory"):
        parse_bytes(text)

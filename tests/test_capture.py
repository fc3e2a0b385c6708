"""What a graph knows about its model, and what capture leaves alone."""

import copy
import multiprocessing
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packhorse as ph
from packhorse.graph.table import NodeTable, ValueTable
from reference import assert_partitions_same
from toys import zoo


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


def test_bytes_and_flops_of_every_node() -> None:
    graph = ph.capture(nn.Linear(8, 3), (torch.randn(4, 8), torch.randn(4, 3)), squared)
    linear, *_ = graph.nodes
    assert (linear.operation.name, linear.module) == ("linear", "")
    assert linear.flops == 2 * 4 * 8 * 3
    assert linear.nbytes == 4 * 3 * 4
    assert graph.flops == linear.flops
    assert graph.num_parameters == 8 * 3 + 3


def test_attention_counts_its_products() -> None:
    model, make, loss = zoo("gpt")
    graph = ph.capture(model, make(2), loss)
    attention = next(n for n in graph.nodes if n.operation.name == "scaled_dot_product_attention")
    assert attention.flops == 2 * (2 * 2 * 2 * 8 * 8 * 8)  # query by key, weights by value; 2 rows, 2 heads, 8 x 8 x 8


def test_frozen_parameters_and_written_buffers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model.register_buffer("unused", torch.zeros(3), persistent=False)
    graph = ph.capture(model, batch(4), squared)
    assert [p.trainable for p in graph.parameters.values()] == [False, False, True, True, True, True]
    assert {b.name: (b.written, b.persistent) for b in graph.buffers.values()} == {
        "unused": (False, False),
        "1.running_mean": (True, True),
        "1.running_var": (True, True),
        "1.num_batches_tracked": (True, True),
    }
    first = graph.values[graph.nodes[0].results[0]]
    assert not first.type.differentiable, "nothing before the first trainable parameter needs a gradient"
    assert_partitions_same(model, graph, [batch(4)], squared)


def test_a_frozen_norm_in_eval_mode_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    model[1].eval()
    graph = ph.capture(model, batch(4), squared)
    assert not any(b.written for b in graph.buffers.values())
    assert_partitions_same(model, graph, [batch(4)], squared)


def test_random_operations_are_numbered() -> None:
    model, make, loss = zoo("gpt")
    ordinals = [n.ordinal for n in ph.capture(model, make(2), loss).nodes if n.ordinal is not None]
    assert ordinals == list(range(10))  # embedding; attention and two dropouts in each of three blocks
    model.eval()
    graph = ph.capture(model, make(2), loss, mode="eval")
    assert all(n.ordinal is None for n in graph.nodes)


def test_capture_changes_nothing_of_the_caller_s() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)).eval()
    before = copy.deepcopy(model.state_dict())
    example = batch(4)
    state = torch.get_rng_state()
    kept = [t.clone() for t in example]
    ph.capture(model, example, squared)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(example, kept, strict=True))


def test_a_model_that_writes_into_its_batch_writes_into_a_copy() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.layer(x) + x

    model, example = Writes(), batch(4)
    graph = ph.capture(model, example, squared)
    kept = example[0].clone()
    for count in (1, 2):
        loss = ph.partition(graph, count).compose(dict(model.named_parameters()), {}, example)
        assert torch.equal(loss, squared(model(kept.clone()), example))
        assert torch.equal(example[0], kept)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.recurrent = kind(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x.unflatten(1, (2, 4)).repeat(1, 1, 2))[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.b, self.a(x), use_reentrant=self.reentrant).relu())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None].expand(-1, 3, -1)).mean(1)


@pytest.mark.parametrize(
    "model",
    [
        Recurrent(nn.GRU),
        Recurrent(nn.LSTM),
        Checkpointed(False),
        Checkpointed(True),
        Encoder(),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
        nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.Flatten(), nn.Linear(8, 8)
        ),
    ],
    ids=["gru", "lstm", "checkpoint", "reentrant-checkpoint", "encoder", "spectral-norm", "weight-norm", "conv"],
)
def test_common_layers(model: nn.Module) -> None:
    graph = ph.capture(model, batch(4), squared)
    assert not graph.opaque, graph.opaque
    assert_partitions_same(model, graph, [batch(4), batch(3)], squared, counts=(1, 2, "finest"))


class Bag(dict):
    """A mapping that is no plain dict, as tokenizers return."""


def test_batches_of_every_structure() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return (self.layer(x) - (0 if y is None else y)).square().mean()

    model, (x, y) = Takes(), batch(4)
    for example in (x, (x, y), [x, y], {"x": x, "y": y}, Bag(x=x, y=y), {"x": x}):
        graph = ph.capture(model, example)
        loss = ph.partition(graph, 2).compose(dict(model.named_parameters()), {}, example)
        given = {"x": x} if isinstance(example, Tensor) or len(example) == 1 else {"x": x, "y": y}
        assert torch.equal(loss, model(**given))


def test_with_a_loss_the_last_of_a_tuple_is_the_target() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.layer(x) * (1 if scale is None else scale)

    model = Optional()
    x, y = batch(4)
    parameters = dict(model.named_parameters())
    two = ph.partition(ph.capture(model, (x, y), squared), 1).compose(parameters, {}, (x, y))
    assert torch.equal(two, squared(model(x), (x, y)))

    def last(output: Tensor, batch: Any) -> Tensor:
        return (output - batch[-1]).square().mean()

    three = ph.partition(ph.capture(model, (x, x + 1, y), last), 1).compose(parameters, {}, (x, x + 1, y))
    assert torch.equal(three, last(model(x, x + 1), (y,)))


def test_what_has_no_rows_goes_whole_to_every_microbatch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x * mask).square().mean()

    model, mask = Masked(), torch.rand(1, 8)
    graph = ph.capture(model, {"x": torch.randn(4, 8), "mask": mask})
    whole = {"x": torch.randn(7, 8), "mask": mask}
    pieces = graph.batch.split(whole, 3)
    assert [p["x"].shape[0] for p in pieces] == [3, 3, 1]
    assert all(p["mask"] is mask for p in pieces)
    assert_partitions_same(model, graph, pieces)


def test_tables_give_back_what_went_in() -> None:
    model, make, loss = zoo("resnet50")
    graph = ph.capture(model, make(2), loss)
    assert isinstance(graph.nodes, NodeTable) and isinstance(graph.values, ValueTable)
    assert list(graph.nodes) == list(NodeTable(graph.nodes))
    assert graph.nodes[-1] == graph.nodes[len(graph.nodes) - 1]
    assert graph.values[-1].name == list(graph.values)[-1].name
    names = [v.name for v in graph.values]
    assert len(set(names)) == len(names)
    with pytest.raises(IndexError):
        graph.nodes[len(graph.nodes)]


def _capture_in_a_worker(rows: int) -> int:
    return len(ph.capture(nn.Linear(8, 8), batch(rows), squared).nodes)


def test_workers_of_a_pool_which_may_have_no_children_capture_too() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_capture_in_a_worker, (4,)) == _capture_in_a_worker(4)


def test_a_child_that_does_not_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does not that was forked while another thread had a lock."""
    module = sys.modules["packhorse.graph.capture"]  # by its name it is the function
    started, child, originally = list[Any](), module._child, module._start
    monkeypatch.setattr(module, "STARTING", 0.5)

    def start(make: Any) -> Any:
        started.append(make)
        stuck = len(started) == 1
        with monkeypatch.context() as patch:
            patch.setattr(module, "_child", (lambda *_: time.sleep(60)) if stuck else child)
            return originally(make)

    monkeypatch.setattr(module, "_start", start)
    assert ph.capture(nn.Linear(2, 2), torch.ones(2, 2), lambda y, _: y.mean()).nodes
    assert len(started) == 2

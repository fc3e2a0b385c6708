"""Oracles: plain PyTorch, and the simplest way to run segments. Everything packhorse computes is compared with these."""

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packhorse as ph
from packhorse.graph.entry import bind, find_loss
from packhorse.graph.graph import Rng

Loss = Callable[[Any, Any], Tensor]


@dataclass
class Result:
    """What one forward and backward leave behind."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run_plain(model: nn.Module, batch: Any, loss: Loss | None = None, *, seed: int = 0) -> Result:
    """The module as it is, on a copy: forward, backward."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    args, kwargs = bind(model, batch, loss is not None)
    value = find_loss(model(*args, **kwargs), batch, loss)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(value.detach(), gradients, dict(model.named_buffers()))


def run_composed(
    model: nn.Module, partition: ph.Partition, batch: Any, *, seed: int = 0, rng: Rng | None = None
) -> Result:
    """All segments in one autograd graph."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    value = partition.compose(parameters, buffers, batch, rng)
    value.backward()
    return Result(value.detach(), {n: p.grad for n, p in parameters.items() if p.grad is not None}, buffers)


def run_segments(
    model: nn.Module, partition: ph.Partition, batch: Any, *, seed: int = 0, rng: Rng | None = None
) -> Result:
    """Segment by segment: forward on detached leaves, backward from last to first, one autograd.grad each."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    graph = partition.graph
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values, rows = graph.inputs(batch), graph.batch.count_rows(batch)
    runs = []
    for segment in partition.segments:
        leaves = {n: values[n].detach().requires_grad_(values[n].requires_grad) for n in segment.inputs}
        outputs = segment(parameters, buffers, leaves, rng, rows=rows)
        values.update(outputs)
        runs.append((segment, leaves, outputs))
    value = partition.finish(values, rows)
    gradients = {graph.values[graph.outputs[0]].name: torch.ones_like(value)}
    for segment, leaves, outputs in reversed(runs):
        gradients.update(segment.differentiate(parameters, leaves, outputs, gradients))
    return Result(value.detach(), {n: gradients[n] for n in parameters if n in gradients}, buffers)


def assert_same(found: Result, expected: Result, where: str = "") -> None:
    """Bit-identical loss, gradients and buffers, and no gradient more or less."""
    assert torch.equal(found.loss, expected.loss), f"{where}: loss {found.loss} instead of {expected.loss}"
    assert found.gradients.keys() == expected.gradients.keys(), f"{where}: gradients of other parameters"
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), f"{where}: gradient of {name} differs"
    for name, buffer in expected.buffers.items():
        assert torch.equal(found.buffers[name], buffer), f"{where}: buffer {name} differs"


def assert_partitions_same(
    model: nn.Module,
    graph: ph.Graph,
    batches: list[Any],
    loss: Loss | None = None,
    counts: tuple[int | str, ...] = (1, 2, 3, 5, "finest"),
) -> None:
    """The issue's promise: any partition, composed or segment by segment, on any batch, is the plain module."""
    finest = len(ph.partition(graph, "finest").segments)
    for batch in batches:
        expected = run_plain(model, batch, loss)
        for count in counts:
            if isinstance(count, int) and count > finest:
                continue
            partition = ph.partition(graph, count)
            where = f"{graph.name} in {count}, {graph.batch.count_rows(batch)} rows"
            assert_same(run_composed(model, partition, batch), expected, f"{where}, composed")
            assert_same(run_segments(model, partition, batch), expected, f"{where}, by segment")


class Keyed(TorchDispatchMode):
    """Plain PyTorch with our keys: sets the generator before every random operation, counting them in order."""

    def __init__(self, rng: Rng):
        super().__init__()
        self.rng, self.count = rng, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.rng(self.count)
            self.count += 1
        return func(*args, **(kwargs or {}))


def seed_by_key(key: int | str) -> None:
    torch.default_generator.manual_seed(zlib.crc32(str(key).encode()))


@contextlib.contextmanager
def resident_memory() -> Iterator[Callable[[], float]]:
    """Growth of this process's resident memory since entry, in MB."""

    def now() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6

    start = now()
    yield lambda: now() - start

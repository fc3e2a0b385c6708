"""Oracles: plain PyTorch, and the simplest way to run segments. Everything packhorse computes is compared with these."""

import contextlib
import copy
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packhorse as ph
from packhorse.graph.entry import bind, find_loss
from packhorse.graph.graph import Rng
from packhorse.keys import random_seed
from packhorse.partition import Rest
from packhorse.precision import CrossEntropyInFp32, list_casts

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
    model: nn.Module,
    partition: ph.Partition,
    batch: Any,
    *,
    seed: int = 0,
    rng: Rng | None = None,
    halves: bool = False,
) -> Result:
    """Segment by segment: forward, then backward from last to first, one autograd.grad each, on a graph that is built again.

    In `halves`, gradients of inputs come first, and those of parameters when all of the former are there.
    """
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    graph = partition.graph
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values, rows = graph.inputs(batch), graph.batch.count_rows(batch)
    runs = []
    for segment in partition.segments:
        leaves = {n: values[n].detach().requires_grad_(values[n].requires_grad) for n in segment.inputs}
        drawn, before = torch.get_rng_state(), {name: buffer.clone() for name, buffer in buffers.items()}
        values.update(segment(parameters, buffers, leaves, rng, rows=rows))
        ended = torch.get_rng_state()
        torch.set_rng_state(drawn)
        outputs = segment.rebuild(parameters, before, leaves, rng, rows=rows)
        assert torch.equal(torch.get_rng_state(), ended)
        runs.append((segment, leaves, outputs))
    value = partition.finish(values, rows)
    gradients = {graph.values[graph.outputs[0]].name: torch.ones_like(value)}
    rests = []
    users = Counter(name for segment in partition.segments for name in segment.parameters)
    for segment, leaves, outputs in reversed(runs):
        if halves and all(users[name] == 1 for name in segment.parameters):  # what is tied is added up in order
            rests.append(Rest(segment, parameters, leaves, outputs, dict(gradients)))
            gradients.update(rests[-1].begin())
        else:
            gradients.update(segment.differentiate(parameters, leaves, outputs, gradients))
    for rest in rests:
        gradients.update(rest.finish())
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
            if count in (2, 5):
                assert_same(run_segments(model, partition, batch, halves=True), expected, f"{where}, in halves")


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


@dataclass
class Run:
    """What some steps of training leave behind."""

    losses: list[float]
    state: dict[str, Tensor]


def split(batch: Any, microbatches: int) -> list[Any]:
    """Microbatches along dimension 0, of equal size but for the last, as `torch.chunk` makes them."""
    tensors, tree = torch.utils._pytree.tree_flatten(batch)
    columns = [t.chunk(microbatches) for t in tensors]
    return [torch.utils._pytree.tree_unflatten(list(row), tree) for row in zip(*columns, strict=True)]


def train_plain(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[Any],
    loss: Loss | None = None,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    weight: Callable[[Any], float] | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    seed: int = 0,
    keyed: bool = False,
    precision: str = "fp32",
    replicas: int = 1,
) -> Run:
    """The plain loop: microbatches in order, gradients summed by autograd, one optimizer step a batch.

    With `replicas` each of so many sums those of its share of the microbatches, and then their sums are added. `keyed` sets
    the generator by key before every random operation. With a precision, a second model in that precision runs and its
    gradients are summed in fp32 in the first: exactly the casts that `list_casts` names.
    """
    model = copy.deepcopy(model).train()
    working = _working_copy(model, precision)
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    casts = CrossEntropyInFp32() if precision != "fp32" else contextlib.nullcontext()
    losses = []
    scale = 65536.0 if precision == "fp16" else 1.0
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        parts = split(batch, microbatches)
        weights = [float(weight(p)) if weight else float(torch.utils._pytree.tree_leaves(p)[0].shape[0]) for p in parts]
        _refresh(working, model)
        total, sums = None, []
        for k, part in enumerate(parts):
            part = _cast_inputs(part, precision)

            def rng(op: int | str, step: int = step, k: int = k) -> None:
                torch.default_generator.manual_seed(random_seed(seed, step, op, k))

            with Keyed(rng) if keyed else contextlib.nullcontext(), casts:
                args, kwargs = bind(working, part, loss is not None)
                value = find_loss(working(*args, **kwargs), part, loss)
                product = value.float() * (weights[k] / sum(weights))
                (product * scale).backward()
            total = product.detach() if total is None else total + product.detach()
            _collect(working, model)
            if replicas > 1 and (k + 1) % (microbatches // replicas) == 0:
                sums.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
        for own in sums:
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        losses.append(float(total))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if scale != 1.0 and not all(g.isfinite().all() for g in gradients):
            scale /= 2
            continue
        torch._foreach_mul_(gradients, 1 / scale)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    if working is not model:
        for name, buffer in working.named_buffers():
            model.get_buffer(name).copy_(buffer)
    return Run(losses, {n: t.detach().clone() for n, t in model.state_dict().items()})


def _working_copy(model: nn.Module, precision: str) -> nn.Module:
    if precision == "fp32":
        return model
    working = copy.deepcopy(model)
    dtypes = {cast.what: cast.dtype for cast in list_casts(model, precision)}
    for name, parameter in working.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return working


def _refresh(working: nn.Module, model: nn.Module) -> None:
    if working is not model:
        for ours, masters in zip(working.parameters(), model.parameters(), strict=True):
            ours.data.copy_(masters.data)


def _collect(working: nn.Module, model: nn.Module) -> None:
    """Adds the working gradients of one microbatch to the masters', in fp32."""
    if working is model:
        return
    for ours, masters in zip(working.parameters(), model.parameters(), strict=True):
        if ours.grad is not None:
            gradient = ours.grad.float()
            masters.grad = gradient if masters.grad is None else masters.grad.add_(gradient)
            ours.grad = None


def _cast_inputs(batch: Any, precision: str) -> Any:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    cast = lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t  # noqa: E731
    return torch.utils._pytree.tree_map_only(Tensor, cast, batch)


def train_by_segment_sums(
    model: nn.Module,
    partition: ph.Partition,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[Any],
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Run:
    """The oracle for ties: every segment's use of a parameter is a leaf of its own, all in one graph.

    Gradients of a use are summed over microbatches by autograd; then the uses are summed from last to first.
    """
    model = copy.deepcopy(model).train()
    optimizer = make_optimizer(model.parameters())
    masters, buffers, graph = dict(model.named_parameters()), dict(model.named_buffers()), partition.graph
    losses = []
    for step, batch in enumerate(batches):
        leaves = [
            {n: masters[n].detach().to(graph.parameters[n].working).requires_grad_() for n in s.parameters}
            for s in partition.segments
        ]
        sums: list[dict[str, Tensor]] = [{} for _ in leaves]
        parts = split(batch, microbatches)
        rows = [graph.batch.count_rows(p) for p in parts]
        total = None
        for k, part in enumerate(parts):

            def rng(op: int | str, step: int = step, k: int = k) -> None:
                torch.default_generator.manual_seed(random_seed(seed, step, op, k))

            values = graph.inputs(part)
            for segment, own in zip(partition.segments, leaves, strict=True):
                values.update(segment(own, buffers, values, rng, rows=rows[k]))
            product = partition.finish(values, rows[k]).float() * (rows[k] / sum(rows))
            product.backward()
            total = product.detach() if total is None else total + product.detach()
            for own, summed in zip(leaves, sums, strict=True):
                for name, leaf in own.items():
                    if leaf.grad is not None:
                        found = leaf.grad.to(masters[name].dtype)
                        summed[name] = summed[name] + found if name in summed else found.clone()
                        leaf.grad = None
        optimizer.zero_grad()
        for summed in reversed(sums):
            for name, gradient in summed.items():
                before = masters[name].grad
                masters[name].grad = gradient if before is None else before + gradient
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(float(total))
    return Run(losses, {n: t.detach().clone() for n, t in model.state_dict().items()})


def assert_same_run(trainer: ph.Trainer, losses: list[float], expected: Run, where: str = "") -> None:
    """Bit-identical losses, parameters and buffers."""
    assert losses == expected.losses, f"{where}: losses {losses} instead of {expected.losses}"
    found = trainer.state_dict()
    assert set(found) == set(expected.state), f"{where}: other names"
    for name, tensor in expected.state.items():
        assert torch.equal(found[name], tensor), f"{where}: {name} differs by {(found[name] - tensor).abs().max():.3g}"


@contextlib.contextmanager
def resident_memory() -> Iterator[Callable[[], float]]:
    """Growth of this process's resident memory since entry, in MB."""

    def now() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6

    start = now()
    yield lambda: now() - start

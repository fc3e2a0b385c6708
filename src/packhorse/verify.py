"""Verification: the streamed run beside the plain one, value by value.

In: a model with weights, an optimizer, an example. Out: `Verification`, one row a value compared. The plain side is a copy of
the model, trained by an ordinary loop with the same microbatches, keys of randomness and casts.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.errors import PackhorseError
from packhorse.graph.entry import bind, find_loss
from packhorse.keys import random_seed
from packhorse.precision import CrossEntropyInFp32, cast_floats, list_casts, working_dtype
from packhorse.tasks import Loss
from packhorse.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value: `difference` is the largest, relative to the largest magnitude of the plain one."""

    name: str
    equal: bool
    difference: float
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """What was compared. `ok`: all equal, or, where a note says why not bit for bit, within tolerance."""

    comparisons: tuple[Comparison, ...]
    tolerance: float
    steps: int
    plain_seconds: float
    streamed_seconds: float

    @property
    def ok(self) -> bool:
        return all(c.equal or (c.note and c.difference <= self.tolerance) for c in self.comparisons)

    @property
    def num_equal(self) -> int:
        return sum(c.equal for c in self.comparisons)


def verify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Any,
    loss: Loss | None = None,
    *,
    steps: int = 3,
    **options: Any,
) -> Verification:
    """Trains copies of the model for a few steps, streamed and plainly, and compares losses, parameters and buffers.

    `options` are those of `Trainer`. Where a module is called in several segments, over several microbatches, no plain loop
    sums its gradient in the streamed order: then all is compared within a tolerance, and a note says so.
    """
    if any(p.is_meta for p in model.parameters()):
        raise PackhorseError("verify runs the model plainly too, so it needs weights; build it on a real device")
    if steps < 1:
        raise PackhorseError(f"steps is {steps}, expected at least 1")
    plain, plain_optimizer = _copy(model, optimizer)
    streamed, streamed_optimizer = _copy(model, optimizer)
    options.setdefault("strategy", "relay")
    trainer = Trainer(streamed, streamed_optimizer, example, loss=loss, **options)
    try:
        started = time.perf_counter()
        losses = [trainer.step(example) for _ in range(steps)]
        state = trainer.state_dict()
        middle = time.perf_counter()
        beside = _Plain(plain, plain_optimizer, trainer)
        expected = beside.train(example, loss, steps)
        ended = time.perf_counter()
        tied = beside.find_inseparable()
        note = f"{tied} is tied, and summed segment by segment" if tied else ""
        rows = [
            Comparison(
                f"loss of step {i}",
                found == wanted,
                _relative(torch.tensor(found), torch.tensor(wanted)),
                note if i else "",
            )
            for i, (found, wanted) in enumerate(zip(losses, expected, strict=True))
        ]
        for name, tensor in plain.state_dict().items():
            found = state[name]
            rows.append(Comparison(name, torch.equal(found, tensor), _relative(found, tensor), note))
    finally:
        trainer.close()
    # Adam divides by the gradient's own size: where a gradient is zero but for rounding, rounding decides the step.
    return Verification(tuple(rows), 1e-2 if note else 0.0, steps, ended - middle, middle - started)


def _copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Copied together, so that the copied optimizer is over the copied parameters."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo).train()
    return copied, copy.deepcopy(optimizer, memo)


def _relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    gap = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    return gap / largest if largest else gap


class _Plain:
    """A model trained by an ordinary loop, on a working copy in which every use of a tied parameter is a leaf of its own.

    So a tied gradient can be summed the way the streamed run does: over microbatches first, then from last use to first.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Trainer):
        self.model, self.optimizer, self.trainer = model, optimizer, trainer
        dtypes = {cast.what: cast.dtype for cast in list_casts(model, trainer.precision)}
        names = {id(p): name for name, p in model.named_parameters()}
        self.working = copy.deepcopy(model)
        self.leaves: dict[str, list[nn.Parameter]] = {}
        for ours, theirs in zip(self.working.modules(), model.modules(), strict=True):
            for attribute, master in theirs._parameters.items():
                if master is not None:
                    name = names[id(master)]
                    leaf = nn.Parameter(
                        master.detach().to(dtypes.get(name, master.dtype), copy=True), master.requires_grad
                    )
                    setattr(ours, attribute, leaf)
                    self.leaves.setdefault(name, []).append(leaf)

    def find_inseparable(self) -> str:
        """A tied parameter whose uses lie in more segments than it has places in the model: a module called twice."""
        layout = self.trainer._layout
        for name, leaves in self.leaves.items():
            uses = layout.users[layout.places[name][0].name]
            if len(uses) > 1 and (len(leaves) < len(uses) or len(leaves) > 2) and self.trainer.plan.microbatches > 1:
                return name
        return ""

    def train(self, batch: Any, loss: Loss | None, steps: int) -> list[float]:
        trainer = self.trainer
        spec = trainer._partition.graph.batch
        rows = spec.count_rows(batch)
        parts = spec.split(batch, -(-rows // min(trainer.plan.microbatches, rows)))
        weights = [float(trainer.weight(p)) if trainer.weight else float(spec.count_rows(p)) for p in parts]
        shares = [weight / sum(weights) for weight in weights]
        scale = trainer.scaler.scale if trainer.scaler else 1.0
        losses = []
        for step in range(steps):
            self._refresh()
            total, sums = None, dict[nn.Parameter, Tensor]()
            for k, (part, share) in enumerate(zip(parts, shares, strict=True)):
                value = self._run(part, loss, step, k).float() * share
                (value * scale).backward()
                total = value.detach() if total is None else total + value.detach()
                self._collect(sums)
            self._step(sums, scale)
            assert total is not None
            losses.append(float(total))
        for name, buffer in self.working.named_buffers():
            self.model.get_buffer(name).copy_(buffer)
        return losses

    def _run(self, part: Any, loss: Loss | None, step: int, k: int) -> Tensor:
        dtype = working_dtype(self.trainer.precision)
        cast = torch.utils._pytree.tree_map_only(Tensor, lambda t: cast_floats(t, dtype), part)
        with _plain_run(self.trainer, step, k):
            args, kwargs = bind(self.working, cast, loss is not None)
            return find_loss(self.working(*args, **kwargs), cast, loss)

    def _refresh(self) -> None:
        for name, master in self.model.named_parameters():
            for leaf in self.leaves[name]:
                leaf.data.copy_(master.data)

    def _collect(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Adds the gradients of a microbatch, in the master's dtype."""
        for name, master in self.model.named_parameters():
            for leaf in self.leaves[name]:
                if leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad.to(master.dtype), None
                    sums[leaf] = sums[leaf].add_(gradient) if leaf in sums else gradient

    def _step(self, sums: dict[nn.Parameter, Tensor], scale: float) -> None:
        for name, master in self.model.named_parameters():
            found = [sums[leaf] for leaf in reversed(self.leaves[name]) if leaf in sums]
            master.grad = sum(found[1:], start=found[0]) * (1 / scale) if found else None
        if self.trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.clip_norm)
        self.optimizer.step()


@contextlib.contextmanager
def _plain_run(trainer: Trainer, step: int, k: int) -> Iterator[None]:
    def rng(operation: int) -> None:
        torch.default_generator.manual_seed(random_seed(trainer.seed, step, operation, k))

    with _Keyed(rng), contextlib.nullcontext() if trainer.precision == "fp32" else CrossEntropyInFp32():
        yield


class _Keyed(TorchDispatchMode):
    """Sets the generator before every random operation, counting them in order."""

    def __init__(self, rng: Callable[[int], None]):
        super().__init__()
        self.rng, self.count = rng, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.rng(self.count)
            self.count += 1
        return func(*args, **(kwargs or {}))

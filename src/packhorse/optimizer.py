"""Any torch.optim optimizer, run piece by piece over views of blocks.

In: the user's optimizer object, which stays the source of hyper-parameters, and the model's parameters. Out: `Stepper`, which
steps any piece of any parameter with states given to it, and knows beforehand which states there will be and whether a
parameter may be cut into tiles without changing a bit. That is found by trying it, not by a list of names.
"""

import inspect
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from packhorse.errors import OptimizerError
from packhorse.graph.allocations import Allocations
from packhorse.threads import using_threads

Group = dict[str, Any]

TILE = 1 << 17  # elements: with gradient and states it fits the cache, which brings plain optimizers near fused speed
FUSED_TILE = 1 << 20  # elements for those that pass over memory once anyway: fewer calls
TOGETHER = 1 << 20  # elements of all tiles in a call, one after another
PIECES = 64  # that are stepped to see what one takes


@dataclass(frozen=True, slots=True)
class StateKind:
    """One entry of a parameter's optimizer state. `large` ones have the parameter's size and are stored in blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    large: bool


@dataclass
class Piece:
    """A parameter, or a part of it, with its gradient and state."""

    group: int
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


class Stepper:
    """Steps pieces of parameters as the user's optimizer would step them whole."""

    def __init__(self, optimizer: Optimizer, model: nn.Module):
        _check(optimizer)
        self.optimizer = optimizer
        self.groups = self._find_groups(model)  # name -> index of its parameter group
        self._step = _find_step(type(optimizer))
        self._has_state = any(optimizer.state.values())  # from training before, or made by the constructor
        self._kinds: dict[Any, tuple[StateKind, ...]] = {}
        self._tileable: dict[int, bool] = {}

    def _find_groups(self, model: nn.Module) -> dict[str, int]:
        names = {id(p): sys.intern(name) for name, p in model.named_parameters()}
        groups: dict[str, int] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise OptimizerError(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} (group {index}) that is none of "
                        f"{type(model).__name__}'s; build it over this model's parameters(), after any .to() or weight tying"
                    )
                if parameter.requires_grad:
                    groups[names[id(parameter)]] = index
        if not groups:
            raise OptimizerError(f"the optimizer holds no trainable parameter of {type(model).__name__}")
        return groups

    def read_groups(self) -> list[Group]:
        """The hyper-parameters of all groups as they are now, whatever happens to them later."""
        return [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def step(self, groups: Sequence[Group], pieces: Sequence[Piece]) -> None:
        """One step of these pieces, in place; their states afterwards are in `piece.state`."""
        members: dict[int, list[Tensor]] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece in pieces:
            piece.parameter.grad = piece.gradient
            members.setdefault(piece.group, []).append(piece.parameter)
            if piece.state:
                state[piece.parameter] = piece.state
        shadow = _shadow(self.optimizer, [{**groups[g], "params": tensors} for g, tensors in members.items()], state)
        with torch.no_grad():
            self._step(shadow)
        for piece in pieces:
            piece.state = state[piece.parameter]
            piece.parameter.grad = None

    def state_kinds(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateKind, ...]:
        """The states a parameter of that shape will have, found by stepping a small one of as many dimensions."""
        group = self.groups[name]
        key = (group, shape, dtype)
        if key not in self._kinds:
            self._kinds[key] = self._find_kinds(group, shape, dtype)
        return self._kinds[key]

    def _find_kinds(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateKind, ...]:
        small = _PRIMES[: len(shape)]
        piece = Piece(group, torch.zeros(small, dtype=dtype), torch.ones(small, dtype=dtype), {})
        self._step_probe(piece)
        sizes = dict(zip(small, shape, strict=True))
        kinds = []
        for name, value in piece.state.items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise OptimizerError(
                    f"{type(self.optimizer).__name__} keeps a {type(value).__name__} as state {name!r}; states must be tensors"
                )
            if any(size not in sizes and size != 1 for size in value.shape):
                raise OptimizerError(
                    f"{type(self.optimizer).__name__} keeps state {name!r} of shape {list(value.shape)} for a parameter of "
                    f"shape {list(small)}; its size for {list(shape)} cannot be told beforehand"
                )
            scaled = tuple(sizes.get(size, size) for size in value.shape)
            kinds.append(StateKind(name, scaled, value.dtype, value.shape == piece.parameter.shape and value.ndim > 0))
        return tuple(kinds)

    def _step_probe(self, piece: Piece) -> None:
        """A step of a piece that is none of the model's; some optimizers make states in their constructor."""
        if not piece.state:
            piece.state = self.initial_state(piece.parameter)
        try:
            self.step(self.read_groups(), [piece])
        except Exception as error:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} cannot step a parameter of shape {list(piece.parameter.shape)} by itself: "
                f"{error}"
            ) from error

    def initial_state(self, parameter: Tensor) -> dict[str, Any]:
        """The states the optimizer's constructor makes for a parameter; most make none before the first step."""
        if not self._has_state:
            return {}
        fresh = self._construct([nn.Parameter(parameter.detach().clone())])
        return dict(next(iter(fresh.state.values()), {}))

    def _construct(self, parameters: Any) -> Optimizer:
        kind: Any = type(self.optimizer)
        accepted = inspect.signature(kind.__init__).parameters
        made: Optimizer = kind(parameters, **{k: v for k, v in self.optimizer.defaults.items() if k in accepted})
        return made

    def over(self, groups: list[Group]) -> Optimizer:
        """The same kind of optimizer with the same settings over other parameters, by groups; constructed anew only if that
        makes states, since a constructor may ask for more than its defaults tell."""
        return self._construct(groups) if self._has_state else _shadow(self.optimizer, groups, defaultdict(dict))

    def is_tileable(self, name: str) -> bool:
        """Whether stepping a parameter tile by tile gives the same bits: tried, over three steps, with this group's values."""
        group = self.groups[name]
        if group not in self._tileable:
            self._tileable[group] = self._try_tiles(group)
        return self._tileable[group]

    def tile(self, name: str) -> int:
        """Elements of a parameter that are stepped at a time."""
        return FUSED_TILE if self.optimizer.param_groups[self.groups[name]].get("fused") else TILE

    @property
    def together(self) -> int:
        """Elements of all tiles that are stepped by one call: those that pass over all of them at a time want few."""
        return TILE if any(group.get("foreach") for group in self.optimizer.param_groups) else TOGETHER

    def measure(self) -> tuple[float, float]:
        """Seconds that a step takes on one core for one element, over more memory than a cache holds, and for one piece."""
        name, group = next(iter(self.groups.items()))
        size = self.tile(name)
        with using_threads(1):
            small, large = self._time_pieces(group, 1, PIECES), self._time_pieces(group, size, 32 * TILE // size)
        return max(large - small, 0.1 * large) / size, small

    def _time_pieces(self, group: int, size: int, count: int) -> float:
        """Seconds for one of so many, as many in a call as an update has."""
        pieces = [Piece(group, torch.zeros(size), torch.ones(size), {}) for _ in range(count)]
        for piece in pieces:
            self._step_probe(piece)  # makes the states
        groups, number = self.read_groups(), self.together // size
        started = time.perf_counter()
        for i in range(0, count, number):
            self.step(groups, pieces[i : i + number])
        return (time.perf_counter() - started) / count

    def temporaries(self, name: str, dimensions: int) -> float:
        """What a step of a whole parameter allocates on the way, at most at a time, in sizes of the parameter.

        It is tried on one of as many dimensions: some optimizers take only matrices.
        """
        shape = (TILE // 64, 64, *(1 for _ in range(dimensions - 2))) if dimensions > 1 else (TILE,)
        piece = Piece(self.groups[name], torch.zeros(shape), torch.ones(shape), {})
        self._step_probe(piece)  # makes the states
        states = [value for value in piece.state.values() if isinstance(value, Tensor)]
        with Allocations([piece.parameter, piece.gradient, *states]) as allocations:
            self._step_probe(piece)
        return allocations.peak / piece.parameter.nbytes

    def _try_tiles(self, group: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        shape, cut = (131, 97), 4096
        start = torch.randn(shape, generator=generator)
        whole = Piece(group, start.clone(), start, {})
        bounds = [(a, min(a + cut, start.numel())) for a in range(0, start.numel(), cut)]
        tiles = [Piece(group, start.flatten()[a:b].clone(), start, {}) for a, b in bounds]
        for _ in range(3):
            gradient = torch.randn(shape, generator=generator)
            whole.gradient = gradient
            self._step_probe(whole)
            for tile, (a, b) in zip(tiles, bounds, strict=True):
                tile.gradient = gradient.flatten()[a:b].clone()
                self._step_probe(tile)
        if any(tile.state.keys() != whole.state.keys() for tile in tiles):
            return False
        for tile, (a, b) in zip(tiles, bounds, strict=True):
            pairs = [(whole.parameter, tile.parameter)]
            pairs += [(whole.state[k], v) for k, v in tile.state.items() if isinstance(v, Tensor)]
            for full, part in pairs:
                expected = full.flatten()[a:b] if full.shape == whole.parameter.shape else full
                if expected.shape != part.shape or not torch.equal(expected, part):
                    return False
        return True


_PRIMES = (3, 5, 7, 11, 13, 17, 19)


def _shadow(optimizer: Optimizer, groups: list[Group], state: Any) -> Optimizer:
    """The same optimizer over other tensors: its class and settings without its parameters, states and hooks."""
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # LR schedulers wrap step
    shadow.__dict__.update(
        param_groups=groups,
        state=state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return shadow


def _find_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The optimizer's step. torch wraps its own for the profiler and for dynamo, which it loads for that: 60 MB."""
    step: Any = kind.step
    return inspect.unwrap(step) if step.__module__.startswith("torch.optim.") else step


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    name = type(optimizer).__name__
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (parameter is not None and parameter.default is parameter.empty):
        raise OptimizerError(f"{name} calls the model itself, through a closure, which a streamed step cannot offer")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(f"{name} needs sparse gradients, which are not streamed; use Adam and dense embeddings")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise OptimizerError(f"{name} has step hooks, which would run for every piece of the model; remove them first")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerError(f"group {index} of {name} is differentiable, which a streamed step cannot be")


def refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise OptimizerError(
                f"module {name!r} makes sparse gradients (sparse=True), which are not streamed; set sparse=False"
            )

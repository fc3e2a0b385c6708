"""Synthetic labels: what a part that trains alone is to make of each class, where the model was cut.

In: the shape of a row at the cut, the number of classes, a seed. Out: `Labels`: a loss for the part before the cut, a read-out
of classes from its output, and made-up outputs for the part behind it. Parts need to share nothing but the seed.

Vectors are taken as they are. Of feature maps, [channels, height, width] or along any number of sides, and sequences
[tokens, width] the mean over positions counts, or, with `positions="each"`, every position by itself; `grid` keeps that many
cells along each side of a map: a code has a part for each of them.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.keys import fold
from packhorse.sil.hadamard import make_codes

Positions = Literal["pooled", "each"]


@dataclass(frozen=True)
class Site:
    """Where labels are wanted: at cut `index`, counted from 0, whose value has rows of this shape.

    `is_map`: channels come first, then positions, along one, two or three sides; else it is a vector, or a sequence of them.
    """

    index: int
    shape: tuple[int, ...]
    num_classes: int
    seed: int
    is_map: bool = False

    @property
    def generator(self) -> torch.Generator:
        """The same for all who know the seed."""
        return torch.Generator().manual_seed(fold(self.seed * 1_000_003 + self.index))


class Labels(Protocol):
    """What a part is trained on. `output` is the value at the cut, [rows, ...]; `classes` are integers, [rows]."""

    def loss(self, output: Tensor, classes: Tensor) -> Tensor:
        """A scalar, the mean over rows; it is captured with the part, so it may hold tensors but not branch on data."""
        ...

    def scores(self, output: Tensor) -> Tensor:
        """[rows, classes]: the highest is the class that the output stands for."""
        ...

    def imitate(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Outputs as the part might make them for these classes: what the next part trains on until there are real ones."""
        ...


class Scheme(Protocol):
    """Makes labels for a site; it may be a function.

    With an attribute `activated` it says whether it wants the value behind an activation, as it gets without, or the one
    before it.
    """

    def __call__(self, site: Site) -> Labels: ...


@dataclass(frozen=True)
class Reading:
    """How a value becomes vectors, one a row, or one a position."""

    shape: tuple[int, ...]
    is_map: bool
    positions: Positions = "pooled"
    grid: int = 1

    @property
    def width(self) -> int:
        if len(self.shape) == 1:
            return self.shape[0]
        features = self.shape[0] if self.is_map else self.shape[-1]
        cells = math.prod(min(self.grid, size) for size in self.shape[1:]) if self.is_map else 1
        return features * (cells if self.positions == "pooled" else 1)

    def vectors(self, output: Tensor) -> Tensor:
        """[rows, ...] -> [rows, width], or [rows, positions, width]."""
        if len(self.shape) == 1:
            return output
        if self.positions == "each":
            return output.flatten(2).transpose(1, 2) if self.is_map else output
        if not self.is_map:
            return output.mean(1)
        if self.grid == 1:
            return output.flatten(2).mean(2)
        pools: list[Any] = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
        return pools[len(self.shape) - 2](output, [min(self.grid, size) for size in self.shape[1:]]).flatten(1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Values of full shape whose vectors are these, the same at every position of a cell."""
        if len(self.shape) == 1:
            return vectors
        rows = vectors.shape[0]
        if not self.is_map:
            return vectors[:, None, :].expand(rows, *self.shape).contiguous()
        cells = [min(self.grid, size) if self.positions == "pooled" else 1 for size in self.shape[1:]]
        return F.interpolate(vectors.view(rows, self.shape[0], *cells), size=self.shape[1:], mode="nearest")


class _Codes:
    """One vector a class, and what all schemes with such vectors share."""

    def __init__(self, codes: Tensor, reading: Reading):
        self.codes, self.reading = codes, reading

    def _vectors(self, output: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        vectors = self.reading.vectors(output)
        if vectors.ndim == 2:
            return vectors, classes
        return vectors.flatten(0, 1), classes.repeat_interleave(vectors.shape[1])

    def _mean_scores(self, scores: Tensor) -> Tensor:
        return scores if scores.ndim == 2 else scores.mean(1)


class _Targets(_Codes):
    """The output is to be the code itself: squared error, read out by the nearest code."""

    def __init__(self, codes: Tensor, reading: Reading, noise: float):
        super().__init__(codes, reading)
        self.noise = noise

    def loss(self, output: Tensor, classes: Tensor) -> Tensor:
        vectors, classes = self._vectors(output, classes)
        return F.mse_loss(vectors, self.codes[classes].to(vectors.dtype))

    def scores(self, output: Tensor) -> Tensor:
        vectors = self.reading.vectors(output).float()
        codes = self.codes.to(vectors.device)
        return self._mean_scores(2 * vectors @ codes.T - codes.square().sum(1))  # the distance without what all share

    def imitate(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        codes = self.codes[classes]
        return self.reading.spread(codes + self.noise * torch.randn(codes.shape, generator=generator))


class _Directions(_Codes):
    """The output's product with its class's code is to be the largest: cross entropy over all products."""

    def __init__(self, codes: Tensor, reading: Reading, noise: float, strength: float, smoothing: float):
        super().__init__(codes, reading)
        self.noise, self.strength, self.smoothing = noise, strength, smoothing

    def loss(self, output: Tensor, classes: Tensor) -> Tensor:
        vectors, classes = self._vectors(output, classes)
        return F.cross_entropy(vectors @ self.codes.T.to(vectors.dtype), classes, label_smoothing=self.smoothing)

    def scores(self, output: Tensor) -> Tensor:
        vectors = self.reading.vectors(output).float()
        return self._mean_scores((vectors @ self.codes.T.to(vectors.device)).softmax(-1))

    def imitate(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        codes = F.normalize(self.codes[classes], dim=1) * self.strength * math.sqrt(self.codes.shape[1])
        noisy = codes + self.noise * torch.randn(codes.shape, generator=generator)
        return self.reading.spread(noisy.relu())  # it stands for what comes behind an activation


@dataclass(frozen=True)
class Uniform:
    """The paper's: kappa * U(0, 1), squared error."""

    kappa: float = 1.0
    positions: Positions = "pooled"
    grid: int = 1
    noise: float = 0.3
    activated: bool = False

    def __call__(self, site: Site) -> Labels:
        reading = Reading(site.shape, site.is_map, self.positions, self.grid)
        codes = self.kappa * torch.rand(site.num_classes, reading.width, generator=site.generator)
        return _Targets(codes, reading, self.noise * self.kappa)


@dataclass(frozen=True)
class Hadamard:
    """Rows of a Hadamard matrix with random signs of its columns, squared error: classes as far apart as can be.

    Lengths that are no multiple of four have no such matrix; their codes are a few places off (sil/hadamard.py).
    """

    scale: float = 1.0
    positions: Positions = "pooled"
    grid: int = 1
    noise: float = 0.6
    activated: bool = False

    def __call__(self, site: Site) -> Labels:
        reading = Reading(site.shape, site.is_map, self.positions, self.grid)
        if site.num_classes > reading.width:
            raise PackhorseError(
                f"{site.num_classes} classes need codes of at least that length to be orthogonal, but the value at cut "
                f"{site.index} has {reading.width}: cut where it is wider, keep more cells of a map (grid), or use "
                "labels='readout'"
            )
        codes = make_codes(site.num_classes, reading.width, site.generator)
        return _Targets(self.scale * codes.float(), reading, self.noise * self.scale)


@dataclass(frozen=True)
class Readout:
    """A fixed random read-out: softmax over the products with codes of zero mean, cross entropy.

    With a little `smoothing` a part stops pulling classes apart that it has separated, and leaves more for those behind it. Of
    maps four by four cells count: a mean over all of a map asks an early part for what only a later one can see.
    """

    gain: float = 1.0
    smoothing: float = 0.1
    positions: Positions = "pooled"
    grid: int = 4
    noise: float = 1.0
    strength: float = 1.0
    activated: bool = True

    def __call__(self, site: Site) -> Labels:
        reading = Reading(site.shape, site.is_map, self.positions, self.grid)
        codes = torch.randn(site.num_classes, reading.width, generator=site.generator)
        codes = self.gain * (codes - codes.mean(0)) / math.sqrt(reading.width)
        return _Directions(codes, reading, self.noise, self.strength, self.smoothing)


def check_labels(labels: Labels, site: Site, dtype: torch.dtype, *, imitates: bool) -> None:
    """Tries labels on two rows, before anything is trained on them; `imitates`, if made-up outputs will be asked for."""
    classes, where = torch.tensor([0, site.num_classes - 1]), f"the labels at cut {site.index}"
    output = torch.randn(2, *site.shape, generator=site.generator).to(dtype).requires_grad_()

    def ask(what: str, *given: Any) -> Any:
        method = getattr(labels, what, None)
        if not callable(method):
            raise PackhorseError(f"{where} are a {type(labels).__name__} without {what}(); see Labels in sil/labels.py")
        try:
            return method(*given)
        except Exception as error:
            raise PackhorseError(
                f"{what}() of {where} failed for an output {list(output.shape)}: {type(error).__name__}: {error}"
            ) from error

    def expect(what: str, found: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(found, Tensor) or not found.is_floating_point() or tuple(found.shape) != shape:
            is_tensor = isinstance(found, Tensor)
            kind = (
                f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}" if is_tensor else type(found).__name__
            )
            raise PackhorseError(
                f"{what}() of {where} gives {kind} for an output {list(output.shape)}, expected a floating-point tensor "
                f"{list(shape)}"
            )

    with torch.enable_grad():
        loss = ask("loss", output, classes)
    expect("loss", loss, ())
    if not loss.requires_grad:
        raise PackhorseError(f"loss() of {where} does not depend on the output, so that nothing can be learned from it")
    expect("scores", ask("scores", output.detach()), (2, site.num_classes))
    if imitates:
        expect("imitate", ask("imitate", classes, site.generator), tuple(output.shape))


SCHEMES: dict[str, Callable[[], Scheme]] = {"uniform": Uniform, "hadamard": Hadamard, "readout": Readout}


def find_scheme(labels: str | Scheme) -> Scheme:
    if isinstance(labels, str):
        if labels not in SCHEMES:
            raise PackhorseError(
                f"labels is {labels!r}, expected one of {', '.join(SCHEMES)}, or a scheme of your own (sil/labels.py: Scheme)"
            )
        return SCHEMES[labels]()
    if not callable(labels):
        raise PackhorseError(
            f"labels is a {type(labels).__name__}, expected a name or a scheme: called with a Site it returns Labels"
        )
    return labels


def wants_activated(scheme: Scheme) -> bool:
    return bool(getattr(scheme, "activated", True))


def name_scheme(scheme: Scheme) -> str:
    """The same in another process, by which a run knows it again: its repr, or its class and plain attributes."""
    kind = type(scheme)
    if kind.__repr__ is not object.__repr__:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(scheme))  # functions have an address there
    plain = {
        n: v
        for n, v in sorted(getattr(scheme, "__dict__", {}).items())
        if isinstance(v, (bool, int, float, str, tuple))
    }
    return f"{kind.__qualname__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"

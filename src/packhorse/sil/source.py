"""Where a part's batches come from: the user's loader, the rows that the part before it left, or made-up ones.

Batches are columns by the names of training, classes among them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.errors import BatchError
from packhorse.keys import random_seed
from packhorse.sil.labels import Labels
from packhorse.sil.parts import Division
from packhorse.sil.rows import Rows

Columns = dict[str, Tensor]


class Source(Protocol):
    def batches(self, epoch: int) -> Iterator[Columns]:
        """All rows once, in the order of that epoch."""
        ...

    def as_they_are(self, epoch: int) -> Iterator[Columns]:
        """The same in any order, the same one for the same epoch; nothing made up or shaken."""
        ...

    def count(self) -> int | None:
        """Batches of an epoch; None if nobody knows beforehand."""
        ...


class Loaded:
    """Batches `(x, y)` of a loader, as they come, or joined and split to `size` rows.

    What the loader draws from torch's generator, such as the order of a shuffling DataLoader, follows from the seed and the
    epoch, so that a run that died sees the same again; a sampler's or loader's own `set_epoch` is called.
    """

    def __init__(
        self, division: Division, loader: Iterable[Any], num_classes: int, size: int | None = None, seed: int = 0
    ):
        self.division, self.loader, self.num_classes, self.size, self.seed = division, loader, num_classes, size, seed

    def batches(self, epoch: int) -> Iterator[Columns]:
        return self._read(epoch) if self.size is None else _resize(self._read(epoch), self.size)

    as_they_are = batches

    def _read(self, epoch: int) -> Iterator[Columns]:
        for batch in self.pairs(epoch):
            yield self.division.read_batch(*batch)

    def pairs(self, epoch: int) -> Iterator[tuple[Any, Tensor]]:
        """As the loader has them, checked."""
        for holder in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(holder, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        for batch in _draw_by_seed(self.loader, random_seed(self.seed, epoch, "loader", 0)):
            x, y = take_apart(batch)
            check_classes(y, self.num_classes)
            yield x, y

    def count(self) -> int | None:
        try:
            batches = len(self.loader)  # type: ignore[arg-type]  # it may have no length
        except TypeError:
            return None
        if self.size is None:
            return batches
        rows = len(getattr(self.loader, "dataset", ()))
        return -(-rows // self.size) if rows else None


class Stored:
    """Rows of a finished part, shuffled anew each epoch, the same for the same seed.

    The value at the cut, `learned`, is shaken while a part trains on it, by `noise` of its standard deviation.
    """

    def __init__(self, rows: Rows, size: int, seed: int = 0, learned: str = "", noise: float = 0.0):
        self.rows, self.size, self.seed = rows, size, seed
        self.learned, self.noise = learned, noise

    def batches(self, epoch: int) -> Iterator[Columns]:
        order, shaken = (torch.Generator().manual_seed(self.seed * 1_000_003 + 2 * epoch + i) for i in (0, 1))
        for columns in self.rows.batches(self.size, order):
            yield columns | {self.learned: self._shake(columns[self.learned], shaken)} if self.noise else columns

    def _shake(self, value: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
        return value + (self.noise * value.float().std()).to(value.dtype) * drawn

    def as_they_are(self, epoch: int) -> Iterator[Columns]:
        return self.rows.batches(self.size)

    def count(self) -> int:
        return -(-len(self.rows) // self.size)


class Imitated:
    """Batches of a loader whose value at a cut is made up from their classes."""

    def __init__(self, loaded: Loaded, learned: str, labels: Labels, seed: int):
        self.loaded, self.learned, self.labels, self.seed = loaded, learned, labels, seed

    def batches(self, epoch: int) -> Iterator[Columns]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        for columns in self.loaded.batches(epoch):
            yield columns | {self.learned: self.labels.imitate(columns[self.loaded.division.label], generator)}

    def as_they_are(self, epoch: int) -> Iterator[Columns]:
        raise NotImplementedError("made-up values stand for nothing that could be kept")

    def count(self) -> int | None:
        return self.loaded.count()


def _resize(batches: Iterable[Columns], size: int) -> Iterator[Columns]:
    """The same rows in batches of `size`; the last may be smaller."""
    waiting: Columns = {}
    for columns in batches:
        waiting = {n: torch.cat([waiting[n], t]) for n, t in columns.items()} if waiting else columns
        while len(next(iter(waiting.values()))) >= size:
            yield {n: t[:size] for n, t in waiting.items()}
            waiting = {n: t[size:] for n, t in waiting.items()}
    if waiting and len(next(iter(waiting.values()))):
        yield waiting


def _draw_by_seed(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Goes through a loader with a state of torch's generator of its own; that of the process stays as it is."""
    state = torch.Generator().manual_seed(seed & ((1 << 63) - 1)).get_state()
    batches: Iterator[Any] | None = None
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield batch


def take_apart(batch: Any) -> tuple[Any, Tensor]:
    """A batch must be `(x, y)`; classes may be integers of any kind."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise BatchError(f"a batch is a {found}, expected (x, y): inputs and a tensor of classes")
    x, y = batch
    return x, y if y.is_floating_point() or y.is_complex() else y.long()


def check_classes(y: Tensor, num_classes: int) -> None:
    if y.dtype != torch.int64 or y.ndim != 1:
        raise BatchError(
            f"y is {str(y.dtype).removeprefix('torch.')}{list(y.shape)}, expected one integer class a row: synthetic labels "
            "are a vector a class, so regression and soft targets have none; train those with ph.Trainer(strategy='relay')"
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise BatchError(
            f"y has classes from {int(y.min())} to {int(y.max())}, expected 0 to {num_classes - 1}: num_classes is "
            f"{num_classes}"
        )

"""Where a part's batches come from: the user's loader, the rows that the part before it left, or made-up ones.

Batches are columns by the names of training, classes among them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from packhorse.errors import BatchError
from packhorse.keys import fold, random_seed
from packhorse.sil.labels import Labels
from packhorse.sil.parts import Crossing, Division, strip
from packhorse.sil.rows import Rows, cut_rows

Columns = dict[str, Tensor]

MOST_NAMED = 32  # values of a batch that are named one by one, should they not be those of the example


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

    What the loader draws from torch's generator, or from one of its own, such as the order of a shuffling DataLoader, follows
    from the seed and the epoch, so that a run that died sees the same again; a sampler's or loader's own `set_epoch` is called.
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
        seed = random_seed(self.seed, epoch, "loader", 0)
        for holder in (self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))):
            set_epoch, generator = getattr(holder, "set_epoch", None), getattr(holder, "generator", None)
            if set_epoch is not None:
                set_epoch(epoch)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(fold(seed))
        for batch in _draw_by_seed(self.loader, seed):
            x, y = take_apart(batch)
            check_classes(y, self.num_classes)
            self._check_values(x)
            yield x, y

    def _check_values(self, x: Any) -> None:
        """Numbers in nested lists are told by how many they are: all their names would fill pages."""
        found, expected = len(tree_leaves(strip(x))), self.division.predict.graph.batch.tree.num_leaves
        if found > max(expected, MOST_NAMED):
            raise BatchError(
                f"x is a {type(x).__name__} of {found} values, expected {expected} as in the example; numbers in nested lists "
                "are to be one tensor: torch.as_tensor(...)"
            )

    def count(self) -> int | None:
        if self.size is None:
            return _find_length(self.loader)
        rows = _count_rows(self.loader)
        return None if rows is None else len(cut_rows(rows, self.size))

    def find_rows(self) -> int:
        """Of its batches: the size that it has been given, the loader says, or the first has."""
        if self.size is not None:
            return self.size
        size = getattr(self.loader, "batch_size", None)
        if isinstance(size, int):
            return size
        first = next(self.pairs(0), None)
        if first is None:
            raise BatchError("the loader has no batch; give one that yields (x, y)")
        return len(first[1])


class Stored:
    """Rows of a finished part, shuffled anew each epoch, the same for the same seed.

    The value at the cut, `learned`, is shaken while a part trains on it, by `noise` of its standard deviation.
    """

    def __init__(self, rows: Rows, size: int, seed: int = 0, learned: str = "", noise: float = 0.0):
        self.rows, self.size, self.seed = rows, size, seed
        self.learned, self.noise = learned, noise

    def batches(self, epoch: int) -> Iterator[Columns]:
        order, shaken = (torch.Generator().manual_seed(fold(self.seed * 1_000_003 + 2 * epoch + i)) for i in (0, 1))
        for columns in self.rows.batches(self.size, order):
            yield columns | {self.learned: self._shake(columns[self.learned], shaken)} if self.noise else columns

    def _shake(self, value: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
        return value + (self.noise * value.float().std()).to(value.dtype) * drawn

    def as_they_are(self, epoch: int) -> Iterator[Columns]:
        return self.rows.batches(self.size)

    def count(self) -> int:
        return len(cut_rows(len(self.rows), self.size))


class Imitated:
    """Batches of a loader whose value at a cut is made up from their classes."""

    def __init__(self, loaded: Loaded, crossing: Crossing, labels: Labels, seed: int):
        self.loaded, self.crossing, self.labels, self.seed = loaded, crossing, labels, seed

    def batches(self, epoch: int) -> Iterator[Columns]:
        generator = torch.Generator().manual_seed(fold(self.seed * 1_000_003 + epoch))
        for columns in self.loaded.batches(epoch):
            made_up = self.labels.imitate(columns[self.loaded.division.label], generator)
            yield columns | {self.crossing.learned: made_up.to(self.crossing.dtype)}

    def as_they_are(self, epoch: int) -> Iterator[Columns]:
        raise NotImplementedError("made-up values stand for nothing that could be kept")

    def count(self) -> int | None:
        return self.loaded.count()


def _resize(batches: Iterable[Columns], size: int) -> Iterator[Columns]:
    """The same rows in batches of `size`; the last may be smaller, or have one more (`cut_rows`)."""
    waiting: Columns = {}

    def count() -> int:
        return len(next(iter(waiting.values()), ()))

    for columns in batches:
        waiting = {n: torch.cat([waiting[n], t]) for n, t in columns.items()} if waiting else columns
        while count() > size + 1:
            yield {n: t[:size] for n, t in waiting.items()}
            waiting = {n: t[size:] for n, t in waiting.items()}
    for taken in cut_rows(count(), size):
        yield {n: t[:taken] for n, t in waiting.items()}
        waiting = {n: t[taken:] for n, t in waiting.items()}


def _find_length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _count_rows(loader: Any) -> int | None:
    """Of all batches, as far as that can be told without going through them."""
    if isinstance(loader, (list, tuple)):
        return sum(len(take_apart(batch)[1]) for batch in loader)
    sampler = getattr(loader, "batch_sampler", None)
    batched = loader if sampler is None else sampler  # which of them knows how rows are put together
    batches, size = _find_length(loader), getattr(batched, "batch_size", None)
    if batches is None or not isinstance(size, int):
        return None
    if getattr(batched, "drop_last", False):
        return batches * size
    drawn = _find_length(getattr(batched, "sampler", None))
    rows = _find_length(getattr(loader, "dataset", None)) if drawn is None else drawn
    return rows if rows is not None and -(-rows // size) == batches else None


def _draw_by_seed(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Goes through a loader with a state of torch's generator of its own; that of the process stays as it is."""
    state = torch.Generator().manual_seed(fold(seed)).get_state()
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
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise BatchError(f"a batch is a {found}, expected (x, y): inputs and a tensor of classes")
    x, y = batch
    if not isinstance(y, Tensor):
        raise BatchError(f"y is a {type(y).__name__}, expected a tensor of classes, one a row: pass torch.as_tensor(y)")
    return x, to_classes(y)


def to_classes(y: Tensor) -> Tensor:
    """Integers of any kind as one kind; what is none stays as it is, to be refused."""
    return y if y.is_floating_point() or y.is_complex() else y.long()


def count_classes(y: Tensor) -> int:
    """As many as the largest tells of."""
    _check_kind(y)
    return int(y.max()) + 1


def check_classes(y: Tensor, num_classes: int) -> None:
    _check_kind(y)
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise BatchError(
            f"y has classes from {int(y.min())} to {int(y.max())}, expected 0 to {num_classes - 1}: num_classes is "
            f"{num_classes}"
        )


def _check_kind(y: Tensor) -> None:
    if y.dtype != torch.int64 or y.ndim != 1:
        raise BatchError(
            f"y is {str(y.dtype).removeprefix('torch.')}{list(y.shape)}, expected one integer class a row: synthetic labels "
            "are a vector a class, so regression and soft targets have none; train those with ph.Trainer(strategy='relay')"
        )

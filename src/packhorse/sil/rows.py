"""Rows on disk: what a finished part made of the training set, one file a column, read in any order.

In: batches of columns. Out: `Rows`, batches of the same rows, shuffled or not. Nothing is held in memory: a batch is read when
it is asked for, with ordinary reads, whose pages belong to the system and not to the process.
"""

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.store.encode import DTYPE_NAMES, DTYPES
from packhorse.store.files import FileSystem, replace_small, seal, unseal

INDEX = "rows.json"  # written last: without it the rows are not all there


class RowsWriter:
    """Appends batches; what is not committed does not count."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INDEX).unlink(missing_ok=True)
        self.directory, self.count = directory, 0
        self._columns: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._files: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return self.count * sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in self._columns.values())

    def append(self, columns: Mapping[str, Tensor]) -> None:
        if not self._files:
            self._open(columns)
        (rows,) = {len(column) for column in columns.values()}
        for name, column in columns.items():
            self._write(self._files[name], column)
        self.count += rows

    def _open(self, columns: Mapping[str, Tensor]) -> None:
        for i, (name, column) in enumerate(columns.items()):
            self._columns[name] = (DTYPE_NAMES[column.dtype], tuple(column.shape[1:]))
            self._files[name] = os.open(_path(self.directory, i), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def _write(self, file: int, column: Tensor) -> None:
        content: Any = (
            column.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        )  # stubs hide that it is a buffer
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            raise StoreError(
                f"writing rows to {self.directory} failed after {self.count}: {error.strerror}; make room and resume"
            ) from error

    def commit(self) -> None:
        for file in self._files.values():
            os.fsync(file)
        described = {"count": self.count, "columns": self._columns}
        replace_small(FileSystem(), self.directory / INDEX, seal(described), sync=True)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __enter__(self) -> "RowsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()


class Rows:
    """Rows that are all there."""

    def __init__(self, directory: Path):
        if not (directory / INDEX).exists():
            raise StoreError(f"{directory} holds no complete rows; train the part before it first")
        described = unseal(directory / INDEX)
        self.count: int = described["count"]
        self._columns = {n: (DTYPES[dtype], tuple(shape)) for n, (dtype, shape) in described["columns"].items()}
        self._files = {n: os.open(_path(directory, i), os.O_RDONLY) for i, n in enumerate(self._columns)}
        for name, file in self._files.items():
            expected = self.count * self._row_bytes(name)
            if os.fstat(file).st_size != expected:
                found = os.fstat(file).st_size
                self.close()
                raise StoreError(
                    f"{directory}: {name} has {found} bytes, expected {expected}; remove it and train again"
                )

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        return self.count * sum(map(self._row_bytes, self._columns))

    def _row_bytes(self, name: str) -> int:
        dtype, shape = self._columns[name]
        return math.prod(shape) * dtype.itemsize

    def read(self, indices: Tensor) -> dict[str, Tensor]:
        """These rows, in this order."""
        return {name: self._read(name, indices.tolist()) for name in self._columns}

    def _read(self, name: str, indices: list[int]) -> Tensor:
        dtype, shape = self._columns[name]
        size = self._row_bytes(name)
        found = torch.empty(len(indices), *shape, dtype=dtype)
        content: Any = found.flatten().view(torch.uint8).numpy()
        view = memoryview(content)
        at = 0
        for start, length in _runs(indices):
            want = view[at : at + length * size]
            if size and os.preadv(self._files[name], [want], start * size) != len(want):
                raise StoreError(f"row {start} of {name} could not be read whole; the file was changed")
            at += length * size
        return found

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[dict[str, Tensor]]:
        """All rows once, shuffled by the generator, or in order."""
        order = torch.arange(self.count) if generator is None else torch.randperm(self.count, generator=generator)
        for chosen in order.split(cut_rows(self.count, size)):
            yield self.read(chosen)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_rows(count: int, size: int) -> list[int]:
    """Rows of each batch; one that would be left alone goes with those before it: batch norms have no use for one."""
    sizes = [size] * (count // size) + ([count % size] if count % size else [])
    return [*sizes[:-2], size + 1] if count > size > 1 == count % size else sizes


def _path(directory: Path, column: int) -> Path:
    return directory / f"column{column}.bin"


def _runs(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours are read at once: (first, how many)."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        yield members[0], len(members)

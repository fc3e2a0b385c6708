"""Data for the command line: batches by number, so that a run that is resumed goes on with the next one.

In: what `--data` says: text, read as bytes, or a safetensors file of columns. Out: `Batches`; `batches[n]` is always the same.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.models import Task
from packhorse.weights import SafetensorsFiles

MOST_TEXT = 16 << 20  # bytes of text that are read


class Batches:
    """An endless sequence of batches with a position that can be saved."""

    def __init__(self, source: Any, seed: int):
        self.source, self.seed, self.position = source, seed, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield self.source.batch(torch.Generator().manual_seed(self.seed * 1_000_003 + self.position - 1))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.seed = int(state["position"]), int(state["seed"])


class Text:
    """Bytes of text as tokens: rows of `length` and their successors."""

    def __init__(self, text: bytes, length: int, rows: int):
        if len(text) < length + 2:
            raise PackhorseError(
                f"the text has {len(text)} bytes, expected more than {length + 1}, the length of a row"
            )
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length, self.rows = length, rows

    def batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        starts = torch.randint(len(self.tokens) - self.length - 1, (self.rows,), generator=generator)
        rows = torch.stack([self.tokens[s : s + self.length + 1] for s in starts.tolist()]).long()
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class Columns:
    """Tensors with one row an example, named as the batch's keys, or `0`, `1`, ... for a tuple."""

    def __init__(self, columns: dict[str, Tensor], example: Any, rows: int):
        self.columns, self.example, self.rows = columns, example, rows

    def batch(self, generator: torch.Generator) -> Any:
        count = len(next(iter(self.columns.values())))
        chosen = torch.randint(count, (self.rows,), generator=generator)
        picked = {name: column[chosen] for name, column in self.columns.items()}
        return picked if isinstance(self.example, dict) else tuple(picked.values())


class Same:
    """Without data: the example, again and again."""

    def __init__(self, example: Any):
        self.example = example

    def batch(self, generator: torch.Generator) -> Any:
        return self.example


class Labelled:
    """Batches `(x, y)` of rows in memory, shuffled anew each time they are gone through, or in order."""

    def __init__(self, x: Tensor, y: Tensor, rows: int, *, seed: int | None):
        self.x, self.y, self.rows, self.seed, self.epoch = x, y, rows, seed, 0

    @property
    def dataset(self) -> Tensor:
        """As DataLoader has it: one row an example."""
        return self.y

    @property
    def batch_size(self) -> int:
        """Likewise."""
        return self.rows

    def __len__(self) -> int:
        return -(-len(self.y) // self.rows)

    def set_epoch(self, epoch: int) -> None:
        """The next time rows come in the order of this one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.y))
        if self.seed is not None:
            order = torch.randperm(
                len(self.y), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            )
            self.epoch += 1
        for chosen in order.split(self.rows):
            yield self.x[chosen], self.y[chosen]


def open_labelled(
    data: str | None, task: Task, rows: int, num_classes: int, seed: int | None, option: str = "--data"
) -> Labelled:
    """A safetensors file with `x` and `y`, given as that option; without one, noise around a point for each class."""
    if not (isinstance(task.example, tuple) and len(task.example) == 2):
        raise PackhorseError(f"{task.name} is no classifier of (x, y): its batch is {type(task.example).__name__}")
    if data is not None:
        files = SafetensorsFiles(Path(data))
        missing = [name for name in ("x", "y") if name not in files]
        if missing:
            raise PackhorseError(
                f"{option} {data} has no tensor {missing[0]!r}; expected x, [rows, ...], and y, [rows] of classes"
            )
        x, y = files["x"].load(), files["y"].load()
        if not len(y) or len(x) != len(y):
            raise PackhorseError(
                f"{option} {data}: x has {len(x)} rows, y has {len(y)}; expected as many, and at least one"
            )
        return Labelled(x, y, rows, seed=seed)
    shape = task.example[0].shape[1:]
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(num_classes, *shape, generator=generator)
    generator.manual_seed(1 if seed is None else 2)
    y = torch.randint(num_classes, (32 * rows,), generator=generator)
    return Labelled(centres[y] + 4 * torch.randn(len(y), *shape, generator=generator), y, rows, seed=seed)


def open_data(data: str | None, task: Task, rows: int, seed: int) -> Batches:
    """`python` is the text of this installation's own sources; else a text file, a directory of text, or a safetensors file."""
    if data is None:
        return Batches(Same(task.example), seed)
    if data != "python" and not Path(data).exists():
        raise PackhorseError(
            f"--data {data}: there is no such file or directory; give text, a safetensors file, or 'python'"
        )
    if data.endswith(".safetensors"):
        return Batches(_open_columns(Path(data), task, rows), seed)
    if not (isinstance(task.example, dict) and set(task.example) == {"tokens", "targets"}):
        raise PackhorseError(f"--data {data}: {task.name} does not take text; give a safetensors file with its columns")
    vocabulary = int(getattr(getattr(task.model, "config", None), "vocabulary", 256))
    if vocabulary < 256:
        raise PackhorseError(f"--data {data}: text is read as bytes, but {task.name} has a vocabulary of {vocabulary}")
    return Batches(Text(_read_text(data), task.example["tokens"].shape[1], rows), seed)


def _read_text(data: str) -> bytes:
    if data == "python":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        files = sorted(f for f in Path(data).rglob("*") if f.is_file()) if Path(data).is_dir() else [Path(data)]
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: MOST_TEXT - len(text)]
        if len(text) >= MOST_TEXT:
            break
    return bytes(text)


def _open_columns(path: Path, task: Task, rows: int) -> Columns:
    wanted = list(task.example) if isinstance(task.example, dict) else [str(i) for i in range(len(task.example))]
    files = SafetensorsFiles(path)
    missing = [name for name in wanted if name not in files]
    if missing:
        raise PackhorseError(f"--data {path} has no tensor {missing[0]!r}; {task.name} takes {', '.join(wanted)}")
    columns = {name: files[name].load() for name in wanted}
    if len({len(column) for column in columns.values()}) > 1:
        raise PackhorseError(f"--data {path}: its tensors have different numbers of rows")
    return Columns(columns, task.example, rows)

"""How parts stand: what each is, whether it is done, what it took. Kept beside its part, so that a run that died goes on."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packhorse.store.files import FileSystem, replace_small, seal, unseal


class Progress(NamedTuple):
    """Told after every step of a part."""

    part: int
    num_parts: int
    epoch: int  # from 0
    epochs: int
    step: int  # of this part, from 1
    steps: int | None  # in all, if the loader tells how many batches it has
    loss: float


@dataclass
class Standing:
    """Of one part. Seconds and bytes are those of training it; `accuracy` is what its own output, read out, gets right."""

    modules: tuple[str, ...]
    num_parameters: int
    planned_bytes: int
    flops_per_row: float  # forward and backward
    crossing_bytes_per_row: int  # of what it hands on, 0 for the last
    trained: bool = False  # on made-up inputs, in parallel
    done: bool = False
    steps: int = 0
    rows: int = 0  # that it was trained on, all epochs
    seconds: float = 0.0
    grown_bytes: int | None = None  # by how much the process grew at most
    on_disk: bool = False
    stored_bytes: int = 0  # rows that it left for the next
    accuracy: float | None = None

    @property
    def flops(self) -> float:
        return self.flops_per_row * self.rows

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        replace_small(FileSystem(), directory / "standing.json", seal(asdict(self)), sync=True)

    def load(self, directory: Path) -> None:
        """As it was left, if it was."""
        path = directory / "standing.json"
        if path.exists():
            found: dict[str, Any] = unseal(path)
            for name in (
                "trained",
                "done",
                "steps",
                "rows",
                "seconds",
                "grown_bytes",
                "on_disk",
                "stored_bytes",
                "accuracy",
            ):
                setattr(self, name, found[name])

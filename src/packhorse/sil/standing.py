"""How parts stand: what each is, whether it is done, what it took. Kept beside its part, so that a run that died goes on."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packhorse.case import LEAST_KEPT
from packhorse.estimate import KEPT, Estimate
from packhorse.store.files import FileSystem, replace_small, seal, unseal

Phase = Literal["fit", "refine", "recover"]


class Progress(NamedTuple):
    """Told after every step of a part."""

    part: int  # num_parts: all of them, end to end
    num_parts: int
    phase: Phase
    epoch: int  # from 0
    epochs: int
    step: int  # of this phase, from 1
    steps: int | None  # in all, if the loader tells how many batches it has
    loss: float


LASTING = (
    "fits",
    "epochs",
    "recoveries",
    "steps",
    "rows",
    "seconds",
    "planned_bytes",
    "grown_bytes",
    "on_disk",
    "stored_bytes",
    "accuracy",
)


@dataclass
class Standing:
    """Of one part. Seconds and bytes are those of training it; `accuracy` is what its own output, read out, gets right."""

    modules: tuple[str, ...]
    num_parameters: int
    planned_bytes: int  # reckoned; once it is trained, what its trainer found when it ran it beforehand
    flops_per_row: float  # forward and backward
    crossing_bytes_per_row: int  # of what it hands on, 0 for the last
    fits: int = 0  # that it is done with: trained, and what it makes of the training set is kept
    epochs: tuple[int, ...] = ()  # of each phase that it was trained in
    recoveries: int = 0  # that had been when the last phase ended: with more, its values are older than theirs
    steps: int = 0
    rows: int = 0  # that it was trained on, all epochs
    seconds: float = 0.0
    grown_bytes: int | None = None  # by how much the process grew at most
    on_disk: bool = False
    stored_bytes: int = 0  # rows that it left for the next
    accuracy: float | None = None

    @property
    def phases(self) -> int:
        """That it was trained in; with parts at once two a fit, the second on real inputs."""
        return len(self.epochs)

    @property
    def done(self) -> bool:
        return self.fits > 0

    @property
    def flops(self) -> float:
        return self.flops_per_row * self.rows

    def expect(self, planned: Estimate, before: int, batch: int) -> None:
        """What its trainer planned, in a process of so many bytes `before`, without a batch.

        Where running it showed no more than is planned with in any case, what was reckoned stays, if it is less.
        """
        nbytes = planned.peak["host"] - before + batch
        if planned.kinds["host"].get(KEPT, 0) <= LEAST_KEPT:
            nbytes = min(nbytes, self.planned_bytes)
        self.planned_bytes = max(nbytes, self.planned_bytes) if self.phases else nbytes

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        replace_small(FileSystem(), directory / "standing.json", seal(asdict(self)), sync=True)

    def load(self, directory: Path) -> None:
        """As it was left, if it was."""
        path = directory / "standing.json"
        if path.exists():
            found: dict[str, Any] = unseal(path)
            for name in LASTING:
                setattr(self, name, tuple(found[name]) if name == "epochs" else found[name])

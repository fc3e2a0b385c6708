"""Where the parts of a run are kept.

In: a directory, or none, and what the run is. Out: `Home`: a header that says which run it is, a place for each phase of each
part, one for each time the joined model was trained end to end, and for how long.

    sil.json                what the run is
    lock                    who trains it
    recovered.json          for how many epochs it was trained end to end, each time
    recovery0/model         what that made of it; store: while it lasts
    part0/standing.json     how far the part is
    part0/phase0/model      what a phase made of it; store: while it lasts
    part0/rows              what it makes of the training set
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packhorse.errors import PackhorseError, StoreError
from packhorse.ranks.world import World
from packhorse.store.files import FileSystem, Lock, replace_small, seal, unseal

HEADER, RECOVERED, LOCK = "sil.json", "recovered.json", "lock"
TRIES = 20  # to take the lock, a tenth of a second apart
SCRATCH = "scratch-"  # what directories that only one call needs begin with


class Home:
    """A directory of the user's, which lasts, or one that goes when it is closed."""

    def __init__(self, directory: str | Path | None, world: World | None):
        if directory is None and world is not None:
            raise PackhorseError(
                f"{world.size} ranks train parts of one model and leave them in a directory that all of them see; pass "
                "store=DIRECTORY"
            )
        self.lasts = directory is not None
        self.recovered: tuple[int, ...] = ()  # epochs, each time
        self._world = world
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="packhorse-")
            directory = self._temporary.name
        self.path = Path(directory)
        self._lock = Lock(self.path / LOCK)
        self.is_closed = False

    def place(self, i: int) -> Path:
        """Of a part."""
        return self.path / f"part{i}"

    def phase(self, i: int, number: int) -> Path:
        return self.place(i) / f"phase{number}"

    def rows(self, i: int) -> Path:
        return self.place(i) / "rows"

    def recovery(self, number: int) -> Path:
        """The whole model's, trained end to end."""
        return self.path / f"recovery{number}"

    def open(self, header: Mapping[str, Any], *, resume: bool) -> bool:
        """Whether it holds a run, which must be this one, and is continued only if asked. Of several ranks the first looks."""
        if self._world is None:
            return self._open(header, resume)
        self._world.agree(header)
        found: bool | StoreError = False
        if self._world.rank == 0:
            try:
                found = self._open(header, resume)
            except StoreError as error:
                found = error
        found = self._world.share(found, 0)
        if isinstance(found, StoreError):
            raise found
        self._read_recovered()
        return found

    def _open(self, header: Mapping[str, Any], resume: bool) -> bool:
        path = self.path / HEADER
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise StoreError(
                f"{self.path} is a file, expected a directory; choose one, or a name that is free"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made: {error.strerror}; choose another directory") from error
        self._take_lock()
        try:
            return self._read_header(path, header, resume)
        except StoreError:
            self._lock.drop()
            raise

    def _take_lock(self) -> None:
        """Processes that trained parts at once hold it too, and end a moment after the one that started them."""
        for _ in range(TRIES):
            try:
                self._lock.take()
                return
            except StoreError:
                time.sleep(0.1)
        self._lock.take()

    def _read_header(self, path: Path, header: Mapping[str, Any], resume: bool) -> bool:
        if not path.exists():
            replace_small(FileSystem(), path, seal(header), sync=True)
            return False
        if not resume:
            raise StoreError(f"{self.path} holds a run; pass resume=True to continue it, or choose another directory")
        found = unseal(path)
        for key, value in header.items():
            if found.get(key) != value:
                raise StoreError(
                    f"{self.path} holds a run with another {key}: {found.get(key)}, here {value}; choose another"
                )
        self._read_recovered()
        for left in self.path.glob(f"{SCRATCH}*"):  # by a process that died
            remove(left)
        return True

    def check_open(self) -> None:
        if self.is_closed:
            raise PackhorseError("this trainer is closed; make another one, with resume=True if it has a store")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for a while."""
        self.check_open()
        with tempfile.TemporaryDirectory(dir=self.path, prefix=SCRATCH) as directory:
            yield Path(directory)

    def _read_recovered(self) -> None:
        if (self.path / RECOVERED).exists():
            self.recovered = tuple(unseal(self.path / RECOVERED)["epochs"])

    def commit_recovery(self, epochs: int) -> None:
        """One more is complete; the one before it is no longer needed. Of several ranks the first writes."""
        self.recovered = (*self.recovered, epochs)
        if self._world is None or self._world.rank == 0:
            text = seal({"epochs": self.recovered})
            replace_small(FileSystem(), self.path / RECOVERED, text, sync=True)
            if len(self.recovered) > 1:
                remove(self.recovery(len(self.recovered) - 2))
        if self._world is not None:
            self._world.gather_objects(None)

    def close(self) -> None:
        self.is_closed = True
        self._lock.drop()
        if self._temporary is not None:
            self._temporary.cleanup()


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)

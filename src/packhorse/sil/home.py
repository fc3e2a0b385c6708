"""Where the parts of a run are kept.

In: a directory, or none, and what the run is. Out: `Home`: a header that says which run it is, a place for each part, one for
what end-to-end training made of them.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packhorse.errors import StoreError
from packhorse.sil.apart import find_rank
from packhorse.store.files import FileSystem, replace_small, seal, unseal

HEADER = "sil.json"


class Home:
    """A directory of the user's, which lasts, or one that goes when it is closed."""

    def __init__(self, directory: str | Path | None):
        self.lasts = directory is not None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="packhorse-")
            directory = self._temporary.name
        self.path = Path(directory)

    def place(self, i: int) -> Path:
        """Of a part."""
        return self.path / f"part{i}"

    def model(self, i: int) -> Path:
        """Its trained values."""
        return self.place(i) / "model"

    @property
    def recovered(self) -> Path:
        """The whole model's, after training end to end."""
        return self.path / "recovered"

    def open(self, header: Mapping[str, Any], *, resume: bool) -> bool:
        """Whether it holds a run, which must be this one, and is continued only if asked."""
        path = self.path / HEADER
        if not path.exists():
            self._make(header)
            return False
        if not resume and find_rank() is None:
            raise StoreError(f"{self.path} holds a run; pass resume=True to continue it, or choose another directory")
        found = unseal(path)
        for key, value in header.items():
            if found.get(key) != value:
                raise StoreError(
                    f"{self.path} holds a run with another {key}: {found.get(key)}, here {value}; choose another"
                )
        return True

    def _make(self, header: Mapping[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made: {error.strerror}; choose another directory") from error
        replace_small(FileSystem(), self.path / HEADER, seal(header), sync=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

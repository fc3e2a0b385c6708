"""The runs in a directory: of one process, or of several, each of whose ranks has a store of its own beneath it.

DIR/manifest.json ...      a run of one process
DIR/2x1-parts/rank0 ...    one of two ranks, with a part of every block each
DIR/1x4/rank0 ...          one of four, with a stage each

In: a directory. Out: the run that is farthest, to be continued by as many ranks as there are now: `Earlier`, which copies what
its stores hold into another.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.store.block_files import BlockFiles, rebuild_blocks
from packhorse.store.files import FileSystem, digest, unseal

MANIFESTS = ("manifest.json", "previous.json")


@dataclass(frozen=True)
class Earlier:
    """A run and the last step that all its ranks have."""

    directory: Path
    ranks: tuple[Path, ...]
    step: int

    @property
    def manifests(self) -> list[dict[str, Any]]:
        return [next(m for m in _read_manifests(path) if m["facts"]["step"] == self.step) for path in self.ranks]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifests[0]["facts"]

    @property
    def header(self) -> Mapping[str, Any]:
        """That of the first rank; all tell of the whole model."""
        return unseal(self.ranks[0] / self.manifests[0]["blocks"] / "header.json")

    def open_files(self) -> list[BlockFiles]:
        opened = []
        for path, manifest in zip(self.ranks, self.manifests, strict=True):
            header = unseal(path / manifest["blocks"] / "header.json")
            checked, versions = manifest["checked"], header["versions"]
            files = BlockFiles(
                FileSystem(),
                path / manifest["blocks"],
                rebuild_blocks(header["blocks"]),
                versions,
                rolls=checked and versions == 1,
                create=False,
                checked=checked,
                allocate=False,
            )
            files.restore(manifest["version"])
            opened.append(files)
        return opened

    def read_small(self) -> dict[str, Tensor]:
        """The small tensors of all ranks as one has them: of each parameter from a rank that has stepped it."""
        joined: dict[str, Tensor] = {}
        for path, manifest in zip(self.ranks, self.manifests, strict=True):
            found = path / f"small-{manifest['small']['number']}.safetensors"
            content = found.read_bytes()
            if f"{digest(content):016x}" != manifest["small"]["sum"]:
                raise StoreError(f"{found} is damaged: it does not have the checksum in the manifest")
            small = load(content)
            started = small["started"].bool()
            for name, tensor in small.items():
                if name not in joined:
                    joined[name] = tensor.clone()
                elif name.startswith("scalars:"):
                    joined[name][started] = tensor[started]
            joined["started"] = torch.maximum(joined["started"], small["started"])
        return joined

    def remove(self) -> None:
        """Once another has all it held. A run of one process shares its directory with those of several."""
        if self.directory.name in {path.parent.name for path in self.ranks}:
            shutil.rmtree(self.directory)
            return
        for path in self.directory.iterdir():
            if path.name in MANIFESTS or path.name.startswith(("blocks-", "small-", "step.", "stash")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def name_of(data: int, pipeline: int, *, in_parts: bool) -> str:
    """The directory of such a run; nothing for one process, which has the store itself."""
    return "" if data * pipeline == 1 else f"{data}x{pipeline}{'-parts' if in_parts else ''}"


def find_earlier(directory: Path, own: str) -> Earlier | None:
    """The farthest run that others than `own` ranks have left, whole."""
    found = []
    if own and (directory / MANIFESTS[0]).is_file():
        found.append(Earlier(directory, (directory,), _steps(directory)[0]))
    for path in sorted(directory.glob("*x*")) if directory.is_dir() else ():
        size = _count_ranks(path.name)
        ranks = tuple(path / f"rank{rank}" for rank in range(size))
        if path.name == own or not size or not all((rank / MANIFESTS[0]).is_file() for rank in ranks):
            continue
        common = set(_steps(ranks[0])).intersection(*(_steps(rank) for rank in ranks[1:]))
        if common:
            found.append(Earlier(path, ranks, max(common)))
    return max(found, key=lambda run: run.step, default=None)


def _count_ranks(name: str) -> int:
    data, _, pipeline = name.removesuffix("-parts").partition("x")
    return int(data) * int(pipeline) if data.isdigit() and pipeline.isdigit() else 0


def _read_manifests(path: Path) -> list[dict[str, Any]]:
    return [unseal(path / name) for name in MANIFESTS if (path / name).is_file()]


def _steps(path: Path) -> Sequence[int]:
    return [int(manifest["facts"]["step"]) for manifest in _read_manifests(path)]

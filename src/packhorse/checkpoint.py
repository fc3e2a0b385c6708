"""Checkpoints for others to read: safetensors shards with an index, as Hugging Face lays them out.

In: tensors by name, each as pieces of its elements. Out: files. A shard is written piece by piece, so the model is never in
memory; a file appears under its name only when it is complete, the index last.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.weights import DTYPES

SHARD = 5 << 30  # bytes, at most, but for a tensor that is larger by itself

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_checkpoint(
    directory: str | Path,
    entries: Sequence[Entry],
    read_pieces: Callable[[str], Iterable[Tensor]],
    config: str | None = None,
) -> list[Path]:
    """Writes all tensors, and the text of a config if there is one; returns the files."""
    path = Path(directory)
    shards = list(_cut_into_shards(entries))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(f.name for f in path.glob("*.safetensors") if f.name not in names)
        if others:
            raise StoreError(
                f"{path} already holds {others[0]}, which would be read as part of the model; save to an empty directory"
            )
        written = [path / name for name in names]
        _write_shards(dict(zip(written, shards, strict=True)), read_pieces)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
                "weight_map": {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard},
            }
            written.append(_replace(path / "model.safetensors.index.json", json.dumps(index, indent=2)))
        else:
            (path / "model.safetensors.index.json").unlink(missing_ok=True)
        if config is not None:
            written.append(_replace(path / "config.json", config))
    except OSError as error:
        raise StoreError(f"saving to {path} failed: {error.strerror or error}") from error
    return written


def _cut_into_shards(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    for entry in entries:
        if shard and sum(e.nbytes for e in shard) + entry.nbytes > SHARD:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def _write_shards(shards: Mapping[Path, Sequence[Entry]], read_pieces: Callable[[str], Iterable[Tensor]]) -> None:
    """All of them beside the old ones first. While they take their places there is no index, so no mixture can be read."""
    temporary = {path: path.with_name(f"{path.name}.new") for path in shards}
    try:
        for path, entries in shards.items():
            _write_shard(temporary[path], entries, read_pieces)
        if len(shards) > 1:
            next(iter(shards)).with_name("model.safetensors.index.json").unlink(missing_ok=True)
        for path in shards:
            os.replace(temporary[path], path)
    finally:
        for left in temporary.values():
            left.unlink(missing_ok=True)


def _write_shard(path: Path, entries: Sequence[Entry], read_pieces: Callable[[str], Iterable[Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
        for entry in entries:
            _write_tensor(file.fileno(), entry, read_pieces(entry.name))


def _write_tensor(descriptor: int, entry: Entry, pieces: Iterable[Tensor]) -> None:
    """What has been written is let go of by the page cache, which some limits on memory count."""
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    for piece in pieces:
        if piece.numel():
            content: Any = piece.to(entry.dtype).view(torch.uint8).numpy()  # numpy's stubs hide that arrays are buffers
            _write_all(descriptor, memoryview(content))
    written = os.lseek(descriptor, 0, os.SEEK_CUR) - start
    assert written == entry.nbytes, f"{entry.name}: {written} bytes instead of {entry.nbytes}"
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, written, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view) :]


def _replace(path: Path, text: str) -> Path:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)
    return path

"""The journal: what finishing a step takes, where a store has room for one version of the model.

step.journal   a line a record, each with its checksum: first the intent, then what has been updated
step.bin       tensors of the intent: the batch, and buffers as the step leaves them

In: an intent before the first update of a step, and a record when blocks have been updated. Out: the same after a crash, but
for a last record that was not written to its end. What a record tells of is there, whole.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError
from packhorse.store.encode import DTYPE_NAMES, DTYPES
from packhorse.store.files import FileSystem, as_bytes, digest, replace_small


class Journal:
    """Of the step that runs. It belongs to one manifest: with the next commit it is of no use any more."""

    def __init__(self, system: FileSystem, directory: Path, *, sync: bool):
        self.system, self.sync = system, sync
        self.path, self.tensor_path = directory / "step.journal", directory / "step.bin"
        self.intent: dict[str, Any] | None = None
        self.records: list[dict[str, Any]] = []
        self._descriptor: int | None = None
        self._end = 0

    def begin(self, base: str, intent: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """From now on records may follow. `base` is the manifest that they go on from."""
        self.forget()
        try:
            described = self._write_tensors(tensors)
        except OSError as error:
            raise StoreError(f"writing {self.tensor_path} failed: {error.strerror or error}") from error
        content = {"base": base, **intent, "tensors": described}
        line = _seal(content)
        replace_small(self.system, self.path, line, sync=self.sync)
        self.intent, self._end = content, len(line)

    def append(self, record: Mapping[str, Any]) -> None:
        line = _seal(record)
        try:
            if self._descriptor is None:
                self._descriptor = self.system.open(self.path)
            self._write(self._descriptor, memoryview(line), self._end)
            if self.sync:
                self.system.sync(self._descriptor)
        except OSError as error:
            raise StoreError(f"writing {self.path} failed: {error.strerror or error}") from error
        self._end += len(line)
        self.records.append(dict(record))

    def read(self, base: str) -> bool:
        """Takes up what a run left that was interrupted after this manifest. False if it had updated nothing."""
        self.forget()
        if not self.path.is_file():
            return False
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror or error}") from error
        lines = raw.splitlines(keepends=True)
        records = [_unseal(line) for line in lines]
        valid = next((i for i, record in enumerate(records) if record is None), len(records))
        found = [record for record in records if record is not None]
        if len(found) > valid:
            raise StoreError(f"{self.path} is damaged: record {valid + 1} of {len(records)} has another checksum")
        if not found or found[0].get("base") != base or len(found) < 2:
            return False
        self.intent, self.records = found[0], found[1:]
        self._end = sum(len(line) for line in lines[:valid])
        return True

    def read_tensors(self) -> dict[str, Tensor]:
        assert self.intent is not None
        tensors = {}
        try:
            with open(self.tensor_path, "rb") as file:
                for name, dtype, shape, checksum in self.intent["tensors"]:
                    nbytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
                    content = bytearray(file.read(nbytes))
                    if len(content) != nbytes or f"{digest(content):016x}" != checksum:
                        raise StoreError(
                            f"{self.tensor_path} is damaged: {name} does not have the checksum in {self.path.name}"
                        )
                    flat = (
                        torch.frombuffer(content, dtype=DTYPES[dtype])
                        if nbytes
                        else torch.empty(0, dtype=DTYPES[dtype])
                    )
                    tensors[name] = flat.view(shape)
        except OSError as error:
            raise StoreError(f"{self.tensor_path} cannot be read: {error.strerror or error}") from error
        return tensors

    def forget(self) -> None:
        """The step is committed, or was never begun."""
        self.intent, self.records = None, []
        if self._descriptor is not None:
            self.system.close(self._descriptor)
            self._descriptor = None

    def _write_tensors(self, tensors: Mapping[str, Tensor]) -> list[list[Any]]:
        """One after another, without a copy of them all."""
        described, at = [], 0
        descriptor = self.system.open(self.tensor_path, create=True)
        try:
            for name, tensor in tensors.items():
                content = as_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8))
                self._write(descriptor, content, at)
                at += len(content)
                dtype = DTYPE_NAMES[tensor.dtype]
                described.append([name, dtype, list(tensor.shape), f"{digest(content):016x}"])
            if self.sync:
                self.system.sync(descriptor)
        finally:
            self.system.close(descriptor)
        return described

    def _write(self, descriptor: int, view: memoryview, at: int) -> None:
        moved = 0
        while moved < len(view):
            moved += self.system.write(descriptor, view[moved:], at + moved)


def _seal(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return f"{digest(text):016x} ".encode() + text + b"\n"


def _unseal(line: bytes) -> dict[str, Any] | None:
    """A record, if it was written to its end and not a bit of it has changed."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != f"{digest(text):016x}".encode():
        return None
    return dict(json.loads(text))

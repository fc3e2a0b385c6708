"""Weights: where a model's first values come from, tensor by tensor, so that they never need to be in memory all at once.

In: a model with weights, or on the meta device; or safetensors files. Out: an iterator of (name, tensor). A module on the meta
device is given memory, initialised the way it initialises itself, read, and returned to meta, one block of layers at a time.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES as DTYPES
from torch import Tensor, nn

from packhorse.errors import ModelError


def read_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by first name; those on the meta device are initialised on the way."""
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    seen: set[str] = set()
    for unit in _units(model):
        made = _materialise(model, unit, {i for i, name in names.items() if name not in seen})
        for key, tensor in made.items():
            seen.add(names[key])
            yield names[key], tensor
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in seen:
            yield name, tensor.detach()


def _units(model: nn.Module) -> Iterator[list[nn.Module]]:
    """What is initialised together: a numbered item of a list with all it contains, other modules by themselves."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if name.rpartition(".")[2].isdigit():
            members = list(_children_first(module))
            inside.update(members)
            yield members
        else:
            yield [module]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """A parent may correct what its children did."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _materialise(model: nn.Module, unit: list[nn.Module], wanted: set[int]) -> dict[int, Tensor]:
    """Values for the meta tensors of these modules, by the id of the tensor they stand for."""
    made: dict[int, Tensor] = {}
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in unit:
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta or id(tensor) not in wanted:
                    continue
                if id(tensor) not in made:
                    empty = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                undo.append((table, name, tensor))
                table[name] = made[id(tensor)]
    if not made:
        return {}
    try:
        for module in unit:
            _initialise(model, module)
    finally:
        for table, name, tensor in undo:
            table[name] = tensor
    _refuse_uninitialised(model, made)
    return {key: tensor.detach() for key, tensor in made.items()}


def _initialise(model: nn.Module, module: nn.Module) -> None:
    """As the module, or the Hugging Face model around it, would."""
    owner = _find_owner(model, module)
    with torch.no_grad():
        if owner is not None:
            owner._init_weights(module)
            return
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, name, None)
            if callable(reset):
                reset()
                return


def _find_owner(model: nn.Module, module: nn.Module) -> Any:
    """The innermost module around this one that initialises others."""
    owner = None
    for candidate in model.modules():
        if callable(getattr(candidate, "_init_weights", None)) and any(module is m for m in candidate.modules()):
            owner = candidate
    return owner


def _refuse_uninitialised(model: nn.Module, made: dict[int, Tensor]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = made.get(id(tensor))
        if value is not None and value.is_floating_point() and value.isnan().any():
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ModelError(
                f"{name} is on the meta device, and {type(owner).__name__} has no reset_parameters() that gives it a value; "
                "add one, pass the model with weights, or weights=... with a safetensors file"
            )


class SafetensorsFiles:
    """Tensors of a safetensors file, or of a directory of them, read one by one, without mapping the files into memory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files or not all(f.is_file() for f in files):
            raise ModelError(f"weights: {self.path} is no safetensors file, nor a directory that holds any")
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in files:
            for name, (start, entry) in _read_header(file).items():
                self._entries[name] = (file, start, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str) -> Tensor:
        file, start, entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        first, last = entry["data_offsets"]
        if last - first != tensor.nbytes:
            raise ModelError(f"{file}: {name} has {last - first} bytes, expected {tensor.nbytes} for its shape")
        flat: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        view = memoryview(flat)
        with open(file, "rb", buffering=0) as source:
            source.seek(start + first)
            moved = 0
            while moved < len(view):
                count = source.readinto(view[moved:])
                if not count:
                    raise ModelError(f"{file} ends within {name}")
                moved += count
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(source.fileno(), start + first, last - first, os.POSIX_FADV_DONTNEED)
        return tensor


def _read_header(file: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    try:
        with open(file, "rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(source.read(length))
        return {name: (8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError) as error:
        raise ModelError(f"weights: {file} cannot be read as safetensors: {error}") from None


def read_files(model: nn.Module, path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by first name, from files; buffers that no file holds come from the model."""
    files = SafetensorsFiles(path)
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    missing = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stored = next((n for n in names[id(tensor)] if n in files), None)
        if stored is None:
            missing.add(name)
            continue
        value = files.read(stored)
        if tuple(value.shape) != tuple(tensor.shape):
            raise ModelError(f"weights: {name} is {list(value.shape)} in {path}, expected {list(tensor.shape)}")
        yield name, value
    parameters = [name for name, _ in model.named_parameters() if name in missing]
    if parameters:
        raise ModelError(
            f"weights: {path} has no tensor {parameters[0]!r} (nor {len(parameters) - 1} more of the model's parameters)"
        )
    for name, tensor in read_model(model):
        if name in missing:
            yield name, tensor

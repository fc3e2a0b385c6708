"""Weights: where a model's first values come from, tensor by tensor, so that they never need to be in memory all at once.

In: a model with weights, or on the meta device; or safetensors files. Out: an iterator of (name, tensor). A module on the meta
device is given memory, initialised the way it initialises itself, read, and returned to meta, one block of layers at a time.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor, nn

from packhorse.errors import ModelError

DTYPES: dict[str, torch.dtype] = {code: dtype for code, dtype in _TYPES.items() if dtype is not None}


def read_model(model: nn.Module, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by first name, or `only` some; those on the meta device are initialised on the way."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    names = {id(t): name for name, t in everything if only is None or name in only}
    seen: set[str] = set()
    for unit in _units(model):
        made = _materialise(model, unit, {i for i, name in names.items() if name not in seen})
        for key, tensor in made.items():
            seen.add(names[key])
            yield names[key], tensor
    for name, tensor in everything:
        if name not in seen and id(tensor) in names:
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


class FileTensor:
    """A tensor in a safetensors file, read when asked for, whole or in part, without mapping the file into memory."""

    def __init__(self, name: str, file: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]):
        self.name, self.file, self.offset, self.dtype, self.shape = name, file, offset, dtype, shape

    def read_into(self, target: Tensor, start: int = 0) -> None:
        """Fills a flat tensor with elements from `start` on, cast if it has another dtype."""
        if target.dtype != self.dtype:
            stored = torch.empty(target.numel(), dtype=self.dtype)
            self.read_into(stored, start)
            target.copy_(stored)
            return
        flat: Any = target.view(torch.uint8).numpy() if target.numel() else b""
        view, first = memoryview(flat), self.offset + start * self.dtype.itemsize
        try:
            with open(self.file, "rb", buffering=0) as source:
                source.seek(first)
                moved = 0
                while moved < len(view):
                    count = source.readinto(view[moved:])
                    if not count:
                        raise ModelError(f"{self.file} ends within {self.name}")
                    moved += count
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(source.fileno(), first, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ModelError(f"reading {self.name} from {self.file} failed: {error.strerror or error}") from error

    def load(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor.view(-1))
        return tensor


class SafetensorsFiles(Mapping[str, FileTensor]):
    """The tensors of a safetensors file, or of a directory of them; an index there says which files count."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = self._find_files()
        if not files or not all(f.is_file() for f in files):
            raise ModelError(f"weights: {self.path} is no safetensors file, nor a directory that holds any")
        self._tensors = {name: tensor for file in files for name, tensor in _read_header(file).items()}

    def _find_files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.path.glob("*.safetensors"))
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("weight_map does not map names to files")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"weights: {index} cannot be read: {error}") from None
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ModelError(f"weights: {index} names {missing[0]}, which is not there")
        return [self.path / name for name in names]

    def __getitem__(self, name: str) -> FileTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read_header(file: Path) -> dict[str, FileTensor]:
    """What a file says it holds, checked against its size."""
    try:
        with open(file, "rb") as source:
            size = file.stat().st_size
            length = int.from_bytes(source.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(source.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            first, last = entry["data_offsets"]
            if (
                last - first != torch.Size(shape).numel() * dtype.itemsize
                or not 0 <= first <= last <= size - 8 - length
            ):
                raise ValueError(f"{name} claims bytes {first} to {last} for {list(shape)} of {entry['dtype']}")
            tensors[name] = FileTensor(name, file, 8 + length + first, dtype, shape)
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weights: {file} cannot be read as safetensors: {error}") from None


def read_files(model: nn.Module, path: str | Path) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """All parameters and buffers by first name, from files; buffers that no file holds come from the model.

    All names and shapes are compared before the first value is handed out.
    """
    files = SafetensorsFiles(path)
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    parameters = {name for name, _ in model.named_parameters()}
    found: dict[str, FileTensor] = {}
    missing: list[str] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stored = next((n for n in names[id(tensor)] if n in files), None)
        if stored is None:
            missing.append(name)
        elif files[stored].shape != tuple(tensor.shape):
            shapes = f"{list(files[stored].shape)} in {path}, expected {list(tensor.shape)}"
            raise ModelError(f"weights: {name} is {shapes}")
        else:
            found[name] = files[stored]
    lost = [name for name in missing if name in parameters]
    if lost:
        raise ModelError(
            f"weights: {path} has no tensor {lost[0]!r} (nor {len(lost) - 1} more of the model's parameters)"
        )

    def read() -> Iterator[tuple[str, Tensor | FileTensor]]:
        yield from found.items()
        if missing:
            yield from read_model(model, missing)

    return read()


def refill(tensor: Tensor, value: Tensor) -> None:
    """A tensor of a model gets a value, and memory of its own again if that was freed."""
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        tensor.data = value.to(tensor.dtype)
    else:
        tensor.copy_(value)

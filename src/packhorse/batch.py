"""Batches: what structure they have, which tensors carry the batch dimension, how they are cut into microbatches.

In: an example batch (a tensor, tuple, list, dict or nested mix). Out: a `BatchSpec`, a value that flattens, checks and
splits every later batch of the same structure.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from packhorse.errors import BatchError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a batch. `batched` leaves are sliced along dimension 0; others go whole to every microbatch."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool

    def describe(self) -> str:
        rows = "rows" if self.batched else str(self.shape[0]) if self.shape else ""
        sizes = ", ".join([rows, *map(str, self.shape[1:])]).strip(", ")
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The structure of a batch: its tree, its tensors, and its plain values (numbers, strings, None)."""

    tree: TreeSpec
    leaves: tuple[Leaf, ...]
    constants: tuple[tuple[int, Any], ...]  # (position among all leaves of the tree, value)
    rows: int

    @classmethod
    def of(cls, example: Any) -> "BatchSpec":
        paths, tree = _flatten(example)
        tensors = [(path, leaf) for path, leaf in paths if isinstance(leaf, Tensor)]
        if not tensors:
            raise BatchError(
                f"the example batch has no tensor: found {type(example).__name__}; pass a tensor, tuple or dict of tensors"
            )
        rows = _find_rows(example)
        if not rows:
            raise BatchError("the example batch has no rows: its tensors need a dimension 0 of at least 1")
        leaves = tuple(
            Leaf(path, tuple(leaf.shape), leaf.dtype, leaf.ndim > 0 and leaf.shape[0] == rows) for path, leaf in tensors
        )
        constants = tuple((i, leaf) for i, (_, leaf) in enumerate(paths) if not isinstance(leaf, Tensor))
        return cls(tree, leaves, constants, rows)

    def flatten(self, batch: Any) -> list[Tensor]:
        """The batch's tensors in order, after checking that its structure is that of the example."""
        paths, tree = _flatten(batch)
        if tree != self.tree and _flatten(_in_tuples(batch))[1] != _flatten(_in_tuples(self._example()))[1]:
            expected = ", ".join(leaf.path or "a tensor" for leaf in self.leaves)
            found = ", ".join(path or type(leaf).__name__ for path, leaf in paths)
            raise BatchError(
                f"the batch has another structure than the example: found ({found}), expected ({expected}); "
                "pass batches like the example, or capture again with an example like this batch"
            )
        constants = dict(self.constants)
        for i, (path, found) in enumerate(paths):
            if i in constants and not _same_constant(found, constants[i]):
                raise BatchError(
                    f"batch value {path} is {found!r}, but {constants[i]!r} was captured as a constant; pass a tensor in the "
                    "example to let it vary"
                )
        tensors = [leaf for i, (_, leaf) in enumerate(paths) if i not in constants]
        rows = self._rows(tensors)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            self._check(leaf, tensor, rows)
        return tensors

    def unflatten(self, tensors: list[Tensor]) -> Any:
        leaves: list[Any] = list(tensors)
        for position, value in self.constants:
            leaves.insert(position, value)
        return tree_unflatten(leaves, self.tree)

    def _example(self) -> Any:
        """The structure with nothing in it."""
        return tree_unflatten([None] * self.tree.num_leaves, self.tree)

    def count_rows(self, batch: Any) -> int:
        return self._rows(self.flatten(batch))

    def split(self, batch: Any, size: int) -> list[Any]:
        """Microbatches of `size` rows in order; the last one may be smaller."""
        tensors = self.flatten(batch)
        rows = self._rows(tensors)
        return [
            self.unflatten(
                [t[at : at + size] if leaf.batched else t for leaf, t in zip(self.leaves, tensors, strict=True)]
            )
            for at in range(0, rows, size)
        ]

    def _rows(self, tensors: list[Tensor]) -> int:
        return next(
            (
                t.shape[0]
                for leaf, t in zip(self.leaves, tensors, strict=True)
                if leaf.batched and isinstance(t, Tensor) and t.ndim
            ),
            0,
        )

    def _check(self, leaf: Leaf, tensor: Any, rows: int) -> None:
        where = f"batch value {leaf.path}" if leaf.path else "the batch"
        if not isinstance(tensor, Tensor):
            raise BatchError(
                f"{where} is a {type(tensor).__name__}, expected a tensor {leaf.describe()} as in the example"
            )
        same_sizes = tensor.shape[1:] == leaf.shape[1:] if leaf.batched else tensor.shape == leaf.shape
        if tensor.ndim != len(leaf.shape) or not same_sizes or tensor.dtype != leaf.dtype:
            found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise BatchError(
                f"{where} is {found}, expected {leaf.describe()} as in the example; only dimension 0 may change, "
                "capture again for other sizes"
            )
        if leaf.batched and (tensor.shape[0] != rows or rows == 0):
            raise BatchError(
                f"{where} has {tensor.shape[0]} rows, expected {rows or 'at least 1'} as in the batch's first tensor"
            )


def _find_rows(example: Any) -> int:
    """The size of dimension 0 that most tensors share; where several are as common, the first that is not 1."""
    leaves = tree_leaves(dict(example) if isinstance(example, Mapping) else example)
    sizes = Counter(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    return max(sizes, key=lambda size: (sizes[size], size != 1), default=0)


def _flatten(batch: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    leaves, tree = tree_flatten_with_path(_in_key_order(batch))
    return [(_name(path), leaf) for path, leaf in leaves], tree


def _in_key_order(batch: Any) -> Any:
    """BatchEncoding and other mappings are read as plain dicts, at any depth; the order of keys does not matter."""
    if isinstance(batch, Mapping):
        return {key: _in_key_order(batch[key]) for key in sorted(batch, key=str)}
    if type(batch) in (tuple, list):
        return type(batch)(_in_key_order(item) for item in batch)
    return batch


def _in_tuples(batch: Any) -> Any:
    """Loaders make lists of what was a tuple."""
    if isinstance(batch, Mapping):
        return {key: _in_tuples(value) for key, value in batch.items()}
    return tuple(map(_in_tuples, batch)) if type(batch) in (tuple, list) else batch


def _same_constant(found: Any, constant: Any) -> bool:
    """Equal in type and value; what has no plain truth of equality (an array) is no constant."""
    if type(found) is not type(constant) or isinstance(found, Tensor):
        return False
    return bool(found == constant) if isinstance(found, (bool, int, str, type(None))) else repr(found) == repr(constant)


def _name(path: Any) -> str:
    """`['input_ids']` becomes `input_ids`, `[0]` becomes `0`, nested keys are joined by dots."""
    return ".".join(part.strip("[]'\"") for part in keystr(path).replace("][", "]\0[").split("\0") if part)

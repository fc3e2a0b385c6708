"""Values that a commit keeps beside the model, as JSON: positions, schedules, hyper-parameters. No pickle.

In: numbers, text, lists, tuples, sets, dicts with any such keys, counters, small tensors. Out: the same, type for type.
"""

import base64
from collections import Counter, OrderedDict, deque
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import StoreError

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What is written as a list of its items, by tag; the first type that fits is taken.
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Any] = {"counter": Counter, "ordered": OrderedDict, "dict": dict}


def encode(value: Any, where: str) -> Any:
    """As JSON; `where` is what an error calls it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Tensor):
        content = (
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
        return {"tensor": [DTYPE_NAMES[value.dtype], list(value.shape), base64.b64encode(content).decode()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {tag: [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    for tag, kind in _MAPPINGS.items():
        if isinstance(value, kind):
            return {tag: [[encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    raise StoreError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be committed without pickle; expected "
        "numbers, text, lists, dicts and tensors"
    )


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        dtype, shape, text = content
        raw = bytearray(base64.b64decode(text))
        return (
            torch.frombuffer(raw, dtype=DTYPES[dtype]).view(shape) if raw else torch.empty(shape, dtype=DTYPES[dtype])
        )
    if tag == "bytes":
        return base64.b64decode(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(v) for v in content)
    pairs = {decode(k): decode(v) for k, v in content}
    return pairs if tag == "dict" else _MAPPINGS[tag](pairs)

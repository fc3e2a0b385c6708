"""What ranks that train one model must have in common, as texts that can be compared."""

import hashlib
from types import CodeType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from packhorse.batch import BatchSpec
from packhorse.errors import BatchError


def describe_model(model: nn.Module) -> str:
    """The same for the same code with the same sizes."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(model).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad};".encode())
    for kind in sorted({type(module) for module in model.modules()}, key=str):
        digest.update(_describe_code(getattr(kind.forward, "__code__", None)))
    return f"{type(model).__name__} {digest.hexdigest()}"


def describe_function(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} {hashlib.blake2b(_describe_code(code), digest_size=8).hexdigest()}"


def _describe_code(code: CodeType | None) -> bytes:
    if code is None:
        return b""
    constants = [_describe_code(c).hex() if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code + repr((code.co_names, constants)).encode()


def describe_values(model: nn.Module) -> str:
    """Of a model without values: of the generator that will make them."""
    digest = hashlib.blake2b(digest_size=8)
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            digest.update(repr(tensor.detach().double().sum().item()).encode())
    if any(p.is_meta for p in model.parameters()):
        digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def describe_batch(batch: Any) -> str:
    try:
        spec = BatchSpec.of(batch)
    except BatchError as error:  # which whoever uses it raises
        return str(error)
    return f"{spec.rows} rows of {', '.join(f'{leaf.path} {leaf.describe()}'.strip() for leaf in spec.leaves)}"


def describe_rows(batch: Any) -> str:
    """The first and the last, which differ where ranks draw samples of their own."""
    digest = xxhash.xxh3_64()
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            digest.update(repr(leaf).encode())
            continue
        rows = leaf.detach().unsqueeze(0) if leaf.ndim == 0 else leaf.detach()
        for part in (rows[:1], rows[-1:]):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

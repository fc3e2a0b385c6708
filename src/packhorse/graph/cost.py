"""What one operation costs and does to its operands, found by running it once on fake tensors of the example's sizes.

In: an operator and its arguments with sizes in place of values. Out: `Facts`. Repeated blocks ask the same questions, so
answers are kept by signature.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor argument without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True)
class Facts:
    known: bool = False  # False: it could not be run on the example's sizes
    flops: int = 0
    differentiable: tuple[bool, ...] = ()  # per tensor of the flattened result
    aliases: tuple[tuple[int, int], ...] = ()  # (result, operand), both by position among tensors


class CostProbe:
    def __init__(self, device: torch.device):
        self.device = device
        self.known: dict[Any, Facts] = {}

    def ask(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Facts:
        key = (target, grad, repr(args), repr(kwargs))
        if key not in self.known:
            self.known[key] = self._run(target, args, kwargs, grad)
        return self.known[key]

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Facts:
        operands: list[Tensor] = []

        def make(spec: Spec) -> Tensor:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self.device)
            if spec.differentiable:
                tensor = tensor.requires_grad_().view_as(tensor)  # no leaf, so that in-place operations are allowed
            operands.append(tensor)
            return tensor

        try:
            with FakeTensorMode(), torch.set_grad_enabled(grad):
                fake_args, fake_kwargs = tree_map_only(Spec, make, (args, kwargs))
                with FlopCounterMode(display=False, custom_mapping=_FLOPS) as counter:
                    result = target(*fake_args, **fake_kwargs)
        except Exception:  # sizes that depend on data have no example; the operation then counts as free
            return Facts()
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        storages = [operand.untyped_storage()._cdata for operand in operands]
        aliases = tuple(
            (i, j)
            for i, tensor in enumerate(results)
            for j, storage in enumerate(storages)
            if tensor.untyped_storage()._cdata == storage
        )
        return Facts(True, counter.get_total_flops(), tuple(t.requires_grad for t in results), aliases)


def _cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _grouped_product_flops(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * mat_a[0] * mat_a[1] * mat_b[-1]


# Products that torch's own table leaves out.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    torch.ops.aten._grouped_mm: _grouped_product_flops,
}

"""What one operation costs and does to its operands, found by running it once on fake tensors of the example's sizes.

In: an operator and its arguments with sizes in place of values. Out: `Facts`. Repeated blocks ask the same questions, so
answers are kept by signature.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from packhorse.graph.allocations import Allocations
from packhorse.graph.lean import find_kernel


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
    saved: tuple[int, ...] = ()  # operands that backward reads
    saved_results: tuple[int, ...] = ()
    hidden: int = 0  # bytes that backward reads beside those
    forward_peak: int = 0  # bytes allocated while it runs without gradients, results included
    building_peak: int = 0  # the same with gradients
    backward_peak: int = 0  # the same for its backward, gradients of operands included


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
        target = find_kernel(str(target), target)
        operands: list[Tensor] = []
        leaves: list[Tensor] = []

        def make(spec: Spec) -> Tensor:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self.device)
            if spec.differentiable:
                leaves.append(tensor.requires_grad_())
                tensor = tensor.clone()  # no leaf, so that in-place operations are allowed
            operands.append(tensor)
            return tensor

        try:
            with FakeTensorMode(), torch.set_grad_enabled(grad):
                fake_args, fake_kwargs = tree_map_only(Spec, make, (args, kwargs))
                packed: dict[int, int] = {}  # storage -> bytes
                with (
                    Allocations(operands) as building,
                    torch.autograd.graph.saved_tensors_hooks(lambda t: _note(t, packed), lambda t: t),
                    FlopCounterMode(display=False, custom_mapping=_FLOPS) as counter,
                ):
                    result = target(*fake_args, **fake_kwargs)
                results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                backward_peak = _run_backward(results, operands, leaves, packed)
                with Allocations(operands) as forward, torch.no_grad():
                    target(*fake_args, **fake_kwargs)
        except Exception:  # sizes that depend on data have no example; the operation then counts as free
            return Facts()
        storages = [operand.untyped_storage()._cdata for operand in operands]
        made = [tensor.untyped_storage()._cdata for tensor in results]
        aliases = tuple(
            (i, j)
            for i, tensor in enumerate(results)
            for j, storage in enumerate(storages)
            if tensor.untyped_storage()._cdata == storage
        )
        return Facts(
            True,
            counter.get_total_flops(),
            tuple(t.requires_grad for t in results),
            aliases,
            tuple(i for i, storage in enumerate(storages) if storage in packed),
            tuple(i for i, storage in enumerate(made) if storage in packed and storage not in storages),
            sum(nbytes for storage, nbytes in packed.items() if storage not in storages and storage not in made),
            forward.peak,
            building.peak,
            backward_peak,
        )


def _note(tensor: Tensor, packed: dict[int, int]) -> Tensor:
    storage = tensor.untyped_storage()
    packed[storage._cdata] = storage.nbytes()
    return tensor


def _run_backward(results: list[Tensor], operands: list[Tensor], leaves: list[Tensor], packed: Iterable[int]) -> int:
    """Bytes its backward allocates at most at a time."""
    roots = [t for t in results if t.requires_grad]
    if not roots or not leaves:
        return 0
    seeds = [torch.empty_like(t) for t in roots]
    with Allocations([*results, *operands, *seeds], packed) as allocations, contextlib.suppress(NotImplementedError):
        torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return allocations.peak


def _cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _grouped_product_flops(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * mat_a[0] * mat_a[1] * mat_b[-1]


# Products that torch's own table leaves out.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    torch.ops.aten._grouped_mm: _grouped_product_flops,
}

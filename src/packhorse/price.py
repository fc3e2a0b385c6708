"""Prices: how long an operation takes on a machine, from what it computes and moves.

In: a node of a graph and a `Machine`. Out: seconds forward and backward, at the example's rows. Products are priced by their
operations, all else by the bytes it reads and writes; where a machine has a measured rate for a family of kernels, by that.
"""

from typing import NamedTuple

import torch

from packhorse.graph import Graph, Node
from packhorse.graph.graph import Operation
from packhorse.machine import LARGE, Machine
from packhorse.store import GRADIENT, Block

# Families of kernels by the beginnings of their names; the first that fits counts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "_scaled_dot_product"),
    "convolution": ("conv", "_convolution"),
    "matmul": ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "_grouped_mm", "mv", "dot"),
    "recurrent": ("lstm", "gru", "rnn"),
    "softmax": (
        "softmax",
        "log_softmax",
        "_softmax",
        "_log_softmax",
        "cross_entropy_loss",
        "cross_entropy_over_logits",
        "nll_loss",
    ),
    "norm": ("layer_norm", "batch_norm", "group_norm", "native_", "rms_norm", "instance_norm", "_native"),
    "transcendental": ("gelu", "tanh", "sigmoid", "silu", "exp", "log", "erf", "sin", "cos", "pow", "mish", "softplus"),
    "pool": ("max_pool", "avg_pool", "adaptive_", "upsample"),
    "index": ("embedding", "index", "gather", "scatter"),
    "random": ("dropout", "bernoulli", "rand", "native_dropout"),
}
BY_FLOPS = ("attention", "convolution", "matmul", "recurrent")
PASSES = {False: 1, True: 3}  # over memory, by an update in tiles, and of whole tensors
PIECE = 2.5e-5  # seconds of Python to bring a piece of a parameter, its gradient and states together before its step
OVERHEAD = 8e-6  # seconds to start a kernel from Python, where it was not measured

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Price(NamedTuple):
    """Seconds: of a forward to be forgotten, of one that builds a graph, of one only for its graph, of a backward.

    And of what becomes of its gradients: the first of a step becomes a sum, others are added to it.
    """

    forward: float
    building: float
    rebuilding: float
    backward: float
    first: float = 0.0
    adding: float = 0.0


def _price_fresh(machine: Machine, *sizes: float) -> float:
    """What large new pieces of memory cost, where the system hands them out page by page."""
    rate = machine.kernels.get("fresh")
    return sum(n for n in sizes if n >= LARGE) / rate if rate else 0.0


def find_family(name: str) -> str:
    return next((family for family, starts in FAMILIES.items() if name.startswith(starts)), "elementwise")


def price_node(graph: Graph, node: Node, machine: Machine, share: float, *, is_hollow: bool) -> Price:
    """For `share` of the example's rows. Backward is only priced where there is one: a product for each operand's gradient,
    or the bytes moved once more. What is hollow is only launched when it runs for a graph."""
    launch, backward = (machine.kernels.get(name, OVERHEAD) for name in ("launch", "launch.backward"))
    values = graph.values
    own_forward, own_backward = _price_kernel(graph, node, machine, share)
    forward = launch + own_forward
    backward = backward + own_backward if own_backward else 0.0
    results = [share * values[r].nbytes for r in node.results]
    gradients = [
        (1.0 if values[o].kind == "parameter" else share) * values[o].nbytes
        for o in node.operands
        if values[o].type.differentiable
    ]
    if not node.operation.aliases or node.operation.forward_peak:
        forward += _price_fresh(machine, *results)
        backward += _price_fresh(machine, *gradients) if backward else 0.0
    return Price(forward, forward, launch if is_hollow else forward, backward)


def _price_kernel(graph: Graph, node: Node, machine: Machine, share: float) -> tuple[float, float]:
    operation, values = node.operation, graph.values
    if operation.aliases and not operation.flops and not operation.forward_peak:
        return 0.0, 0.0  # a view
    differentiable = any(values[r].type.differentiable for r in node.results)
    family = find_family(operation.name)
    if operation.flops and family in BY_FLOPS:
        flops = operation.flops * (0.5 if _is_causal(operation) else 1.0)
        dtype = next((values[r].type.dtype for r in node.results), None)
        precision = _PRECISIONS.get(dtype or torch.float32, "fp32")
        forward = machine.rate(family, precision)
        needed = sum(values[o].type.differentiable for o in node.operands[:2])  # a product for each operand's gradient
        products = max(needed, 1) if differentiable else 0
        backward = products * flops / machine.rate(family, precision, backward=True)
        return share * flops / forward, share * backward
    moved = operation.nbytes + sum(values[o].nbytes for o in node.operands)
    if family == "index" and operation.name.startswith("embedding"):
        moved = 2 * operation.nbytes
        gradient = values[node.operands[0]].nbytes  # as large as the table, zeroed
        rate = machine.rate(family)
        return share * moved / rate, (gradient + share * moved) / rate if differentiable else 0.0
    forward_seconds = share * moved / machine.rate(family)
    backward_bytes = moved + sum(values[o].nbytes for o in node.operands if values[o].type.differentiable)
    backward_seconds = share * backward_bytes / machine.rate(family, backward=True) if differentiable else 0.0
    return forward_seconds, backward_seconds


def _is_causal(operation: Operation) -> bool:
    """Attention that looks back only: half of what the counter counts is skipped."""
    position = 5  # of is_causal among the arguments of scaled_dot_product_attention
    given = operation.args[position : position + 1] + tuple(v for k, v in operation.kwargs if k == "is_causal")
    return find_family(operation.name) == "attention" and True in given


def price_update(block: Block, machine: Machine, *, on_device: bool = False) -> float:
    """Every kind is read and written, the gradient read."""
    kinds = sum(dtype.itemsize for kind, dtype in block.kinds.items() if kind != GRADIENT)
    rate = machine.bandwidth["device"] if on_device else machine.rate("update")
    return PASSES[block.whole] * block.numel * (2 * kinds + 4) / rate

"""Segments: pure pieces of a graph, run with parameters, buffers and inputs, giving outputs.

In: a graph and a range of its nodes. Out: `Segment`. Composed in order, the segments of any partition are the model; run
one by one, with one `differentiate` each from last to first, they give the model's gradients bit for bit.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from packhorse.graph import Graph, Node, Size
from packhorse.graph.graph import Rng, draw_as_it_comes
from packhorse.partition.code import Code, get_code, write_code
from packhorse.partition.hollow import find_hollow


class Segment:
    """Nodes `start` to `stop` of a graph. Pure but for the buffers it is given, which it may advance (batch norm)."""

    def __init__(self, graph: Graph, index: int, start: int, stop: int):
        self.graph, self.index, self.start, self.stop = graph, index, start, stop

    @cached_property
    def _binding(self) -> Any:
        return write_code(self.graph, self.start, self.stop)

    @cached_property
    def code(self) -> Code:
        """The compiled function; twins share the object."""
        code = get_code(self._binding.source)
        self._binding.source = code.source  # one text for all twins
        return code

    @property
    def hollow(self) -> frozenset[int]:
        """The nodes that need not compute when only the graph is wanted."""
        return find_hollow(self.graph, self.start, self.stop)

    @cached_property
    def looked_up(self) -> dict[str, int]:
        """Parameters that are only looked up, by an embedding, and once: name -> the node. Most rows have no gradient then."""
        uses = Counter(o for node in self.nodes for o in node.operands)
        return {
            self.graph.values[node.operands[0]].name: i
            for i, node in enumerate(self.nodes, self.start)
            if _looks_up(node)
            and uses[node.operands[0]] == 1
            and self.graph.values[node.operands[0]].kind == "parameter"
        }

    @cached_property
    def rebuilding_code(self) -> Code:
        """The same function without what only its outputs need."""
        return get_code(write_code(self.graph, self.start, self.stop, self.hollow).source)

    @cached_property
    def rebuilding_code_by_rows(self) -> Code:
        """The same; what is looked up gets sparse gradients."""
        by_rows = self.looked_up.values()
        return get_code(write_code(self.graph, self.start, self.stop, self.hollow, by_rows).source)

    def _names(self, values: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.graph.values[i].name for i in values)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters it reads, in the order of the code's arguments."""
        return self._names(self._binding.parameters)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        return self._names(self._binding.buffers)

    @cached_property
    def constants(self) -> tuple[str, ...]:
        return self._names(self._binding.constants)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads: the batch's own, and what earlier segments made."""
        return self._names(self._binding.inputs)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values it makes that later segments, or the caller, need."""
        return self._names(self._binding.outputs)

    @cached_property
    def differentiable_inputs(self) -> tuple[str, ...]:
        """The inputs that gradients flow back through."""
        values = self.graph.values
        return tuple(values[i].name for i in self._binding.inputs if values[i].type.differentiable)

    @cached_property
    def is_differentiable(self) -> bool:
        """Whether there is anything to compute backward."""
        return any(self.graph.values[i].type.differentiable for i in self._binding.outputs)

    @cached_property
    def borrowed_outputs(self) -> tuple[str, ...]:
        """The outputs that may be views of a parameter or buffer."""
        values = self.graph.values
        borrowed = {i for node in self.nodes for i in node.operands if values[i].kind not in ("node", "input")}
        for node in self.nodes:
            borrowed.update(result for result, operand in node.aliases if operand in borrowed)
        return tuple(values[i].name for i in self._binding.outputs if i in borrowed)

    @cached_property
    def needs_grad_mode(self) -> bool:
        """Whether a kernel in it gives other bits without gradients: then even a forward to be forgotten runs with them."""
        return any(_depends_on_grad_mode(self.graph, node) for node in self.nodes)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules whose operations it runs, in order, without those that contain another one listed."""
        seen = dict.fromkeys(node.module for node in self.nodes if node.module)
        return tuple(m for m in seen if not any(other.startswith(f"{m}.") for other in seen))

    @property
    def nodes(self) -> Sequence[Node]:
        return self.graph.nodes[self.start : self.stop]

    @cached_property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    @cached_property
    def parameter_nbytes(self) -> int:
        return sum(self.graph.parameters[name].nbytes for name in self.parameters)

    @cached_property
    def input_nbytes(self) -> int:
        return sum(self.graph.values[i].nbytes for i in self._binding.inputs)

    @cached_property
    def output_nbytes(self) -> int:
        return sum(self.graph.values[i].nbytes for i in self._binding.outputs)

    @cached_property
    def nbytes(self) -> int:
        """What running it touches at the example's rows: parameters, buffers, inputs, and every value it makes."""
        buffers = sum(self.graph.buffers[name].nbytes for name in self.buffers)
        return self.parameter_nbytes + buffers + self.input_nbytes + self.made_nbytes

    @cached_property
    def made_nbytes(self) -> int:
        """Every value it makes, at the example's rows."""
        return sum(node.nbytes for node in self.nodes)

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        rng: Rng | None = None,
        *,
        rows: int | None = None,
    ) -> dict[str, Tensor]:
        """Runs it. `rng(ordinal)` is called before every random operation; without it they draw as they come.

        `rows` are those of the batch; when not given they are read off an input.
        """
        return self._run(self.code, parameters, buffers, inputs, rng, rows)

    def rebuild(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        rng: Rng | None = None,
        *,
        rows: int | None = None,
        by_rows: bool = False,
    ) -> dict[str, Tensor]:
        """Runs it once more to have its graph: outputs may be differentiated, but some have no values.

        `by_rows`: gradients of what is `looked_up` are sparse, a row for every look-up.
        """
        code = self.rebuilding_code_by_rows if by_rows else self.rebuilding_code
        return self._run(code, parameters, buffers, inputs, rng, rows)

    def _run(
        self,
        code: Code,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        rng: Rng | None,
        rows: int | None,
    ) -> dict[str, Tensor]:
        graph, binding = self.graph, self._binding
        base = binding.first_ordinal
        key = draw_as_it_comes if rng is None else (lambda o: rng(o if isinstance(o, str) else base + o))
        outputs = code.function(
            *(parameters[name] for name in self.parameters),
            *(buffers[name] for name in self.buffers),
            *(graph.constants[name] for name in self.constants),
            *(inputs[name] for name in self.inputs),
            *(graph.blocks[target] for target in binding.blocks),
            self._find_rows(inputs) if rows is None else rows,
            key,
        )
        return dict(zip(self.outputs, outputs, strict=True))

    def _find_rows(self, inputs: Mapping[str, Tensor]) -> int:
        for i, name in zip(self._binding.inputs, self.inputs, strict=True):
            for dimension, size in enumerate(self.graph.values[i].type.shape):
                if isinstance(size, Size) and size.expression == "b":
                    return inputs[name].shape[dimension]
        return 0

    def differentiate(
        self,
        parameters: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """One `autograd.grad`: gradients of this segment's parameters and inputs, from those of later segments.

        `gradients` holds, by name, what later segments found for values and parameters; `inputs` are the leaves this
        segment was run on. What a later segment read as well (a skip, a tied parameter) is a root beside the outputs, so
        that autograd adds the later gradient first, as it would in one graph: adding it afterwards rounds differently.
        """
        leaves = {
            name: tensor
            for name, tensor in [*((n, parameters[n]) for n in self.parameters), *((n, inputs[n]) for n in self.inputs)]
            if tensor.requires_grad
        }
        roots = self.find_roots(leaves, outputs, gradients)
        if not roots or not leaves:
            return {}
        found = torch.autograd.grad(
            list(roots.values()), list(leaves.values()), [gradients[name] for name in roots], allow_unused=True
        )
        return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}

    def find_roots(
        self, leaves: Mapping[str, Tensor], outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a backward starts from: outputs, and leaves that later segments read too."""
        candidates = [*((name, outputs[name]) for name in self.outputs), *leaves.items()]
        return {name: tensor for name, tensor in candidates if name in gradients and tensor.requires_grad}

    def __repr__(self) -> str:
        return f"Segment({self.index}: {', '.join(self.modules)})"


def _looks_up(node: Node) -> bool:
    """An embedding as it comes: with a dense gradient, not scaled by how often a row is used."""
    operation = node.operation
    return operation.name == "embedding" and len(operation.args) <= 3 and not operation.kwargs and not node.region


# Recurrent layers take a fused kernel where nothing needs a gradient; opaque blocks may do anything.
_RECURRENT = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu", "aten.lstm_cell", "aten.gru_cell")


def _depends_on_grad_mode(graph: Graph, node: Node) -> bool:
    target = node.operation.target
    if target in graph.blocks or target.startswith(_RECURRENT):
        return True
    if target.startswith(
        "aten.scaled_dot_product_attention"
    ):  # a bias that needs a gradient rules the fused kernel out
        return any(graph.values[ref].type.differentiable for ref in node.operands[3:4])
    return False

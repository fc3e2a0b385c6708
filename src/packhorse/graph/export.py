"""From a module to a graph by torch.export, on fake tensors: no weights are touched, no memory is needed for them.

In: a model, an example's structure, a loss. Out: a `Graph`. Runs in a child process (see `capture`), because tracing a
deep model leaves hundreds of megabytes behind.
"""

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from packhorse.batch import BatchSpec
from packhorse.errors import CaptureError
from packhorse.graph.cost import CostProbe, Facts, Spec
from packhorse.graph.entry import Entry
from packhorse.graph.faithful import Untraceable, faithful, faked
from packhorse.graph.graph import (
    Buffer,
    Graph,
    Guard,
    Node,
    Operation,
    Parameter,
    Ref,
    Size,
    Stored,
    Type,
    Value,
    describe_state,
    find_roots,
    input_name,
    move_refs,
    nbytes,
    refs,
)
from packhorse.graph.lean import CROSS_ENTROPY, OVER_LOGITS, may_write_over
from packhorse.graph.table import NodeTable, ValueTable
from packhorse.precision import cast_floats, working_dtype

TRAINING = 5  # its place among the arguments of aten.batch_norm
_CHECKS = (
    "_assert",
    "sym_constrain",
    "_functional_assert",
)  # runtime checks that export adds; ours come before the run


def export_graph(entry: Entry, guards: tuple[Guard, ...], packed: bool, device: torch.device) -> Graph:
    """Traces the entry on fake tensors and turns what came out into records."""
    parameters, buffers = describe_state(entry.model, entry.precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    originals = {
        _place_in_memory(tensor): name
        for name, tensor in [*entry.model.named_parameters(), *entry.model.named_buffers()]
    }
    with (
        faithful(entry, guards, packed) as facts,
        faked(entry.model, mode, device, entry.precision),
        torch.enable_grad(),
    ):
        program = _trace(entry, mode, device)
    converter = _Converter(program, entry.spec, parameters, buffers, originals, device)
    converter.convert()
    _copy_written_inputs(converter)
    _refuse_written_constants(converter)
    if device.type == "cpu":
        _write_over_logits(converter)
    values, nodes, outputs = compact(converter.values, converter.nodes, converter.outputs)
    written = {values[ref].name for node in nodes for ref in node.writes if values[ref].kind == "buffer"}
    return Graph(
        name=type(entry.model).__name__,
        mode=entry.mode,
        batch=entry.spec,
        values=values,
        nodes=nodes,
        outputs=outputs,
        output_tree=program.call_spec.out_spec if entry.mode == "predict" else None,
        parameters=parameters,
        buffers={name: replace(buffer, written=name in written) for name, buffer in buffers.items()},
        constants={v.name: converter.constants[v.name] for v in values if v.kind == "constant"},
        guards=guards,
        single_row=facts.single_row or _find_norm_of_one_value(values, nodes),
        precision=entry.precision,
    )


def _trace(entry: Entry, mode: FakeTensorMode, device: torch.device) -> ExportedProgram:
    spec = entry.spec
    rows = max(spec.rows, 2)  # a dimension of 1 would be taken for a constant
    working = working_dtype(entry.precision)
    with mode:
        inputs = tuple(
            cast_floats(
                torch.empty((rows, *leaf.shape[1:]) if leaf.batched else leaf.shape, dtype=leaf.dtype, device=device),
                working,
            )
            for leaf in spec.leaves
        )
    batch = Dim("batch")
    dynamic = tuple({0: batch} if leaf.batched else {} for leaf in spec.leaves)
    return torch.export.export(entry, inputs, dynamic_shapes=(dynamic,), strict=False)


class _Converter:
    """Walks the traced graph once, in order: sizes become expressions, tuples their items, wrapped regions their nodes."""

    def __init__(
        self,
        program: ExportedProgram,
        spec: BatchSpec,
        parameters: dict[str, Parameter],
        buffers: dict[str, Buffer],
        originals: dict[Any, str],
        device: torch.device,
    ):
        self.originals = originals  # the model's own tensors, which a loss may hold on to
        self.program = program
        self.spec = spec
        stored: list[Stored] = [*parameters.values(), *buffers.values()]
        self.first_names = {name: entry.name for entry in stored for name in entry.names}
        self.parameters = parameters
        self.trainable = {name for name, parameter in parameters.items() if parameter.trainable}
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.outputs: tuple[Any, ...] = ()
        self.constants: dict[str, Tensor] = {}
        self.probe = CostProbe(device)
        self.specs: list[Spec | None] = []  # per value, sizes of the example
        self.batch_symbols = self._find_batch_symbols()
        self.printer = PythonPrinter()
        self.refs_by_name: dict[str, Ref] = {}
        self.interned: dict[Any, Any] = {}
        self.num_random = 0
        self.num_regions = 0

    def convert(self) -> None:
        environment: dict[torch.fx.Node, Any] = {}
        self._add_placeholders(environment)
        self.outputs = tuple(_flat(self._walk(self.program.graph_module, environment, ())))

    # -- what comes from outside

    def _find_batch_symbols(self) -> set[sympy.Symbol]:
        """What stands for the rows of the batch: usually one symbol, one an input where nothing relates the inputs."""
        users = [s for s in self.program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        placeholders = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        sizes = [
            placeholders[spec.arg.name].meta["val"].shape[0]
            for leaf, spec in zip(self.spec.leaves, users, strict=True)
            if leaf.batched
        ]
        if not all(isinstance(size, torch.SymInt) for size in sizes):
            raise Untraceable("the model fixes the number of rows of its batch")
        return {size.node.expr for size in sizes}

    def _add_placeholders(self, environment: dict[torch.fx.Node, Any]) -> None:
        leaves = iter(self.spec.leaves)
        for node, spec in zip(
            (n for n in self.program.graph.nodes if n.op == "placeholder"),
            self.program.graph_signature.input_specs,
            strict=True,
        ):
            name, kind = spec.target or "", spec.kind
            if kind is InputKind.USER_INPUT:
                environment[node] = self._outside(input_name(next(leaves).path), "input", node.meta["val"])
            elif kind in (InputKind.PARAMETER, InputKind.BUFFER):
                first = self.first_names[name.removeprefix("model.")]
                label = "parameter" if kind is InputKind.PARAMETER else "buffer"
                environment[node] = self._outside(first, label, node.meta["val"])
            elif kind is InputKind.CONSTANT_TENSOR:
                environment[node] = self._constant(name, node)
            else:
                raise Untraceable(f"the graph needs a {kind.name.lower()} input ({name})")

    def _constant(self, name: str, node: torch.fx.Node) -> Ref:
        tensor = self.program.constants[name]
        if isinstance(tensor, torch._subclasses.FakeTensor):
            raise Untraceable(f"constant {name} has no value: an operation that cannot be traced made it")
        own = self.originals.get(_place_in_memory(tensor))
        if own is not None:  # reached without the module, by a loss that regularises for example
            return self._outside(own, "parameter" if own in self.parameters else "buffer", node.meta["val"])
        # Constants of equal content are one value, so that repeated blocks which make their own share one code.
        content = (tensor.dtype, tuple(tensor.shape), repr(tensor.tolist()) if tensor.numel() < 64 else name)
        name = self.interned.setdefault(("constant", content), f"constant.{name.removeprefix('model.')}")
        self.constants[name] = tensor.detach()
        return self._outside(name, "constant", node.meta["val"])

    def _outside(self, name: str, kind: Any, val: Tensor) -> Ref:
        if name not in self.refs_by_name:
            self.refs_by_name[name] = self._value(name, kind, val, kind == "parameter" and name in self.trainable)
        return self.refs_by_name[name]

    # -- values

    def _value(self, name: str, kind: Any, val: Any, differentiable: bool) -> Ref:
        if isinstance(val, Tensor):
            shape = tuple(self._size(s) for s in val.shape)
            example = tuple(self._at_example(s) for s in val.shape)
            stride = tuple(self._at_example(s) for s in val.stride())
            self.specs.append(Spec(example, stride, val.dtype, differentiable))
            type_ = Type(shape, val.dtype, nbytes(example, val.dtype), differentiable)
        else:
            self.specs.append(None)
            type_ = Type((), None, 0, False)
        self.values.append(Value(name, kind, self._intern(type_)))
        return Ref(len(self.values) - 1)

    def _intern(self, item: Any) -> Any:
        return self.interned.setdefault(item, item)

    def _size(self, size: Any) -> int | Size | None:
        """A size as a number, or as an expression in the rows of the batch; None if it depends on the data."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        expression = size.node.expr
        if not expression.free_symbols:
            return int(expression)
        if not expression.free_symbols <= self.batch_symbols:
            return None
        return self._intern(Size(self._print(expression)))

    def _print(self, expression: sympy.Expr) -> str:
        return self.printer.doprint(
            expression.xreplace(dict.fromkeys(self.batch_symbols, sympy.Symbol("b", integer=True)))
        )

    def _at_example(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr  # where a size depends on data, the rows of the batch stand in for it
        return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(self.spec.rows))))

    def _is_hoisted(self, val: Any) -> bool:
        """Numbers that follow from the batch's rows alone are derived in every segment instead of carried."""
        symbolic = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))
        return symbolic and val.node.expr.free_symbols <= self.batch_symbols

    # -- nodes

    def _walk(
        self, module: torch.fx.GraphModule, environment: dict[torch.fx.Node, Any], context: tuple[Any, ...]
    ) -> Any:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                environment[node] = getattr(module, node.target)
                if isinstance(environment[node], Tensor):
                    raise Untraceable(f"the graph holds tensor {node.target} in itself")
            elif node.op == "call_function":
                environment[node] = self._call(node, environment, context)
            elif node.op == "output":
                return self._convert_argument(node.args[0], environment)
        raise AssertionError("a graph without an output")

    def _call(self, node: torch.fx.Node, environment: dict[torch.fx.Node, Any], context: tuple[Any, ...]) -> Any:
        target, val = node.target, node.meta.get("val")
        if self._is_hoisted(val):
            return self._size(val)
        if target is operator.getitem and isinstance(environment[node.args[0]], (tuple, list, dict)):  # type: ignore[index]
            return environment[node.args[0]][node.args[1]]  # type: ignore[index]
        args = self._convert_argument(node.args, environment)
        kwargs = {name: self._convert_argument(a, environment) for name, a in node.kwargs.items()}
        name = getattr(target, "__name__", str(target))
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(name, args, context)
        if name.startswith(_CHECKS):
            return None
        if isinstance(target, torch._ops.OpOverload):
            return self._operation(node, target, args, kwargs, context)
        if getattr(target, "__module__", "") in ("_operator", "math", "torch"):
            return self._scalar(node, target, args)
        raise Untraceable(f"operation {name} has no place in a graph of tensors")

    def _inline(self, name: str, args: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        """A region under no_grad or autocast: its nodes join the graph, each with the region as its context."""
        if name == "wrap_with_set_grad_enabled":
            enabled, module, *operands = args
            inner = (*context, ("grad" if enabled else "no_grad",))
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _cache, module, *operands = (
                args  # traced without its cache, run with it as in eager
            )
            inner = (*context, ("autocast", device, dtype, enabled))
            self.num_regions += 1
        else:
            raise CaptureError(
                f"the model uses torch's {name}, which a graph of operations cannot hold; use torch.where, or a Python `if` "
                "in a submodule of its own, which then runs as it is"
            )
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        return self._walk(module, dict(zip(placeholders, operands, strict=True)), self._intern(inner))

    def _scalar(self, node: torch.fx.Node, target: Any, args: tuple[Any, ...]) -> Ref:
        """Arithmetic on a number that depends on data."""
        ref = self._value(node.name, "node", node.meta.get("val"), False)
        module = {"_operator": "operator"}.get(target.__module__, target.__module__)
        operation, operands = self._abstract(f"{module}.{target.__name__}", args, {})
        self.nodes.append(Node(operation, operands, (ref,), self._module(node)))
        return ref

    def _abstract(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], **facts: Any
    ) -> tuple[Operation, tuple[int, ...]]:
        """Separates what is done from what it is done to; equal operations become one object."""
        operands = tuple(dict.fromkeys(refs((args, tuple(kwargs.values())))))
        position = {operand: Ref(i) for i, operand in enumerate(operands)}
        for name in ("writes", "aliases", "saved"):
            facts[name] = tuple(sorted(move_refs(facts.get(name, ()), position.__getitem__)))
        operation = Operation(
            target,
            move_refs(args, position.__getitem__),
            move_refs(tuple(kwargs.items()), position.__getitem__),
            **facts,
        )
        return self.interned.setdefault((repr(operation),), operation), operands

    def _operation(
        self,
        node: torch.fx.Node,
        target: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: tuple[Any, ...],
    ) -> Any:
        val: Any = node.meta.get("val")
        modes = [region[0] for region in context if region[0] in ("no_grad", "grad")]
        grad = not modes or modes[-1] == "grad"
        facts = self.probe.ask(target, self._to_specs(args), self._to_specs(kwargs), grad)
        operands = [ref for ref in refs((args, tuple(kwargs.values()))) if self.specs[ref] is not None]
        single = not isinstance(val, (tuple, list))
        getitems: Any = (user.args[1] for user in node.users if user.target is operator.getitem)
        picks = () if single else tuple(sorted(set(getitems)))
        items = [val] if single else [val[i] for i in picks]
        names = [node.name] if single else [f"{node.name}.{i}" for i in picks]
        differentiable = self._differentiable(facts, operands, items, picks, grad)
        results = tuple(self._value(n, "node", v, d) for n, v, d in zip(names, items, differentiable, strict=True))
        writes = _writes(target, args, kwargs)
        plain = [w for w in writes if self.values[w].kind == "node" and not self.values[w].type.differentiable]
        if grad and plain and any(self.values[o].type.differentiable for o in operands):
            self._mark_differentiable(plain)
        positions = {0: 0} if single else {pick: at for at, pick in enumerate(picks)}
        if facts.known:
            aliases = {(positions[i], operands[j]) for i, j in facts.aliases if i in positions}
        else:
            aliases = {(i, operand) for i in range(len(results)) for operand in operands}  # to be safe
        aliases |= {(i, operand) for i in range(len(results)) for operand in _views(target, args, kwargs)}
        operation, distinct = self._abstract(
            str(target),
            args,
            kwargs,
            picks=None if single else picks,
            context=context,
            writes=writes,
            aliases=tuple(aliases),
            flops=facts.flops,
            nbytes=sum(self.values[r].nbytes for r in results),
            saved=tuple({operands[i] for i in facts.saved}),
            saved_results=tuple(positions[i] for i in facts.saved_results if i in positions),
            hidden=facts.hidden,
            forward_peak=facts.forward_peak,
            building_peak=facts.building_peak,
            backward_peak=facts.backward_peak,
        )
        random = _is_random(target, args, kwargs)
        ordinal = self.num_random if random else None
        region = self.num_regions if any(region[0] == "autocast" for region in context) else 0
        self.nodes.append(Node(operation, distinct, results, self._module(node), ordinal, region))
        self.num_random += random
        return results[0] if single else dict(zip(picks, results, strict=True))

    def _differentiable(
        self, facts: Facts, operands: list[Ref], items: list[Any], picks: tuple[int, ...], grad: bool
    ) -> list[bool]:
        if facts.differentiable:
            known = facts.differentiable
            return [known[i] if i < len(known) else False for i in (picks or range(len(items)))]
        inherits = grad and any(self.values[o].type.differentiable for o in operands)
        return [inherits and isinstance(v, Tensor) and v.is_floating_point() for v in items]

    def _mark_differentiable(self, written: Iterable[int]) -> None:
        """A write makes its operand, and what shares its storage, depend on what was written."""
        roots = find_roots(self.nodes, len(self.values))
        changed = {roots[w] for w in written}
        for i, value in enumerate(self.values):
            if roots[i] in changed and value.kind == "node" and not value.type.differentiable:
                self.values[i] = value._replace(type=replace(value.type, differentiable=True))
                spec = self.specs[i]
                self.specs[i] = spec and replace(spec, differentiable=True)

    def _convert_argument(self, argument: Any, environment: dict[torch.fx.Node, Any]) -> Any:
        if isinstance(argument, torch.fx.Node):
            return environment[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(self._convert_argument(a, environment) for a in argument)
        if isinstance(argument, slice):
            raise Untraceable("a slice among an operation's arguments")
        return argument

    def _to_specs(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.specs[argument] if self.specs[argument] is not None else self.spec.rows
        if isinstance(argument, Size):
            return argument.at(self.spec.rows)
        if isinstance(argument, tuple):
            return [self._to_specs(a) for a in argument] if argument else []
        if isinstance(argument, dict):
            return {name: self._to_specs(a) for name, a in argument.items()}
        return argument

    def _module(self, node: torch.fx.Node) -> str:
        stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
        path = re.sub(r"@\d+", "", stack[-1][0])
        return self._intern(path.removeprefix("model").removeprefix(".") if path.startswith("model") else "")


def _place_in_memory(tensor: Tensor) -> Any:
    """Tells a tensor by where its data lies; one without data by itself."""
    at = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
    return at, tuple(tensor.shape), tuple(tensor.stride())


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, (tuple, list)):
        return [leaf for item in outputs for leaf in _flat(item)]
    return [outputs]


def _bound(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The operator's declared arguments beside the given ones."""
    declared = target._schema.arguments
    given = list(zip(declared, args, strict=False))
    return given + [(a, kwargs[a.name]) for a in declared[len(args) :] if a.name in kwargs]


def _writes(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    bound = _bound(target, args, kwargs)
    written = [ref for declared, a in bound if declared.alias_info and declared.alias_info.is_write for ref in refs(a)]
    given = {declared.name: a for declared, a in bound}
    # Running statistics are written without a mark in the schema.
    keeps_statistics = target.overloadpacket in (torch.ops.aten.batch_norm, torch.ops.aten.instance_norm)
    if keeps_statistics and given.get("training", given.get("use_input_stats")):
        written += [*refs(given["running_mean"]), *refs(given["running_var"])]
    return tuple(written)


def _views(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Ref]:
    """Operands the result may share storage with, whatever the sizes (reshape and to only sometimes do)."""
    if not any(r.alias_info for r in target._schema.returns):
        return []
    return [ref for declared, a in _bound(target, args, kwargs) if declared.alias_info for ref in refs(a)]


def _is_random(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {declared.name: a for declared, a in _bound(target, args, kwargs)}
    rate = given.get("dropout_p", given.get("dropout", given.get("p") if "train" in given else 1.0))
    if target.overloadpacket is torch.ops.aten.scaled_dot_product_attention:
        rate = given.get("dropout_p", 0.0)
    return bool(given.get("train", given.get("training", True))) and rate != 0.0


def _copy_written_inputs(converter: _Converter) -> None:
    """A model that writes into its batch writes into a copy: the batch is the caller's, and a segment may run twice."""
    values, nodes = converter.values, converter.nodes
    roots = find_roots(nodes, len(values))
    written = sorted({roots[w] for node in nodes for w in node.writes if values[roots[w]].kind == "input"})
    copies = {i: len(values) + at for at, i in enumerate(written)}
    values += [values[i]._replace(name=f"{values[i].name}.copy", kind="node") for i in written]
    clones = [
        Node(Operation("aten.clone.default", (Ref(0),), nbytes=values[i].nbytes), (i,), (copy,), "")
        for i, copy in copies.items()
    ]
    if copies:
        converter.nodes = clones + [_renumber(node, lambda i: copies.get(i, i)) for node in nodes]
        converter.outputs = move_refs(converter.outputs, lambda ref: Ref(copies.get(ref, ref)))


def _find_norm_of_one_value(values: Sequence[Value], nodes: Sequence[Node]) -> str:
    """A batch norm in training that one row leaves with one value a channel: plain PyTorch refuses, its kernel does not."""
    for node in nodes:
        if node.operation.name == "batch_norm" and node.operation.args[TRAINING] is True:
            shape = values[node.operands[0]].type.shape
            if all(size == 1 for size in shape[2:]):
                return f"{node} would have one value a channel"
    return ""


def _refuse_written_constants(converter: _Converter) -> None:
    roots = find_roots(converter.nodes, len(converter.values))
    for node in converter.nodes:
        for written in node.writes:
            if converter.values[roots[written]].kind == "constant":
                raise CaptureError(
                    f"{node} writes into a tensor that is neither parameter nor buffer, so its state would be lost; register "
                    "it with register_buffer"
                )


def _write_over_logits(converter: _Converter) -> None:
    """Cross entropies whose logits nobody else reads, forward or backward, write over them."""
    values, nodes = converter.values, converter.nodes
    roots = find_roots(nodes, len(values))
    readers = _find_readers(nodes, roots)
    for root in {roots[ref] for ref in refs(converter.outputs)}:
        readers[root].add(len(nodes))
    for i, node in enumerate(nodes):
        if node.operation.target != CROSS_ENTROPY or node.operation.context or node.operation.kwargs:
            continue
        args = converter._to_specs(move_refs(node.operation.args, lambda ref: Ref(node.operands[ref])))  # noqa: B023
        root = roots[node.operands[0]]
        if values[root].kind != "node" or readers[root] != {i} or not may_write_over(*args):
            continue
        facts = converter.probe.ask(OVER_LOGITS, args, {}, grad=True)
        over = replace(
            node.operation,
            target=OVER_LOGITS,
            writes=(0,),
            saved=facts.saved,
            hidden=facts.hidden,
            forward_peak=facts.forward_peak,
            building_peak=facts.building_peak,
            backward_peak=facts.backward_peak,
        )
        nodes[i] = node._replace(operation=over)


def _find_readers(nodes: list[Node], roots: list[int]) -> defaultdict[int, set[int]]:
    """For each storage the nodes that read it, now or backward; to make a view of it is not to read it."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for i, node in enumerate(nodes):
        saved = {node.operands[o] for o in node.operation.saved} | {
            node.results[r] for r in node.operation.saved_results
        }
        shared = {roots[result] for result in node.results}
        for root in {roots[v] for v in saved} | ({roots[o] for o in node.operands} - shared):
            readers[root].add(i)
    return readers


def compact(
    values: list[Value], nodes: list[Node], outputs: tuple[Any, ...]
) -> tuple[ValueTable, NodeTable, tuple[Any, ...]]:
    """Leaves out what reaches no output and has no effect (writes and random draws stay), and packs the rest."""
    needed: set[int] = set(refs(outputs))
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.operation.writes or node.ordinal is not None or needed.intersection(node.results):
            needed.update(node.operands)
            kept.append(node)
    kept.reverse()
    makers = {result: node for node in kept for result in node.results}
    outside = [i for i, value in enumerate(values) if value.kind != "node" and (i in needed or value.kind == "input")]
    moved = {old: Ref(new) for new, old in enumerate([*outside, *makers])}
    made = [values[i]._replace(name=node.operation.name.partition(".")[0]) for i, node in makers.items()]
    renumbered = (_renumber(node, lambda i: moved[i]) for node in kept)
    return ValueTable([values[i] for i in outside], made), NodeTable(renumbered), move_refs(outputs, moved.__getitem__)


def _renumber(node: Node, move: Callable[[int], int]) -> Node:
    return node._replace(operands=tuple(map(move, node.operands)), results=tuple(map(move, node.results)))

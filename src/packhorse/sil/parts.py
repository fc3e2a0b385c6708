"""Parts: a model cut so that each piece can train by itself, as a module with the model's own names.

In: a model and where it is cut. Out: `Division`, which knows what crosses each cut; `Part`, an `nn.Module` that runs one piece,
in training and in evaluation. A part is an ordinary module, so `ph.Trainer` trains it like any other, by relay too.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.errors import BatchError, PartitionError
from packhorse.graph import Graph
from packhorse.partition import Partition, Place, Segment, find_live

LABEL = "y"  # beside the keys of x, where x is a dict

Loss = Callable[[Any, Tensor], Tensor]


def join(x: Any, y: Tensor) -> Any:
    """A batch as the model and its loss take it."""
    if isinstance(x, Mapping):
        if LABEL in x:
            raise BatchError(
                f"x has a value {LABEL!r}, which is what classes are called beside it; call it something else"
            )
        return {**x, LABEL: y}
    return (*x, y) if isinstance(x, (tuple, list)) else (x, y)


def strip(x: Any) -> Any:
    """The same without labels, for prediction."""
    if isinstance(x, Mapping):
        return dict(x)
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def find_logits(output: Any) -> Tensor:
    """Of what classifiers return: the tensor itself, `.logits`, `["logits"]`, or the first of several."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]  # type: ignore[no-any-return]  # or it is found out when it is used
    found: Any = getattr(output, "logits", output)
    return found[0] if isinstance(found, (tuple, list)) else found


def mean_cross_entropy(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(find_logits(output), y)


class ByLabel:
    """A loss of (output, classes) as one of (output, batch)."""

    def __init__(self, loss: Loss):
        self.loss = loss

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self.loss(output, batch[LABEL] if isinstance(batch, Mapping) else batch[-1])


@dataclass(frozen=True)
class Crossing:
    """The value that goes over a cut and gets labels. What the batch alone decides, such as a mask, each part makes itself."""

    learned: str  # its name in training
    predicted: str  # and in prediction
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype
    is_map: bool  # channels first, then positions


class Needs(NamedTuple):
    """Bytes that training takes: of tensors, and with what malloc cannot use again of those that are freed."""

    tensors: int
    planned: int


@dataclass(frozen=True)
class Division:
    """A model in parts. Both graphs, of training and of prediction, are cut at the same places."""

    model: nn.Module
    train: Partition
    predict: Partition
    needs: tuple["Needs", ...]  # of each part
    needs_whole: "Needs"  # of the model in one piece

    @property
    def num_parts(self) -> int:
        return len(self.train.segments)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        pairs = zip(self.train.cuts, self.predict.cuts, strict=True)
        return tuple(_describe_crossing(self.train.graph, a, self.predict.graph, b) for a, b in pairs)

    @cached_property
    def predicted_names(self) -> dict[str, str]:
        """Names in prediction of what has another in training; the batch's own tensors have the same."""
        return {crossing.learned: crossing.predicted for crossing in self.crossings}

    @cached_property
    def label(self) -> str:
        """The column of classes: what training has and prediction has not."""
        (label,) = {leaf.path for leaf in self.train.graph.batch.leaves} - {
            leaf.path for leaf in self.predict.graph.batch.leaves
        }
        return f"batch:{label}"

    def columns_of(self, index: int) -> tuple[str, ...]:
        """What a part reads, by the names of training: the value at the cut before it, and the batch's own tensors."""
        found: dict[str, None] = {self.crossings[index - 1].learned: None} if index else {}
        for mode in (self.train, self.predict):
            pieces = [*_find_prelude(mode, index), mode.segments[index]]
            found.update({name: None for piece in pieces for name in piece.inputs if name.startswith("batch:")})
        return tuple(name for name in found if name != self.label)

    def columns_after(self, index: int) -> tuple[str, ...]:
        """What later parts need that is there when a part is done, classes included."""
        batch = [n for i in range(index + 1, self.num_parts) for n in self.columns_of(i) if n.startswith("batch:")]
        return tuple(dict.fromkeys((self.crossings[index].learned, *batch, self.label)))

    @property
    def num_scores(self) -> int:
        """How many classes the model tells apart."""
        graph = self.predict.graph
        types: Any = {value.name: value.type for value in graph.values}
        found: Any = find_logits(self.predict.finish(types, graph.batch.rows))
        shape = getattr(found, "shape", None)
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            described = type(found).__name__ if shape is None else f"a tensor {['rows', *shape[1:]] if shape else []}"
            raise PartitionError(
                f"the model returns {described}, expected scores [rows, classes], alone, as .logits, or as the first of several"
            )
        return shape[1]

    def read_batch(self, x: Any, y: Tensor) -> dict[str, Tensor]:
        """The batch's tensors by name. Whether a single row will do is for the part to say that trains on it."""
        self.predict.graph.check_rows(len(y))
        return self.train.graph.read(join(x, y))


class _Holder(nn.Module):
    """Stands for a module of the original, by its name: it holds what that holds and runs what ran in it."""

    def forward(self, piece: Segment, parameters: Any, buffers: Any, values: Any, rows: int) -> dict[str, Tensor]:
        return piece(parameters, buffers, values, rows=rows)


@dataclass(frozen=True)
class Role:
    """What a part is among the others."""

    division: Division
    index: int

    @property
    def is_last(self) -> bool:
        return self.index == self.division.num_parts - 1

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """What it reads, by the names of training."""
        return self.division.columns_of(self.index)

    @cached_property
    def pieces(self) -> dict[bool, list[Segment]]:
        """What it runs in training, and else."""
        return {
            training: [*_find_prelude(partition, self.index), *_cut_by_module(partition.segments[self.index])]
            for training, partition in ((True, self.division.train), (False, self.division.predict))
        }

    @cached_property
    def casts(self) -> dict[str, torch.dtype]:
        """Parameters that run in another precision than they are kept in."""
        stored = self.division.train.graph.parameters
        names = self.division.train.segments[self.index].parameters
        return {name: stored[name].working for name in names if stored[name].working != stored[name].dtype}

    def bind(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns by name -> keyword arguments of the part, classes included if they are among them."""
        arguments = {f"x{i}": columns[name] for i, name in enumerate(self.columns)}
        return arguments | ({LABEL: columns[self.division.label]} if self.division.label in columns else {})


class Part(nn.Module):
    """One part. Takes its columns by keyword, `x0`, `x1`, ... in the order of `columns`, and the classes as `y`.

    It has the parameters and buffers of the model, the very objects, under their names, so it has no names of its own beside
    `packhorse_role`. It returns the value at its cut; the last part, in training, the loss, and else the model's output.
    """

    def __init__(self, division: Division, index: int):
        super().__init__()
        self.packhorse_role = Role(division, index)
        graph, segment = division.train.graph, division.train.segments[index]
        originals = {**dict(division.model.named_parameters()), **dict(division.model.named_buffers())}
        for name in (*segment.parameters, *segment.buffers):
            holder, leaf = _find_holder(self, name.rpartition(".")[0]), name.rpartition(".")[2]
            if name in graph.parameters:
                holder.register_parameter(leaf, originals[name])  # type: ignore[arg-type]  # it is one
            else:
                holder.register_buffer(leaf, originals[name], persistent=graph.buffers[name].persistent)
        for pieces in self.packhorse_role.pieces.values():
            for piece in pieces:
                _find_holder(self, piece.nodes[0].module)

    def forward(self, **arguments: Tensor) -> Any:
        role = self.packhorse_role
        division = role.division
        names = {} if self.training else division.predicted_names
        values = {names.get(name, name): arguments[f"x{i}"] for i, name in enumerate(role.columns)}
        if LABEL in arguments:
            values[division.label] = arguments[LABEL]
        rows = next(iter(arguments.values())).shape[0]
        partition = division.train if self.training else division.predict
        _run_pieces(self, role.pieces[self.training], values, set(partition.segments[role.index].outputs), rows)
        if role.is_last:
            return partition.finish(values, rows)
        crossing = division.crossings[role.index]
        return values[crossing.learned if self.training else crossing.predicted]


def _find_holder(part: Part, path: str) -> nn.Module:
    """The holder of that name, made if it is not there."""
    module: nn.Module = part
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, _Holder())
        module = module._modules[name]  # type: ignore[assignment]  # it is there
    return module


def give_values(part: Part, values: Iterable[tuple[str, Tensor]]) -> None:
    """The part has these by name from now on, the very tensors, instead of the model's."""
    for name, value in values:
        holder, leaf = _find_holder(part, name.rpartition(".")[0]), name.rpartition(".")[2]
        if leaf in holder._parameters:
            holder._parameters[leaf] = nn.Parameter(value, holder.get_parameter(leaf).requires_grad)
        else:
            holder._buffers[leaf] = value


def _run_pieces(part: Part, pieces: Sequence[Segment], values: dict[str, Tensor], wanted: set[str], rows: int) -> None:
    """Piece by piece, each in the module it belongs to; what is not read any more is dropped."""
    casts = part.packhorse_role.casts
    parameters = {name: p.to(casts[name]) if name in casts else p for name, p in part.named_parameters()}
    buffers = dict(part.named_buffers())
    last_uses = {name: i for i, piece in enumerate(pieces) for name in piece.inputs}
    for i, piece in enumerate(pieces):
        path = piece.nodes[0].module
        holder = part.get_submodule(path) if path else _Holder()
        values.update(holder(piece, parameters, buffers, {n: values[n] for n in piece.inputs}, rows))
        for name in [n for n, last in last_uses.items() if last == i and n not in wanted]:
            del values[name]


def _find_prelude(partition: Partition, index: int) -> list[Segment]:
    """What a part needs of what earlier ones make of the batch alone, to be made again: one piece an operation."""
    graph, segment = partition.graph, partition.segments[index]
    wanted = [i for node in segment.nodes for i in node.operands if 0 <= graph.producers[i] < segment.start]
    found: set[int] = set()
    while wanted:
        value = wanted.pop()
        producer = graph.producers[value]
        if producer >= 0 and producer not in found and value not in graph.dependents:
            found.add(producer)
            wanted += graph.nodes[producer].operands
    return [Segment(graph, i, producer, producer + 1) for i, producer in enumerate(sorted(found))]


def _cut_by_module(segment: Segment) -> list[Segment]:
    """Pieces in each of which one module runs."""
    runs = itertools.groupby(range(segment.start, segment.stop), key=lambda i: segment.graph.nodes[i].module)
    places = [list(run) for _, run in runs]
    return [Segment(segment.graph, i, run[0], run[-1] + 1) for i, run in enumerate(places)]


def find_learned(graph: Graph, place: Place) -> list[int]:
    """The values that cross a place and that parameters have a part in."""
    return [i for i in find_live(graph, place.index) if i in graph.dependents]


def _describe_crossing(train: Graph, cut: Place, predict: Graph, alike: Place) -> Crossing:
    (learned,), (predicted,) = find_learned(train, cut), find_learned(predict, alike)
    value = train.values[learned]
    shape: Any = tuple(value.type.shape[1:])  # only rows vary
    assert value.type.dtype is not None  # labels are for tensors
    is_map = len(shape) >= 3 or (len(shape) == 2 and _has_channels_first(train, learned))
    return Crossing(value.name, predict.values[predicted].name, shape, value.type.dtype, is_map)


# What tells a map [channels, length] from a sequence [tokens, width].
OF_MAPS = ("conv1d", "convolution", "conv_transpose1d", "batch_norm", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d")
OF_SEQUENCES = (
    "linear",
    "addmm",
    "matmul",
    "layer_norm",
    "rms_norm",
    "embedding",
    "lstm",
    "gru",
    "transpose",
    "permute",
)


def _has_channels_first(graph: Graph, value: int) -> bool:
    """By the last operation before it that knows: what is behind it, such as activations and sums, leaves the layout."""
    while graph.producers[value] >= 0:
        node = graph.nodes[graph.producers[value]]
        name = node.operation.name.partition(".")[0]
        if name in OF_MAPS or name in OF_SEQUENCES:
            return name in OF_MAPS
        learned = [operand for operand in node.operands if operand in graph.dependents]
        if not learned:
            break
        value = learned[0]
    return False

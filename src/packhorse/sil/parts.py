"""Parts: a model cut so that each piece can train by itself, as a module with the model's own names.

In: a model and a batch `(x, y)`. Out: `Division`: where it is cut and what crosses each cut; `Part`, an `nn.Module` that runs
one piece, in training and in evaluation. A part is an ordinary module, so `ph.Trainer` trains it like any other, by relay too.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.errors import PartitionError
from packhorse.graph import Graph, Size, capture
from packhorse.graph.graph import Value
from packhorse.memory import LARGEST
from packhorse.optimizer import Stepper
from packhorse.partition import (
    Partition,
    Place,
    Segment,
    find_first_uses,
    find_footprint,
    find_live,
    find_places,
    partition,
)
from packhorse.precision import Precision

LABEL = "y"  # beside the keys of x, where x is a dict
MOST_CANDIDATES = 48  # places, for which all ways to cut are tried

Loss = Callable[[Any, Tensor], Tensor]

# Element by element, and no parameter: a cut may lie on either side of them.
ACTIVATIONS = (
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "elu",
    "leaky_relu",
    "softplus",
    "mish",
    "hardswish",
    "hardtanh",
    "selu",
)


def join(x: Any, y: Tensor) -> Any:
    """A batch as the model and its loss take it."""
    if isinstance(x, Mapping):
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


@dataclass(frozen=True)
class Division:
    """A model in parts. Both graphs, of training and of prediction, are cut at the same places."""

    model: nn.Module
    train: Partition
    predict: Partition
    planned: tuple[int, ...]  # bytes that training takes, of each part
    planned_whole: int  # and of the model in one piece

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
        """The batch's tensors by name."""
        return self.train.graph.inputs(join(x, y))


class _Holder(nn.Module):
    """Stands for a module of the original, by its name: it holds what that holds and runs what ran in it."""

    def forward(self, piece: Segment, parameters: Any, buffers: Any, values: Any, rows: int) -> dict[str, Tensor]:
        return piece(parameters, buffers, values, rows=rows)


class Part(nn.Module):
    """One part. Takes its columns by keyword, `x0`, `x1`, ... in the order of `columns`, and the classes as `y`.

    It has the parameters and buffers of the model, the very objects. It returns the value at its cut; the last part, in
    training, the loss, and in evaluation the model's output.
    """

    def __init__(self, division: Division, index: int):
        super().__init__()
        self.division, self.index = division, index
        self.is_last = index == division.num_parts - 1
        graph, self.segment = division.train.graph, division.train.segments[index]
        self.columns = division.columns_of(index)
        originals = {**dict(division.model.named_parameters()), **dict(division.model.named_buffers())}
        for name in (*self.segment.parameters, *self.segment.buffers):
            holder, leaf = self._hold(name.rpartition(".")[0]), name.rpartition(".")[2]
            if name in graph.parameters:
                holder.register_parameter(leaf, originals[name])  # type: ignore[arg-type]  # it is one
            else:
                holder.register_buffer(leaf, originals[name], persistent=graph.buffers[name].persistent)
        self._pieces = {
            training: [*_find_prelude(partition, index), *_cut_by_module(partition.segments[index])]
            for training, partition in ((True, division.train), (False, division.predict))
        }
        for piece in (*self._pieces[True], *self._pieces[False]):
            self._hold(piece.nodes[0].module)

    def _hold(self, path: str) -> nn.Module:
        """The holder of that name, made if it is not there."""
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, _Holder())
            module = module._modules[name]  # type: ignore[assignment]  # it is there
        return module

    def hold(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Has these values by name from now on, the very tensors, instead of the model's."""
        for name, value in values:
            holder, leaf = self._hold(name.rpartition(".")[0]), name.rpartition(".")[2]
            if leaf in holder._parameters:
                holder._parameters[leaf] = nn.Parameter(value, holder.get_parameter(leaf).requires_grad)
            else:
                holder._buffers[leaf] = value

    def bind(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns by name -> its keyword arguments, classes included if they are among them."""
        arguments = {f"x{i}": columns[name] for i, name in enumerate(self.columns)}
        return arguments | ({LABEL: columns[self.division.label]} if self.division.label in columns else {})

    def forward(self, **arguments: Tensor) -> Any:
        division, pieces = self.division, self._pieces[self.training]
        names = {} if self.training else division.predicted_names
        values = {names.get(name, name): arguments[f"x{i}"] for i, name in enumerate(self.columns)}
        if LABEL in arguments:
            values[division.label] = arguments[LABEL]
        rows = next(iter(arguments.values())).shape[0]
        partition = division.train if self.training else division.predict
        self._run(pieces, values, set(partition.segments[self.index].outputs), rows)
        if self.is_last:
            return partition.finish(values, rows)
        crossing = division.crossings[self.index]
        return values[crossing.learned if self.training else crossing.predicted]

    def _run(self, pieces: Sequence[Segment], values: dict[str, Tensor], wanted: set[str], rows: int) -> None:
        """Piece by piece, each in the module it belongs to; what is not read any more is dropped."""
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        last_uses = {name: i for i, piece in enumerate(pieces) for name in piece.inputs}
        for i, piece in enumerate(pieces):
            path = piece.nodes[0].module
            holder = self.get_submodule(path) if path else _Holder()
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


# -- where to cut


def divide(
    model: nn.Module,
    stepper: Stepper,
    x: Any,
    y: Tensor,
    loss: Loss,
    *,
    parts: int | None,
    cuts: Sequence[str],
    activated: bool,
    precision: Precision = "fp32",
) -> Division:
    """Captures the model and cuts it: after the modules named, or into `parts` that take as equal memory as can be."""
    graph = capture(model, join(x, y), ByLabel(loss), precision=precision)
    predicting = capture(model, strip(x), mode="predict", precision=precision)
    places = {p.index: p for p in find_places(graph)}
    if cuts:
        pinned = partition(graph, cuts=cuts).cuts
        chosen = [_to_the_side(graph, places, cut, activated) for cut in pinned]
        for name, place in zip(cuts, chosen, strict=False):
            reason = _why_not(graph, place)
            if reason:
                raise PartitionError(f"no part can end after {name!r}: {reason}")
    else:
        assert parts is not None
        chosen = _balance(graph, places, stepper, parts, activated)
    train = Partition(graph, tuple(chosen))
    _refuse_ties(train)
    for segment in train.segments:
        if not any(graph.parameters[name].trainable for name in segment.parameters):
            raise PartitionError(
                f"part {segment.index} ({', '.join(segment.modules) or 'outside modules'}) has nothing to train; cut elsewhere"
            )
    planned = tuple(_training_bytes(graph, stepper, s.start, s.stop) for s in train.segments)
    whole = _conventional_bytes(graph, stepper)
    return Division(model, train, _cut_alike(predicting, train), planned, whole)


def _find_learned(graph: Graph, place: Place) -> list[int]:
    """The values that cross a place and that parameters have a part in."""
    return [i for i in find_live(graph, place.index) if i in graph.dependents]


def _is_float(value: Value) -> bool:
    return value.type.dtype is not None and value.type.dtype.is_floating_point


def _why_not(graph: Graph, place: Place) -> str:
    """Why no part may end here; empty if one may."""
    if place.forbidden:
        return place.forbidden.reason
    learned = [graph.values[i] for i in _find_learned(graph, place)]
    if len(learned) > 1:
        names = ", ".join(str(graph.nodes[graph.producers[i]]) for i in _find_learned(graph, place))
        return (
            f"{len(learned)} values that training changes cross there ({names}), and labels are for one; cut where no skip "
            "connection is open"
        )
    if not learned or not (_is_float(learned[0]) and learned[0].type.differentiable):
        live = [graph.values[i] for i in find_live(graph, place.index)]
        kinds = ", ".join(str(v.type.dtype).removeprefix("torch.") for v in live) or "nothing"
        return f"labels need a floating-point value that training can change, but what crosses there is {kinds}"
    shape = learned[0].type.shape
    if not (shape and isinstance(shape[0], Size)) or any(not isinstance(size, int) for size in shape[1:]):
        return f"the value that crosses there, of shape {list(shape)}, does not follow the rows of the batch"
    return ""


def _to_the_side(graph: Graph, places: Mapping[int, Place], place: Place, activated: bool) -> Place:
    """The cut moved over an activation, to the side that labels are for."""
    if activated and place.index + 1 in places and _is_activation(graph, place.index):
        return places[place.index + 1]
    if not activated and place.index - 1 in places and _is_activation(graph, place.index - 1):
        return places[place.index - 1]
    return place


def _is_activation(graph: Graph, index: int) -> bool:
    return graph.nodes[index].operation.name.removesuffix("_") in ACTIVATIONS


def _balance(graph: Graph, places: Mapping[int, Place], stepper: Stepper, parts: int, activated: bool) -> list[Place]:
    """Cuts that make the largest part as small as can be: of those that separate the same parameters, the lightest."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise PartitionError(f"parts is {parts!r}, expected a number of at least 1")
    candidates = _candidates(graph, places, activated)
    if len(candidates) > MOST_CANDIDATES:  # many layers: their repeated blocks will do
        blocks = {_to_the_side(graph, places, cut, activated).index for cut in partition(graph).cuts}
        candidates = [place for place in candidates if place.index in blocks] or candidates
    if parts > len(candidates) + 1:
        raise PartitionError(
            f"{graph.name} can be cut into at most {len(candidates) + 1} parts that train apart, but {parts} are asked: a cut "
            "must be crossed by one floating-point value that training changes, and each part needs parameters of its own"
        )
    ends = [0, *(place.index for place in candidates), len(graph.nodes)]
    price = {
        (i, j): _training_bytes(graph, stepper, ends[i], ends[j])
        for i in range(len(ends))
        for j in range(i + 1, len(ends))
    }
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}  # (end, parts) -> largest, cuts
    for count in range(1, parts + 1):
        for j in range(1, len(ends)):
            tried = [
                (max(best[i, count - 1][0], price[i, j]), (*best[i, count - 1][1], j))
                for i in range(j)
                if (i, count - 1) in best
            ]
            if tried:
                best[j, count] = min(tried)
    _, chosen = best[len(ends) - 1, parts]
    return [candidates[j - 1] for j in chosen[:-1]]


def _candidates(graph: Graph, places: Mapping[int, Place], activated: bool) -> list[Place]:
    """Places where a part may end, one for each way to separate the parameters."""
    firsts = find_first_uses(graph)
    starts = sorted({first for name, first in firsts.items() if graph.parameters[name].trainable})
    found = []
    for first, following in itertools.pairwise(starts):
        between = [places[i] for i in range(first + 1, following + 1) if i in places and not _why_not(graph, places[i])]
        settled = {_to_the_side(graph, places, place, activated).index for place in between}
        between = [place for place in between if place.index in settled]
        if between:
            found.append(min(between, key=lambda place: (place.nbytes, place.index)))
    return found


def _training_bytes(graph: Graph, stepper: Stepper, start: int, stop: int) -> int:
    """What training nodes `start` to `stop` by themselves takes: masters, gradients, optimizer states, and a graph.

    Of gradients so large that malloc gives them back, one is there at a time: it is used while backward goes on.
    """
    segment = Segment(graph, 0, start, stop)
    sizes = [graph.parameters[name].nbytes for name in segment.parameters if graph.parameters[name].trainable]
    large = [nbytes for nbytes in sizes if nbytes >= LARGEST]
    backward = find_footprint(segment, graph.batch.rows).backward - (sum(large) - max(large, default=0))
    return _state_bytes(segment, stepper) + backward + segment.input_nbytes


def _conventional_bytes(graph: Graph, stepper: Stepper) -> int:
    """The same of all of the model by an ordinary loop, which steps every parameter whole, with what that allocates.

    What backward and the steps of smaller parameters had stays with malloc while large ones, which it does not keep, are
    stepped.
    """
    whole = Segment(graph, 0, 0, len(graph.nodes))
    sizes = {name: graph.parameters[name].nbytes for name in whole.parameters if name in stepper.groups}
    trained = {name: nbytes for name, nbytes in sizes.items() if graph.parameters[name].trainable}

    def step(names: Collection[str]) -> int:
        """Gradients of these, and what the largest takes when it is stepped."""
        if not names:
            return 0
        largest = max(names, key=lambda name: trained[name])
        taken = stepper.temporaries(largest, len(graph.parameters[largest].shape)) * trained[largest]
        return sum(trained[name] for name in names) + int(taken)

    large = [name for name in trained if trained[name] >= LARGEST]
    backward = find_footprint(whole, graph.batch.rows).backward
    kept = max(backward - sum(trained[name] for name in large), step(trained.keys() - set(large)))
    return _state_bytes(whole, stepper) + max(backward, kept + step(large)) + whole.input_nbytes


def _state_bytes(segment: Segment, stepper: Stepper) -> int:
    """Masters and optimizer states."""
    graph, total = segment.graph, 0
    for name in segment.parameters:
        parameter = graph.parameters[name]
        copies = 1
        if name in stepper.groups and parameter.trainable:
            copies += sum(kind.large for kind in stepper.state_kinds(name, parameter.shape, parameter.dtype))
        total += copies * parameter.nbytes
    return total


def _refuse_ties(train: Partition) -> None:
    owners: dict[str, int] = {}
    for segment in train.segments:
        for name in segment.parameters:
            if owners.setdefault(name, segment.index) != segment.index and train.graph.parameters[name].trainable:
                raise PartitionError(
                    f"{name} is used in parts {owners[name]} and {segment.index}, which would train it apart; cut so that all "
                    "its uses are in one part, untie it, or train with ph.Trainer(strategy='relay')"
                )


def _cut_alike(graph: Graph, train: Partition) -> Partition:
    """The graph of prediction, cut where that of training is: between the same parameters, behind the same operation.

    Where evaluation leaves that operation out, as it does a dropout, the lightest place between them will do.
    """
    firsts = find_first_uses(graph)
    single = [p for p in find_places(graph) if p.legal and len(_find_learned(graph, p)) == 1]
    chosen = []
    for cut in train.cuts:
        (learned,) = _find_learned(train.graph, cut)
        maker = _describe_maker(train.graph, learned)
        before = {name for name, first in find_first_uses(train.graph).items() if first < cut.index}
        between = [p for p in single if all((first < p.index) == (name in before) for name, first in firsts.items())]
        alike = [p for p in between if _describe_maker(graph, _find_learned(graph, p)[0]) == maker]
        if not between:
            raise PartitionError(
                f"a part would end after {maker[0]} in {maker[1] or 'the model'}, but evaluation takes another way there; cut "
                "elsewhere"
            )
        chosen.append(alike[-1] if alike else min(between, key=lambda p: (p.nbytes, p.index)))
    return Partition(graph, tuple(chosen))


def _describe_maker(graph: Graph, value: int) -> tuple[str, str]:
    node = graph.nodes[graph.producers[value]]
    return node.operation.name, node.module


def _describe_crossing(train: Graph, cut: Place, predict: Graph, alike: Place) -> Crossing:
    (learned,), (predicted,) = _find_learned(train, cut), _find_learned(predict, alike)
    shape = tuple(train.values[learned].type.shape[1:])
    return Crossing(train.values[learned].name, predict.values[predicted].name, shape)  # type: ignore[arg-type]  # only rows vary

"""Parts: a model cut so that each piece can train by itself, as a module with the model's own names.

In: a model and a batch `(x, y)`. Out: `Division`: where it is cut and what crosses each cut; `Part`, an `nn.Module` that runs
one piece, in training and in evaluation. A part is an ordinary module, so `ph.Trainer` trains it like any other, by relay too.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.errors import PartitionError
from packhorse.graph import Graph, Size, capture
from packhorse.graph.graph import Value
from packhorse.optimizer import Stepper
from packhorse.partition import (
    Partition,
    Place,
    Segment,
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
    """Of what classifiers return: the tensor itself, `.logits`, or the first of several."""
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
    """What goes over a cut, by the names it has in training and in prediction: the value that gets labels, and the others."""

    learned: tuple[str, str]
    shape: tuple[int, ...]  # of one row of it
    others: tuple[tuple[str, str], ...]  # masks, for example: made of the batch alone, carried as they are


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
        return dict(pair for crossing in self.crossings for pair in (crossing.learned, *crossing.others))

    @cached_property
    def label(self) -> str:
        """The column of classes: what training has and prediction has not."""
        (label,) = {leaf.path for leaf in self.train.graph.batch.leaves} - {
            leaf.path for leaf in self.predict.graph.batch.leaves
        }
        return f"batch:{label}"

    def columns_after(self, index: int) -> tuple[str, ...]:
        """What later parts need that is there when a part is done, by the names of training."""
        needed = [n for s in self.train.segments[index + 1 :] for n in s.inputs]
        here = {n for s in self.train.segments[: index + 1] for n in s.outputs}
        return tuple(dict.fromkeys(n for n in needed if n in here or n.startswith("batch:")))

    def read_batch(self, x: Any, y: Tensor) -> dict[str, Tensor]:
        """The batch's tensors by name."""
        return self.train.graph.inputs(join(x, y))


class _Holder(nn.Module):
    """Stands for a module of the original, by its name: it holds what that holds and runs what ran in it."""

    def forward(self, piece: Segment, parameters: Any, buffers: Any, values: Any, rows: int) -> dict[str, Tensor]:
        return piece(parameters, buffers, values, rows=rows)


class Part(nn.Module):
    """One part. Takes its columns by keyword, `x0`, `x1`, ... in the order of `columns`, and the classes as `y`.

    It has the parameters and buffers of the model, the very objects. In training it returns the value at its cut, the last part
    the loss; in evaluation all that it makes for later parts, by name, the last part the model's output.
    """

    def __init__(self, division: Division, index: int):
        super().__init__()
        self.division, self.index = division, index
        self.is_last = index == division.num_parts - 1
        graph, self.segment = division.train.graph, division.train.segments[index]
        self.columns = tuple(n for n in self.segment.inputs if n != division.label)
        originals = {**dict(division.model.named_parameters()), **dict(division.model.named_buffers())}
        for name in (*self.segment.parameters, *self.segment.buffers):
            holder, leaf = self._hold(name.rpartition(".")[0]), name.rpartition(".")[2]
            if name in graph.parameters:
                holder.register_parameter(leaf, originals[name])  # type: ignore[arg-type]  # it is one
            else:
                holder.register_buffer(leaf, originals[name], persistent=graph.buffers[name].persistent)
        self._pieces = {
            training: _cut_by_module(partition.segments[index])
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

    def hold(self, values: Mapping[str, Tensor]) -> None:
        """Has values of its own from now on, instead of the model's."""
        for name, old in [*self.named_parameters(), *self.named_buffers()]:
            holder, leaf = self._hold(name.rpartition(".")[0]), name.rpartition(".")[2]
            if isinstance(old, nn.Parameter):
                holder._parameters[leaf] = nn.Parameter(values[name].detach().clone(), old.requires_grad)
            else:
                holder._buffers[leaf] = values[name].detach().clone()

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
        if self.training:
            return values[crossing.learned[0]]
        return {a: values[b] for a, b in (crossing.learned, *crossing.others) if a in self.segment.outputs}

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
    whole = _training_bytes(graph, stepper, 0, len(graph.nodes))
    return Division(model, train, _cut_alike(predicting, train), planned, whole)


def _find_learned(graph: Graph, place: Place, depends: Collection[int] | None = None) -> list[int]:
    """The values that cross and that training changes: with gradients they say so, else `depends` has them."""
    values = graph.values
    live = find_live(graph, place.index)
    return [i for i in live if (values[i].type.differentiable if depends is None else i in depends)]


def _find_dependents(graph: Graph) -> set[int]:
    """Floating-point values that parameters have a part in."""
    found: set[int] = set()
    for node in graph.nodes:
        if any(graph.values[o].kind == "parameter" or o in found for o in node.operands):
            found.update(r for r in node.results if _is_float(graph.values[r]))
    return found


def _is_float(value: Value) -> bool:
    return value.type.dtype is not None and value.type.dtype.is_floating_point


def _why_not(graph: Graph, place: Place) -> str:
    """Why no part may end here; empty if one may."""
    live = [graph.values[i] for i in find_live(graph, place.index)]
    learned = _find_learned(graph, place)
    if place.forbidden:
        return place.forbidden.reason
    if not learned:
        kinds = ", ".join(str(v.type.dtype).removeprefix("torch.") for v in live) or "nothing"
        return f"labels need a floating-point value that training can change, but what crosses there is {kinds}"
    if len(learned) > 1:
        names = ", ".join(str(graph.nodes[graph.producers[i]]) for i in learned)
        return (
            f"{len(learned)} values that training changes cross there ({names}), and labels are for one; cut where no skip "
            "connection is open"
        )
    without_rows = [v for v in live if not (v.type.shape and isinstance(v.type.shape[0], Size))]
    if without_rows:
        shape = list(without_rows[0].type.shape)
        return f"{without_rows[0].name}, of shape {shape}, crosses there and does not follow the rows of the batch"
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
    firsts = _find_first_uses(graph)
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
    """What training nodes `start` to `stop` by themselves takes: masters, gradients, optimizer states, and a graph."""
    segment = Segment(graph, 0, start, stop)
    total = find_footprint(segment, graph.batch.rows).backward + segment.input_nbytes
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
    depends = _find_dependents(graph)
    firsts = _find_first_uses(graph)
    single = [p for p in find_places(graph) if p.legal and len(_find_learned(graph, p, depends)) == 1]
    chosen = []
    for cut in train.cuts:
        (learned,) = _find_learned(train.graph, cut)
        maker = _describe_maker(train.graph, learned)
        before = {name for name, first in _find_first_uses(train.graph).items() if first < cut.index}
        between = [p for p in single if all((first < p.index) == (name in before) for name, first in firsts.items())]
        alike = [p for p in between if _describe_maker(graph, _find_learned(graph, p, depends)[0]) == maker]
        if not between:
            raise PartitionError(
                f"a part would end after {maker[0]} in {maker[1] or 'the model'}, but evaluation takes another way there; cut "
                "elsewhere"
            )
        chosen.append(alike[-1] if alike else min(between, key=lambda p: (p.nbytes, p.index)))
    return Partition(graph, tuple(chosen))


def _find_first_uses(graph: Graph) -> dict[str, int]:
    """Of every parameter that is used, the first node that reads it."""
    firsts: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for operand in node.operands:
            if graph.values[operand].kind == "parameter":
                firsts.setdefault(graph.values[operand].name, i)
    return firsts


def _describe_maker(graph: Graph, value: int) -> tuple[str, str]:
    node = graph.nodes[graph.producers[value]]
    return node.operation.name, node.module


def _describe_crossing(train: Graph, cut: Place, predict: Graph, alike: Place) -> Crossing:
    (learned,) = _find_learned(train, cut)
    (predicted,) = _find_learned(predict, alike, _find_dependents(predict))
    others = [i for i in find_live(train, cut.index) if i != learned]
    also = [i for i in find_live(predict, alike.index) if i != predicted]
    if len(others) != len(also):
        raise PartitionError(
            f"{len(others)} values beside the labelled one cross the cut after {train.nodes[cut.index - 1]} in training, but "
            f"{len(also)} in evaluation; cut elsewhere"
        )
    value = train.values[learned]
    pairs = zip([learned, *others], [predicted, *also], strict=True)
    names = [(train.values[a].name, predict.values[b].name) for a, b in pairs]
    return Crossing(names[0], tuple(value.type.shape[1:]), tuple(names[1:]))  # type: ignore[arg-type]  # only rows vary

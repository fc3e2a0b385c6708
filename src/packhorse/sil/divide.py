"""Where a model is cut into parts that train apart.

In: a model and a batch `(x, y)`, the modules after which to cut, or how many parts. Out: `Division`. Labels are for one value,
so a part may end only where a single one crosses that training changes; prediction must pass there too.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from packhorse.batch import BatchSpec
from packhorse.errors import BatchError, PartitionError
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
from packhorse.sil.choices import is_count
from packhorse.sil.parts import ByLabel, Division, Loss, Needs, find_learned, join, strip

MOST_CANDIDATES = 48  # places, for which all ways to cut are tried
COMPARED = 3  # values as large as a vector at a cut that labels take: codes, the distance to them, its gradient
# Of what malloc keeps when it is freed it needs as much again: an aligned piece does not fit where one of its size was. So
# much of gradients, and of all others but those that stay. Measured with parts of 6 to 650 MB.
GRADIENTS_AGAIN, OTHERS_AGAIN = 0.75, 0.5

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
    _refuse_without_rows(join(x, y))
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
        chosen = _balance(graph, places, stepper, parts, activated, _Alike(graph, predicting))
    train = Partition(graph, tuple(chosen))
    _refuse_ties(train)
    for segment in train.segments:
        if not any(graph.parameters[name].trainable for name in segment.parameters):
            raise PartitionError(
                f"part {segment.index} ({', '.join(segment.modules) or 'outside modules'}) has nothing to train; cut elsewhere"
            )
    ends = [*chosen, None]
    needs = tuple(_find_needs(graph, stepper, *part) for part in zip(train.segments, ends, strict=True))
    return Division(model, train, _cut_alike(predicting, train), needs, _find_conventional_needs(graph, stepper))


def _refuse_without_rows(batch: Any) -> None:
    spec = BatchSpec.of(batch)
    for leaf in spec.leaves:
        if not leaf.batched:
            raise BatchError(
                f"batch value {leaf.path} is {leaf.describe()} beside {spec.rows} rows; parts hand on row by row, "
                "so all must have rows: make it a buffer of the model, or repeat it for each row"
            )


def _find_needs(graph: Graph, stepper: Stepper, part: Segment, end: Place | None) -> Needs:
    """What training a part takes. Those of the labels where it ends are gone before the most is there, but malloc keeps them.

    Where more than a vector crosses, labels are for a mean of it, and only the gradient has its size.
    """
    tensors, compared = _training_bytes(graph, stepper, part.start, part.stop), 0
    if end is not None:
        (crossing,) = (graph.values[i] for i in find_learned(graph, end))
        compared = (COMPARED if len(crossing.type.shape) == 2 else 1) * crossing.nbytes
    small, large = _gradient_bytes(graph, part)
    others = tensors + compared - _state_bytes(part, stepper) - small - max(large, default=0)
    return Needs(tensors, tensors + compared + int(GRADIENTS_AGAIN * small + OTHERS_AGAIN * others))


def _is_float(value: Value) -> bool:
    return value.type.dtype is not None and value.type.dtype.is_floating_point


def _why_not(graph: Graph, place: Place) -> str:
    """Why no part may end here; empty if one may."""
    if place.forbidden:
        return place.forbidden.reason
    learned = [graph.values[i] for i in find_learned(graph, place)]
    if len(learned) > 1:
        names = ", ".join(str(graph.nodes[graph.producers[i]]) for i in find_learned(graph, place))
        return (
            f"{len(learned)} values that training changes cross there ({names}), and labels are for one; cut where no skip "
            "connection is open"
        )
    if learned and _is_float(learned[0]) and not learned[0].type.differentiable:
        return "nothing before it is trained: its parameters are frozen, or what they make is detached"
    if not learned or not _is_float(learned[0]):
        live = [graph.values[i] for i in find_live(graph, place.index)]
        if not learned and any(map(_is_float, live)):
            return "no parameter has a part in what crosses there, so that there is nothing to train before it"
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


def _balance(
    graph: Graph, places: Mapping[int, Place], stepper: Stepper, parts: int, activated: bool, alike: "_Alike"
) -> list[Place]:
    """Cuts that make the largest part as small as can be: of those that separate the same parameters, the lightest."""
    if not is_count(parts, 1):
        raise PartitionError(f"parts is {parts!r}, expected a number of at least 1")
    parts = int(parts)
    candidates = _candidates(graph, places, activated)
    if len(candidates) > MOST_CANDIDATES:  # many layers: their repeated blocks will do
        blocks = {_to_the_side(graph, places, cut, activated).index for cut in partition(graph).cuts}
        candidates = [place for place in candidates if place.index in blocks] or candidates
    candidates = [place for place in candidates if alike.find(place) is not None]
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
    _, large = _gradient_bytes(graph, segment)
    backward = find_footprint(segment, graph.batch.rows).backward - (sum(large) - max(large, default=0))
    return _state_bytes(segment, stepper) + backward + segment.input_nbytes


def _find_conventional_needs(graph: Graph, stepper: Stepper) -> Needs:
    """What all of the model takes in an ordinary loop, which steps every parameter whole, with what that allocates.

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
    tensors = _state_bytes(whole, stepper) + max(backward, kept + step(large)) + whole.input_nbytes
    small = _gradient_bytes(graph, whole)[0]
    others = max(backward + whole.input_nbytes - sum(trained.values()), 0)
    return Needs(tensors, tensors + int(GRADIENTS_AGAIN * small + OTHERS_AGAIN * others))


def _gradient_bytes(graph: Graph, segment: Segment) -> tuple[int, list[int]]:
    """Of all small ones, and of each that is so large that malloc gives it back."""
    sizes = [graph.parameters[name].nbytes for name in segment.parameters if graph.parameters[name].trainable]
    large = [nbytes for nbytes in sizes if nbytes >= LARGEST]
    return sum(sizes) - sum(large), large


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


class _Alike:
    """Places in the graph of prediction that are those of training: between the same parameters, behind the same operation.

    Where evaluation leaves that operation out, as it does a dropout, the lightest place between them will do.
    """

    def __init__(self, train: Graph, predict: Graph):
        self.train, self.predict = train, predict
        self._firsts, self._predicted = find_first_uses(train), find_first_uses(predict)
        self._single = [p for p in find_places(predict) if p.legal and len(find_learned(predict, p)) == 1]

    def find(self, cut: Place) -> Place | None:
        maker = self.describe_maker(cut)
        before = {name for name, first in self._firsts.items() if first < cut.index}
        least = max((first for name, first in self._predicted.items() if name in before), default=-1)
        most = min(
            (first for name, first in self._predicted.items() if name not in before), default=len(self.predict.nodes)
        )
        between = [p for p in self._single if least < p.index <= most]
        alike = [p for p in between if _describe_maker(self.predict, find_learned(self.predict, p)[0]) == maker]
        return alike[-1] if alike else min(between, key=lambda p: (p.nbytes, p.index), default=None)

    def describe_maker(self, cut: Place) -> tuple[str, str]:
        (learned,) = find_learned(self.train, cut)
        return _describe_maker(self.train, learned)


def _cut_alike(graph: Graph, train: Partition) -> Partition:
    alike, chosen = _Alike(train.graph, graph), []
    for cut in train.cuts:
        place = alike.find(cut)
        if place is None:
            name, module = alike.describe_maker(cut)
            raise PartitionError(
                f"a part would end after {name} in {module or 'the model'}, but evaluation takes another way there; cut "
                "elsewhere"
            )
        chosen.append(place)
    return Partition(graph, tuple(chosen))


def _describe_maker(graph: Graph, value: int) -> tuple[str, str]:
    node = graph.nodes[graph.producers[value]]
    return node.operation.name, node.module

"""Tasks: from a batch to what runs it, and from what its microbatches made to one result.

In: a model with its loss, a plan, and any batch. Out: a `Task`, whose program was made and checked when the first batch of its
kind came; the mean loss, or the model's output for the whole batch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from packhorse.case import Case
from packhorse.errors import BatchError, PackhorseError
from packhorse.graph import Graph, Ref, Size, capture
from packhorse.graph.graph import Mode
from packhorse.partition import Partition, partition_like
from packhorse.plan import Plan
from packhorse.precision import Precision
from packhorse.program import Microbatch, Program, Task
from packhorse.ranks.world import World
from packhorse.schedule import Actions, check
from packhorse.search import count_microbatches
from packhorse.state import ModelState

Loss = Callable[[Any, Any], Tensor]


class Tasks:
    """The graphs, partitions and programs of one trainer, by what they are for."""

    case: Case
    plan: Plan

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        weight: Callable[[Any], float] | None,
        device: str,
        precision: Precision,
        world: World | None,
    ):
        self.model, self.loss, self.weight = model, loss, weight
        self.device, self.precision, self.world = device, precision, world
        self._graphs: defaultdict[Mode, list[Graph]] = defaultdict(list)
        self._partitions: dict[int, Partition] = {}
        self._programs: dict[Any, Program] = {}

    def follow(self, case: Case, plan: Plan) -> None:
        """From now on; what was made for another plan is forgotten."""
        self.case, self.plan = case, plan
        graph = case.partition.graph
        self._graphs = defaultdict(list, {"train": [graph]})
        self._partitions = {id(graph): case.partition}
        self._programs = {}

    # -- graphs

    def capture(self, mode: Mode, batch: Any) -> Graph:
        make = partial(capture, self.model, batch, self.loss, mode=mode, device=self.device, precision=self.precision)
        return make() if self.world is None else _capture_once(self.world, make)

    def find_graph(self, mode: Mode, batch: Any) -> Graph:
        """The graph for a batch: one that fits is used again; training insists on batches like the example."""
        known = self._graphs[mode]
        refusal: BatchError | None = None
        for graph in known:
            try:
                graph.inputs(batch)
                return graph
            except BatchError as error:
                refusal = error
        if mode == "train" and refusal is not None:
            known[0].batch.flatten(batch)  # raises if the structure differs; what is left are guards
            if known[0].single_row and known[0].batch.count_rows(batch) == 1:
                raise refusal
        graph = self.capture(mode, batch)
        known.append(graph)
        self._partitions[id(graph)] = partition_like(graph, self.case.partition)
        return graph

    def partition_of(self, graph: Graph) -> Partition:
        return self._partitions[id(graph)]

    # -- tasks

    def make(self, mode: Mode, batch: Any, step: int, *, training: bool = False) -> Task:
        graph = self.find_graph(mode, batch)
        rows = graph.batch.count_rows(batch)
        microbatches = self._take_own(self.split(graph, batch, self._split_size(graph, rows, training)), rows)
        return Task(self._program(graph, len(microbatches), training), microbatches, step, training)

    def split(self, graph: Graph, batch: Any, size: int, shares: Sequence[float] | None = None) -> list[Microbatch]:
        """Microbatches of `size` rows, with their shares in the loss."""
        pieces = graph.batch.split(batch, size)
        if shares is None:
            weights = [float(self.weight(p)) if self.weight else float(graph.batch.count_rows(p)) for p in pieces]
            total = sum(weights)
            if not total > 0:
                raise BatchError(f"the weights of the microbatches are {weights}; their sum must be above 0")
            shares = [weight / total for weight in weights]
        return [
            Microbatch(graph.inputs(piece), graph.batch.count_rows(piece), share, k)
            for k, (piece, share) in enumerate(zip(pieces, shares, strict=True))
        ]

    def _take_own(self, microbatches: list[Microbatch], rows: int) -> list[Microbatch]:
        """Those of this rank's replica: neighbours, as many as others have, or one more or less."""
        if self.world is None:
            return microbatches
        count, replicas, replica = len(microbatches), self.world.ranks.data, self.world.replica
        if count < replicas:
            raise BatchError(
                f"the batch has {rows} rows, which make {count} microbatches for {replicas} ranks that each need one; give more"
            )
        return microbatches[count * replica // replicas : count * (replica + 1) // replicas]

    def _split_size(self, graph: Graph, rows: int, training: bool) -> int:
        """Rows of a microbatch: as many microbatches as planned, or, to predict, pieces of the planned size."""
        if training:
            return count_microbatches(graph, rows, self.plan.microbatches)[1]
        size = min(self.plan.rows, -(-rows // self.plan.ranks.data))
        return max(size, 2) if graph.single_row and rows > 1 else size

    def _program(self, graph: Graph, num_microbatches: int, training: bool) -> Program:
        key = (id(graph), num_microbatches)
        if key not in self._programs:
            part = self._partitions[id(graph)]
            sizes = {s.index: self.case.fetch_bytes(s) for s in part.segments}
            links = self.case.links
            traffic = None if links is None else links.traffic_of(part)
            if training:
                actions = self.plan.actions(num_microbatches, sizes, links)
            else:
                actions = self.plan.forward_actions(len(part.segments), num_microbatches, sizes, links, traffic)
            check(
                actions,
                len(part.segments),
                num_microbatches,
                self.plan.backward if training else frozenset(),
                local=None if traffic is None or links is None else traffic.segments_of(links.place),
                receives=((), ()) if traffic is None else traffic.receivers(),
            )
            self._programs[key] = Program(part, Actions(actions), traffic, self.plan.piece_bytes)
        return self._programs[key]

    # -- results

    def join(self, task: Task, batch: Any, state: ModelState) -> Any:
        """The model's output for the whole batch."""
        partition = task.program.partition
        outputs = []
        for microbatch, results in self._join_results(task, batch):
            values = _Values({**microbatch.inputs, **results}, state)
            outputs.append(partition.finish(values, microbatch.rows))  # type: ignore[arg-type]  # it has what is asked for
        return _join(partition.graph, outputs)

    def _join_results(self, task: Task, batch: Any) -> list[tuple[Microbatch, dict[str, Tensor]]]:
        """Of all microbatches, also those that other ranks ran, or ran to the end."""
        if self.world is None:
            return list(zip(task.microbatches, task.results, strict=True))
        graph = task.program.partition.graph
        own = {m.number: results for m, results in zip(task.microbatches, task.results, strict=True)}
        joined: dict[int, dict[str, Tensor]] = {}
        for found in self.world.gather_objects(own):
            for number, results in found.items():
                joined.setdefault(number, {}).update(results)
        rows = graph.batch.count_rows(batch)
        everything = self.split(graph, batch, self._split_size(graph, rows, training=False))
        return [(microbatch, joined[microbatch.number]) for microbatch in everything]


def mean_loss(task: Task) -> float:
    """The sum over microbatches, in order, of each loss times its share, in fp32."""
    if task.loss is not None:
        return float(task.loss)  # of all ranks
    total: Tensor | None = None
    for microbatch, results in zip(task.microbatches, task.results, strict=True):
        (loss,) = results.values()
        part = loss.float() * microbatch.share
        total = part if total is None else total + part
    assert total is not None
    return float(total)


class _Values(dict[str, Any]):
    """Values of a microbatch; what is not among them is a parameter or buffer, read when asked for."""

    def __init__(self, values: Mapping[str, Tensor], state: ModelState):
        super().__init__(values)
        self._state = state

    def __missing__(self, name: str) -> Tensor:
        return self._state.read(name)


def _join(graph: Graph, outputs: list[Any]) -> Any:
    """One output from those of the microbatches: along dimension 0 where it follows the rows."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    leaves = []
    for column, declared in zip(zip(*(f[0] for f in flat), strict=True), graph.outputs, strict=True):
        shape = graph.values[declared].type.shape if isinstance(declared, Ref) else ()
        if isinstance(declared, Ref) and shape and isinstance(shape[0], Size):
            leaves.append(torch.cat(list(column)))
        elif isinstance(column[0], Tensor) and not all(torch.equal(column[0], other) for other in column[1:]):
            raise BatchError(
                f"the model returns a tensor of shape {list(column[0].shape)} that does not follow the rows and differs "
                "between microbatches, so there is no one value for the batch; predict in batches of at most one microbatch"
            )
        else:
            leaves.append(column[0])
    return tree_unflatten(leaves, flat[0][1])


def _capture_once(world: World, make: Callable[[], Graph]) -> Graph:
    """One rank captures, for all; blocks that could not be traced are part of the graph, and of each rank's own model."""
    found: Graph | PackhorseError | None = None
    if world.rank == 0:
        try:
            found = make()
        except PackhorseError as error:
            found = error
    is_opaque = isinstance(found, Graph) and bool(found.opaque)
    shared = world.share(None if is_opaque else found, 0)
    if isinstance(shared, PackhorseError):
        raise shared
    if shared is not None:
        return shared
    return found if isinstance(found, Graph) else make()

"""Stages: where a pipeline cuts a model.

In: a graph, an arrangement of ranks. Out: cuts that give all stages about equal work, found by the partitioner; and for
each segment of a finer partition the rank that runs it.
"""

from packhorse.errors import PartitionError, RanksError
from packhorse.graph import Graph
from packhorse.partition import Partition
from packhorse.partition.partition import FLOPS_PER_BYTE, balance
from packhorse.ranks.shape import Ranks

SLACKS = (1.01, 1.02, 1.03, 1.04, 1.05)


def cut_into_stages(graph: Graph, ranks: Ranks) -> tuple[int, ...]:
    """The nodes that begin a stage, but the first.

    Flops tell the time of stages to some per cent only, while messages are work for those who compute: of cuts with about as
    equal work that which has least of both.
    """
    try:
        found = balance(graph, ranks.num_stages, SLACKS)
    except PartitionError as error:
        raise RanksError(
            f"{graph.name} cannot be cut into {ranks.num_stages} stages: {error}; use fewer ranks"
        ) from error
    return tuple(place.index for place in min(found, key=_price).cuts)


def _price(part: Partition) -> float:
    """In flops, of the slowest stage and what passes between all."""
    return max(s.flops for s in part.segments) + FLOPS_PER_BYTE * sum(place.nbytes for place in part.cuts)


def assign(part: Partition, stage_cuts: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """The place of each segment: stages go round the pipeline."""
    owners, stage = [], 0
    for segment in part.segments:
        stage += segment.start in stage_cuts
        owners.append(stage % pipeline)
    return tuple(owners)

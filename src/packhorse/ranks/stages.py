"""Stages: where a pipeline cuts a model.

In: a graph, an arrangement of ranks. Out: cuts that give all stages as equal work as can be, found by the partitioner; and for
each segment of a finer partition the rank that runs it.
"""

from packhorse.errors import PartitionError, RanksError
from packhorse.graph import Graph
from packhorse.partition import Partition, partition
from packhorse.ranks.shape import Ranks


def cut_into_stages(graph: Graph, ranks: Ranks) -> tuple[int, ...]:
    """The nodes that begin a stage, but the first."""
    try:
        return tuple(place.index for place in partition(graph, segments=ranks.num_stages).cuts)
    except PartitionError as error:
        raise RanksError(
            f"{graph.name} cannot be cut into {ranks.num_stages} stages: {error}; use fewer ranks"
        ) from error


def assign(part: Partition, stage_cuts: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """The place of each segment: stages go round the pipeline."""
    owners, stage = [], 0
    for segment in part.segments:
        stage += segment.start in stage_cuts
        owners.append(stage % pipeline)
    return tuple(owners)

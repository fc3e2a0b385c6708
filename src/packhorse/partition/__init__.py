"""Where a graph may be cut, and where to cut it."""

from packhorse.partition.code import Code
from packhorse.partition.constraints import Constraint, Place, find_constraints, find_live, find_places
from packhorse.partition.footprint import Footprint, find_footprint
from packhorse.partition.partition import (
    Partition,
    find_first_uses,
    join_between,
    join_small,
    partition,
    partition_like,
)
from packhorse.partition.rest import Rest
from packhorse.partition.segment import Segment

__all__ = [
    "Code",
    "Constraint",
    "Footprint",
    "Partition",
    "Place",
    "Rest",
    "Segment",
    "find_constraints",
    "find_first_uses",
    "find_footprint",
    "find_live",
    "find_places",
    "join_between",
    "join_small",
    "partition",
    "partition_like",
]

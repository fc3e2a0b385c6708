"""Train neural networks that are larger than the memory at hand."""

from packhorse.errors import (
    BatchError,
    CaptureError,
    ModelError,
    PackhorseError,
    PartitionError,
)
from packhorse.graph import Graph, capture
from packhorse.partition import Partition, Segment, partition

__all__ = [
    "BatchError",
    "CaptureError",
    "Graph",
    "ModelError",
    "PackhorseError",
    "Partition",
    "PartitionError",
    "Segment",
    "capture",
    "partition",
]

"""Train neural networks that are larger than the memory at hand."""

from packhorse.errors import (
    BatchError,
    BudgetError,
    CaptureError,
    ModelError,
    NumericsError,
    OptimizerError,
    PackhorseError,
    PartitionError,
    ScheduleError,
    StoreError,
)
from packhorse.graph import Graph, capture
from packhorse.memory import Memory
from packhorse.partition import Partition, Segment, partition
from packhorse.store import DiskStore, RamStore
from packhorse.trainer import Trainer
from packhorse.verify import Verification, verify

__all__ = [
    "BatchError",
    "BudgetError",
    "CaptureError",
    "DiskStore",
    "Graph",
    "Memory",
    "ModelError",
    "NumericsError",
    "OptimizerError",
    "PackhorseError",
    "Partition",
    "PartitionError",
    "RamStore",
    "ScheduleError",
    "Segment",
    "StoreError",
    "Trainer",
    "Verification",
    "capture",
    "partition",
    "verify",
]

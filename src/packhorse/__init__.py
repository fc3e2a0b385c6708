"""Train neural networks that are larger than the memory at hand."""

from packhorse.errors import (
    BatchError,
    BudgetError,
    CaptureError,
    MachineError,
    ModelError,
    NumericsError,
    OptimizerError,
    PackhorseError,
    PartitionError,
    PlanError,
    RanksError,
    ScheduleError,
    StoreError,
)
from packhorse.graph import Graph, capture
from packhorse.machine import Machine
from packhorse.memory import Memory
from packhorse.outline import make_plan
from packhorse.partition import Partition, Segment, partition
from packhorse.plan import Plan
from packhorse.ranks.shape import Ranks
from packhorse.sil import SegmentedTrainer
from packhorse.store import DiskStore, RamStore
from packhorse.trainer import Trainer
from packhorse.verify import Verification, verify

__all__ = [
    "BatchError",
    "BudgetError",
    "CaptureError",
    "DiskStore",
    "Graph",
    "Machine",
    "MachineError",
    "Memory",
    "ModelError",
    "NumericsError",
    "OptimizerError",
    "PackhorseError",
    "Partition",
    "PartitionError",
    "Plan",
    "PlanError",
    "RamStore",
    "Ranks",
    "RanksError",
    "ScheduleError",
    "Segment",
    "SegmentedTrainer",
    "StoreError",
    "Trainer",
    "Verification",
    "capture",
    "make_plan",
    "partition",
    "verify",
]

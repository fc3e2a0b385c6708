"""The public face is small, and stays as it is."""

import inspect

import packhorse as ph
from packhorse import models


def test_public_names() -> None:
    assert set(ph.__all__) == {
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
    }
    assert all(hasattr(ph, name) for name in ph.__all__)
    assert all(hasattr(models, name) for name in models.__all__)


def test_signatures() -> None:
    assert list(inspect.signature(ph.capture).parameters) == [
        "model",
        "example",
        "loss",
        "mode",
        "device",
        "precision",
    ]
    assert list(inspect.signature(ph.partition).parameters) == [
        "graph",
        "segments",
        "max_bytes",
        "cuts",
        "flops_per_byte",
    ]
    assert list(inspect.signature(ph.Trainer).parameters) == [
        "model",
        "optimizer",
        "example",
        "loss",
        "weight",
        "strategy",
        "microbatches",
        "precision",
        "memory",
        "store",
        "resume",
        "durability",
        "update",
        "clip_norm",
        "scheduler",
        "data",
        "device",
        "overlap",
        "seed",
        "weights",
        "plan",
        "ranks",
    ]
    assert list(inspect.signature(ph.verify).parameters)[:4] == ["model", "optimizer", "example", "loss"]

"""The public face is small, and stays as it is."""

import inspect

import packhorse as ph
from packhorse import models


def test_public_names() -> None:
    assert set(ph.__all__) == {
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
    }
    assert all(hasattr(ph, name) for name in ph.__all__)
    assert all(hasattr(models, name) for name in models.__all__)


def test_signatures() -> None:
    assert list(inspect.signature(ph.capture).parameters) == ["model", "example", "loss", "mode", "device"]
    assert list(inspect.signature(ph.partition).parameters) == [
        "graph",
        "segments",
        "max_bytes",
        "cuts",
        "flops_per_byte",
    ]

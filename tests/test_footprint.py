"""Footprints worked out from a graph, beside the bytes that storages really take while segments run."""

import copy
from typing import Any

import pytest
import torch

import packhorse as ph
import toys
from packhorse.graph.allocations import Allocations
from packhorse.partition import find_footprint

ROWS = 16
SMALL = 32 << 10  # bytes; kernels may reorder weights, which do not grow with the rows as what is worked out does


def measure(segment: ph.Segment, parameters: Any, buffers: Any, leaves: Any, gradients: Any) -> dict[str, Any]:
    """One forward without a graph, one with, and the backward; what came before does not count."""
    known = [*parameters.values(), *buffers.values(), *leaves.values(), *gradients.values()]
    found: dict[str, Any] = {}
    copied = copy.deepcopy(buffers)
    with torch.no_grad(), Allocations([*known, *copied.values()]) as allocations:
        segment(parameters, copied, leaves, rows=ROWS)
    found["forward"] = allocations.peak
    with Allocations(known) as allocations:
        outputs = segment(parameters, buffers, leaves, rows=ROWS)
        found["building"], found["graph"] = allocations.peak, allocations.live
        allocations.peak = allocations.live
        if segment.is_differentiable:
            found["gradients"] = segment.differentiate(parameters, leaves, outputs, gradients)
    found["backward"] = allocations.peak
    found["outputs"] = outputs
    return found


@pytest.mark.parametrize("name", toys.ZOO)
def test_footprints_are_what_segments_take(name: str) -> None:
    model, make_batch, loss = toys.zoo(name)
    graph = ph.capture(model, make_batch(ROWS // 2), loss)
    batch = make_batch(ROWS)
    part = ph.partition(graph)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values: dict[str, Any] = dict(graph.inputs(batch))
    for segment in part.segments:
        leaves = {n: values[n].detach().requires_grad_(values[n].requires_grad) for n in segment.inputs}
        outputs = segment(parameters, copy.deepcopy(buffers), leaves, rows=ROWS)
        gradients = {n: torch.ones_like(t) for n, t in outputs.items() if t.requires_grad}
        found = measure(segment, parameters, buffers, leaves, gradients)
        expected = find_footprint(segment, ROWS)
        for kind in ("forward", "building", "graph", "backward"):
            wanted, worked_out = found[kind], getattr(expected, kind)
            assert abs(worked_out - wanted) <= 0.05 * wanted + SMALL, f"{segment}: {kind} {worked_out}, really {wanted}"
        values.update(outputs)

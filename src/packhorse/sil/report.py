"""What parts are and took, beside the model in one piece.

In: a division, the standings of its parts. Out: numbers by name, and a page for a person to read.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from packhorse.sil.parts import Division
from packhorse.sil.standing import Standing
from packhorse.units import format_bytes, format_seconds

PROCESS = 5 << 20  # what one takes that trains, however little: records, threads


def describe(division: Division, standings: Sequence[Standing], mode: str) -> dict[str, Any]:
    rows = max(s.rows for s in standings)
    largest, whole = max(s.planned_bytes for s in standings), PROCESS + division.needs_whole.planned
    return {
        "mode": mode,
        "parts": [{"part": i, **asdict(s), "flops": s.flops} for i, s in enumerate(standings)],
        "planned_bytes": largest,
        "planned_ratio": largest / whole,
        "tensor_ratio": max(needs.tensors for needs in division.needs) / division.needs_whole.tensors,
        "exchanged_bytes": sum(s.stored_bytes for s in standings),
        "conventional": {
            "planned_bytes": whole,
            "flops": sum(s.flops_per_row for s in standings) * rows,
            "pipeline_bytes": sum(2 * s.crossing_bytes_per_row for s in standings) * rows,
        },
    }


def show(division: Division, standings: Sequence[Standing], mode: str, labels: str) -> str:
    described = describe(division, standings, mode)
    lines = [f"{len(standings)} parts, {mode}, labels {labels}"]
    lines += [_show_part(i, standing, is_last=i == len(standings) - 1) for i, standing in enumerate(standings)]
    whole = described["conventional"]
    lines.append(
        f"in one piece: {format_bytes(whole['planned_bytes'])} planned, {described['planned_ratio']:.2f} of that here, "
        f"{described['tensor_ratio']:.2f} of its tensors; "
        f"{whole['flops'] / 1e12:.3g} TFLOP; a pipeline with these cuts would exchange "
        f"{format_bytes(whole['pipeline_bytes'])}, here {format_bytes(described['exchanged_bytes'])} were"
    )
    return "\n".join(lines)


def _show_part(i: int, standing: Standing, *, is_last: bool) -> str:
    s = standing
    took = "" if not s.steps else f", {format_seconds(s.seconds)} for {s.steps} steps, {s.flops / 1e12:.3g} TFLOP"
    grown = "" if s.grown_bytes is None else f" ({format_bytes(s.grown_bytes)} measured)"
    handed = f", hands on {format_bytes(s.stored_bytes)}" if s.stored_bytes else ""
    what = "of the model" if is_last else "by read-out"
    accuracy = "" if s.accuracy is None else f", accuracy {what} {s.accuracy:.2%}"
    return (
        f"part {i}: {' '.join(s.modules[:1])} ... {s.num_parameters} parameters, {format_bytes(s.planned_bytes)} "
        f"planned{grown}{took}{handed}{accuracy}"
    )

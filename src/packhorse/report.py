"""What people read: tables of segments and cuts, in the terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from packhorse.chart import draw
from packhorse.errors import PackhorseError
from packhorse.graph import Graph
from packhorse.machine import Machine
from packhorse.partition import Partition, Segment, find_live, find_places
from packhorse.plan import Plan
from packhorse.units import format_bytes, format_seconds, parse_bytes
from packhorse.verify import Verification


def format_count(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}P"


def describe_modules(names: tuple[str, ...]) -> str:
    """A short range for many names: what they share is written once."""
    if len(names) <= 2:
        return ", ".join(names) or "(outside modules)"
    return f"{names[0]} … {names[-1]}"


def describe_partition(partition: Partition) -> dict[str, Any]:
    """The partition as plain data, for --json."""
    graph = partition.graph
    return {
        "model": graph.name,
        "mode": graph.mode,
        "rows": graph.batch.rows,
        "nodes": len(graph.nodes),
        "parameters": graph.num_parameters,
        "parameter_nbytes": sum(p.nbytes for p in graph.parameters.values()),
        "flops": graph.flops,
        "ties": {name: list(names) for name, names in graph.ties.items()},
        "opaque": graph.opaque,
        "codes": len(partition.codes),
        "segments": [_describe_segment(partition, segment) for segment in partition.segments],
    }


def _describe_segment(partition: Partition, segment: Segment) -> dict[str, Any]:
    return {
        "index": segment.index,
        "modules": list(segment.modules),
        "parameters": list(segment.parameters),
        "buffers": list(segment.buffers),
        "parameter_nbytes": segment.parameter_nbytes,
        "nbytes": segment.nbytes,
        "flops": segment.flops,
        "inputs": list(segment.inputs),
        "outputs": list(segment.outputs),
        "cut_nbytes": partition.cuts[segment.index].nbytes if segment.index < len(partition.cuts) else 0,
        "code": partition.codes.index(segment.code),
    }


def describe_cuts(graph: Graph) -> list[dict[str, Any]]:
    """Every place between two nodes, and why a cut is forbidden where it is."""
    return [
        {
            "index": place.index,
            "after": str(graph.nodes[place.index - 1]),
            "live": len(find_live(graph, place.index)),
            "nbytes": place.nbytes,
            "forbidden": place.forbidden.reason if place.forbidden else None,
        }
        for place in find_places(graph)
    ]


def partition_table(partition: Partition) -> Table:
    graph = partition.graph
    title = (
        f"{graph.name}: {format_count(graph.num_parameters)} parameters, {len(graph.nodes)} nodes, "
        f"{format_count(graph.flops)} flops forward at {graph.batch.rows} row{'s' * (graph.batch.rows > 1)}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    table.add_column("#", justify="right")
    table.add_column("modules", overflow="fold", min_width=20, max_width=48)
    for column in ("weights", "touched", "flops", "cut", "code"):
        table.add_column(column, justify="right", no_wrap=True)
    for segment in partition.segments:
        cut = partition.cuts[segment.index] if segment.index < len(partition.cuts) else None
        table.add_row(
            str(segment.index),
            describe_modules(segment.modules),
            format_bytes(segment.parameter_nbytes),
            format_bytes(segment.nbytes),
            f"{format_count(segment.flops)} {segment.flops / max(graph.flops, 1):4.0%}",
            f"{format_bytes(cut.nbytes)} in {len(find_live(graph, cut.index))}" if cut else "",
            str(partition.codes.index(segment.code)),
        )
    shared = [f"{names[0]} = {', '.join(names[1:])}" for names in graph.ties.values()]
    notes = [f"{len(partition.codes)} distinct codes"] + ([f"tied: {'; '.join(shared)}"] if shared else [])
    if graph.opaque:
        notes.append(f"blocks run as they are: {graph.opaque}")
    table.caption = Text(". ".join(notes))
    table.caption_justify = "left"
    return table


def cuts_table(graph: Graph) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("place", justify="right")
    table.add_column("after", overflow="fold")
    table.add_column("carries", justify="right", no_wrap=True)
    table.add_column("legal")
    for cut in describe_cuts(graph):
        verdict = Text("yes", "green") if cut["forbidden"] is None else Text(f"no: {cut['forbidden']}", "red")
        table.add_row(str(cut["index"]), cut["after"], f"{format_bytes(cut['nbytes'])} in {cut['live']}", verdict)
    return table


def verification_table(name: str, verification: Verification, most: int = 12) -> Table:
    """What differs first, then what agrees; long lists are shortened."""
    verdict = "same numbers" if verification.ok else "NUMBERS DIFFER"
    title = (
        f"{name}: {verdict}; {verification.num_equal} of {len(verification.comparisons)} values bit-identical after "
        f"{verification.steps} steps (streamed {verification.streamed_seconds:.1f} s, plain {verification.plain_seconds:.1f} s)"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in ("value", "verdict", "largest difference", ""):
        table.add_column(column)
    ordered = sorted(verification.comparisons, key=lambda c: c.equal)
    for comparison in ordered[:most]:
        agrees = comparison.equal or (comparison.note and comparison.difference <= verification.tolerance)
        word = "identical" if comparison.equal else "within tolerance" if agrees else "differs"
        style = "green" if agrees else "bold red"
        table.add_row(comparison.name, Text(word, style), f"{comparison.difference:.2g}", comparison.note)
    if len(ordered) > most:
        table.add_row(f"... and {len(ordered) - most} more", "", "", "")
    return table


def describe_verification(verification: Verification) -> dict[str, Any]:
    return {
        "ok": bool(verification.ok),
        "steps": verification.steps,
        "identical": verification.num_equal,
        "values": [
            {"name": c.name, "identical": c.equal, "difference": c.difference, "note": c.note}
            for c in verification.comparisons
        ],
    }


def store_table(directory: object, described: dict[str, Any]) -> Table:
    """What `packhorse store ls` shows."""
    table = Table(title=Text(str(directory)), show_header=False, title_justify="left")
    held = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in described["bytes"].items())
    ranks = f" by {described['ranks']} ranks" if described["ranks"] > 1 else ""
    rows = {
        "step": f"{described['step']}, committed {described['committed']}{ranks}",
        "model": f"{described['model']}: {format_count(described['elements'])} elements in {described['tensors']} tensors",
        "optimizer": described["optimizer"],
        "holds": held,
        "on disk": f"{format_bytes(described['bytes_on_disk'])}: {described['versions']} x {described['blocks']} blocks"
        + (" and a spare" if described["rolls_forward"] else ""),
        "in use by": described["in_use_by"] or "nobody",
    }
    if described["interrupted"]:
        rows["interrupted"] = f"in step {described['interrupted']['step']}: the run that resumes it finishes that step"
    if not described["closed"]:
        rows["not closed"] = "written with durability='none': it can be resumed only after its run has ended properly"
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table


# -- sweeps of plans


def sweep_points(sweep: str, memory: str | None, machine: Machine) -> list[Any]:
    """What a sweep goes through: layers, rows, amounts of memory, or ranks."""
    if sweep == "depth":
        return [12, 24, 48, 96, 192, 384]
    if sweep == "batch":
        return [2, 4, 8, 16, 32, 64, 128, 256]
    if sweep == "memory":
        most = parse_bytes(memory) if memory is not None else machine.memory.get("device", machine.memory["host"])
        return [most >> i for i in reversed(range(6))]
    if sweep == "ranks":
        return [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024]
    raise PackhorseError(f"--sweep is {sweep!r}, expected depth, batch, memory or ranks")


SweepRow = tuple[Any, Plan | None, str]  # the point, its plan, or why there is none


def sweep_table(sweep: str, model: str, machine: Machine, rows: Sequence[SweepRow]) -> Table:
    """Plans side by side, and the ordinary loop beside them: its memory, and its speed where it fits."""
    tier = _scarce_tier(machine)
    names = (sweep, "how", "microbatches", "graphs kept", f"{tier} memory", "a step", "rows/s", "waits most for")
    table = Table(title=f"{model} on {machine.name}", box=box.SIMPLE_HEAD)
    for name in (*names, "plain memory", "plain rows/s"):
        table.add_column(name, justify="left" if name in ("how", "waits most for") else "right")
    for point, plan, _ in rows:
        shown = format_bytes(point) if sweep == "memory" else str(point)
        if plan is None:
            table.add_row(shown, "does not fit")
            continue
        found, plain = plan.estimate, plan.plain
        table.add_row(
            shown,
            f"{plan.strategy}, {'disk' if plan.on_disk else 'RAM'}"
            + (f", {plan.ranks.data} x {plan.ranks.pipeline}" if plan.ranks.size > 1 else ""),
            str(plan.microbatches),
            str(len(plan.kept)),
            format_bytes(found.peak[tier]),
            format_seconds(found.seconds),
            f"{plan.batch_rows / found.seconds:.3g}",
            found.bottleneck,
            format_bytes(plain.peak[tier]),
            f"{plan.batch_rows / plain.seconds:.3g}" if plan.plain_fits else "does not fit",
        )
    return table


def sweep_chart(sweep: str, model: str, machine: Machine, rows: Sequence[SweepRow]) -> str:
    """Memory of the scarcest tier, in GiB, and speed, over what was swept; plain where it fits."""
    tier = _scarce_tier(machine)
    made = [(point / 2**30 if sweep == "memory" else point, plan) for point, plan, _ in rows if plan is not None]
    fitting = [(x, plan) for x, plan in made if plan.plain_fits]
    lines = {
        f"{tier} memory, GiB": [(x, plan.estimate.peak[tier] / 2**30) for x, plan in made],
        "plain memory, GiB": [(x, plan.plain.peak[tier] / 2**30) for x, plan in made],
        "rows a second": [(x, plan.batch_rows / plan.estimate.seconds) for x, plan in made],
        "plain rows a second": [(x, plan.batch_rows / plan.plain.seconds) for x, plan in fitting],
    }
    return draw(f"{model} on {machine.name}", "memory, GiB" if sweep == "memory" else sweep, "", lines)


def _scarce_tier(machine: Machine) -> str:
    return "host" if machine.device == "cpu" else "device"

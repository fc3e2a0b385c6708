"""The command line: the same verbs over the same values as the library."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from packhorse.errors import PackhorseError
from packhorse.graph import capture
from packhorse.models import load_task
from packhorse.partition import partition
from packhorse.report import cuts_table, describe_cuts, describe_partition, partition_table
from packhorse.units import parse_bytes

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Train neural networks larger than the memory at hand."
)


@app.callback()
def packhorse() -> None:
    """Train neural networks larger than the memory at hand."""


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A built-in name, file.py:function, or a directory with a Hugging Face config.json."
        ),
    ],
    segments: Annotated[
        str | None, typer.Option(help="How many segments, or 'finest'. Default: the repeated blocks.")
    ] = None,
    max_bytes: Annotated[str | None, typer.Option(help="The most bytes a segment may touch, such as 500MiB.")] = None,
    cut: Annotated[list[str] | None, typer.Option(help="Pin a cut after this module. May be repeated.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the example batch, for built-in names and configs.")] = 1,
    mode: Annotated[str, typer.Option(help="train, eval or predict.")] = "train",
    cuts: Annotated[
        bool, typer.Option("--cuts", help="List every place and why a cut is forbidden where it is.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Capture a model and show how it is cut into segments. Needs none of the model's memory."""
    task = load_task(model, rows=rows)
    graph = capture(task.model, task.example, task.loss, mode=mode)  # type: ignore[arg-type]  # capture checks the mode
    wanted: Any = segments if segments in (None, "finest") else _number(segments)
    limit = parse_bytes(max_bytes) if max_bytes is not None else None
    chosen = partition(graph, wanted, max_bytes=limit, cuts=cut or ())
    if as_json:
        described = describe_partition(chosen) | ({"cuts": describe_cuts(graph)} if cuts else {})
        typer.echo(json.dumps(described, indent=2))
        return
    console = Console()
    console.print(partition_table(chosen))
    if cuts:
        console.print(cuts_table(graph))


def _number(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise PackhorseError(f"--segments is {text!r}, expected a number or 'finest'") from None


def main() -> None:
    """Entry point: errors of ours become one line and exit code 2."""
    try:
        app()
    except PackhorseError as error:
        Console(stderr=True).print(Text.assemble(("packhorse: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(2) from None

"""The command line: the same verbs over the same values as the library."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from packhorse.archive import check_store, describe_store, export_store, reclaim
from packhorse.data import Labelled, open_data, open_labelled
from packhorse.errors import BatchError, BudgetError, PackhorseError
from packhorse.graph import capture
from packhorse.machine import Machine, find_machine
from packhorse.memory import peak_resident_bytes
from packhorse.models import Task, load_task
from packhorse.outline import make_plan
from packhorse.partition import partition
from packhorse.plan import Plan
from packhorse.ranks.shape import parse_ranks
from packhorse.report import (
    SweepRow,
    cuts_table,
    describe_cuts,
    describe_partition,
    describe_verification,
    partition_table,
    store_table,
    sweep_chart,
    sweep_points,
    sweep_table,
    verification_table,
)
from packhorse.sil import Progress as PartProgress
from packhorse.sil import SegmentedTrainer
from packhorse.sil.source import check_classes, count_classes, to_classes
from packhorse.store import DiskStore
from packhorse.trainer import Trainer
from packhorse.units import format_bytes, parse_bytes
from packhorse.verify import verify as verify_model

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


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {  # where there is one, as a single kernel
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": partial(torch.optim.Adagrad, fused=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
}

Model = Annotated[
    str, typer.Option(help="A built-in name, file.py:function, or a directory with a Hugging Face config.json.")
]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a batch.")]
Optimizer = Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")]
Rate = Annotated[float, typer.Option("--lr", help="Learning rate.")]
PrecisionName = Annotated[str, typer.Option(help="fp32, bf16 or fp16; masters stay fp32.")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="Into how many a batch is split. Default: planned.")]
Memory = Annotated[
    str | None, typer.Option(help="Budget, such as 2GiB: of the whole process where there is no accelerator.")
]
Store = Annotated[Path | None, typer.Option(help="Directory of the store on disk. Default: RAM.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="A plan's JSON; what it pins is respected, the rest is planned anew.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def train(
    model: Model,
    data: Annotated[
        str | None,
        typer.Option(help="Text, read as bytes (a file, a directory, or 'python'), or a safetensors file of columns."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="The step at which to stop.")] = 10,
    rows: Rows = 8,
    memory: Memory = None,
    store: Store = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the store, if it holds one.")] = False,
    precision: PrecisionName = "fp32",
    microbatches: Microbatches = None,
    strategy: Annotated[str, typer.Option(help="auto, resident or relay.")] = "auto",
    optimizer: Optimizer = "adamw",
    rate: Rate = 3e-4,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    durability: Annotated[str, typer.Option(help="What a commit survives: none, process or power.")] = "process",
    versions: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="Of the model on disk: 2, or 1 and a spare. Default: 2 if there is room."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="First weights: a safetensors file or directory.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model's first values, the data and dropout.")] = 0,
    plan: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Train a model in the memory there is. A model larger than that needs --store."""
    torch.manual_seed(seed)
    task = load_task(model, rows=rows)
    batches = open_data(data, task, rows, seed)
    trainer = Trainer(
        task.model,
        _optimizer_maker(optimizer)(task.model.parameters(), lr=rate),
        task.example,
        loss=task.loss,
        strategy=strategy,  # type: ignore[arg-type]  # the trainer checks these
        microbatches=microbatches,
        precision=precision,  # type: ignore[arg-type]  # likewise
        memory=memory,
        store=store if store is None else DiskStore(store, durability=durability, versions=versions),  # type: ignore[arg-type]  # likewise
        resume=resume,
        clip_norm=clip_norm,
        weights=weights,
        data=batches,
        seed=seed,
        plan=plan,
    )
    console = Console(quiet=as_json)
    console.print(Text(str(trainer.plan)))
    console.print(
        f"training state: {format_bytes(trainer.plan.state_bytes)} in {store or 'RAM'}; starting at step {trainer.steps}"
    )
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with trainer, Progress(*columns, console=console, disable=as_json) as progress:
        bar = progress.add_task("", total=steps, completed=trainer.steps)
        is_compared = False
        for batch in batches:
            if trainer.steps >= steps:
                break
            started = time.perf_counter()
            loss = trainer.step(batch)
            seconds = time.perf_counter() - started
            peak = peak_resident_bytes()
            if as_json:
                typer.echo(json.dumps({"step": trainer.steps, "loss": loss, "seconds": seconds, "peak_bytes": peak}))
            text = f"loss {loss:.4f}  {seconds:.2f} s/step  peak {format_bytes(peak)}"
            progress.update(bar, completed=trainer.steps, description=text)
            if not console.is_terminal or trainer.steps in (1, steps) or trainer.steps % max(steps // 10, 1) == 0:
                progress.console.print(f"step {trainer.steps}: {text}")
            if not is_compared:
                progress.console.print(f"planned and measured: {trainer.compare()}")
                is_compared = True


@app.command()
def sil(
    model: Model,
    parts: Annotated[int | None, typer.Option(min=1, help="Into how many parts of about equal memory.")] = None,
    cut: Annotated[list[str] | None, typer.Option(help="Or cut after this module. May be repeated.")] = None,
    data: Annotated[str | None, typer.Option(help="A safetensors file with x and y. Default: made-up classes.")] = None,
    test: Annotated[str | None, typer.Option(help="Another one, to measure accuracy on. Default: the same.")] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="How many there are. Default: as the data has.")] = None,
    labels: Annotated[str, typer.Option(help="At the cuts: readout, hadamard or uniform.")] = "readout",
    mode: Annotated[
        str, typer.Option(help="sequential, or parallel: all parts at once, a process each.")
    ] = "sequential",
    epochs: Annotated[int, typer.Option(min=1, help="Of each part.")] = 1,
    refine: Annotated[int, typer.Option(min=0, help="Epochs on real inputs after parallel ones.")] = 1,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviations by which stored inputs are shaken.")] = 0.3,
    recover: Annotated[int, typer.Option(min=0, help="Epochs of ordinary training of the joined model.")] = 0,
    rows: Rows = 256,
    memory: Memory = None,
    store: Store = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the store, if it holds one.")] = False,
    strategy: Annotated[str, typer.Option(help="Of each part: auto, resident or relay.")] = "auto",
    optimizer: Optimizer = "adamw",
    rate: Rate = 1e-3,
    save: Annotated[Path | None, typer.Option(help="Where the joined model goes, as safetensors.")] = None,
    seed: Annotated[int, typer.Option(help="Of first values, data and labels.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a classifier in parts that know nothing of each other, on synthetic labels where it is cut."""
    torch.manual_seed(seed)
    task = load_task(model, rows=rows, device="cpu" if store is None else "meta")
    count = classes or 10
    loader = open_labelled(data, task, rows, count, seed)
    if classes is None and data is not None:
        count = count_classes(to_classes(loader.y))
    tested = _open_test(test, task, rows, count) if test else open_labelled(data, task, rows, count, None)
    console = Console(quiet=as_json)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=as_json) as progress:
        bars: dict[tuple[int, str], Any] = {}

        def tell(p: PartProgress) -> None:
            key = p.part, p.phase
            if key not in bars:
                bars[key] = progress.add_task("", total=p.steps)
            name = {"fit": f"part {p.part}", "refine": f"part {p.part}, refined", "recover": "recovery"}[p.phase]
            description = f"{name}  epoch {p.epoch + 1}/{p.epochs}  loss {p.loss:.4f}"
            progress.update(bars[key], completed=p.step, description=description)

        with SegmentedTrainer(
            task.model,
            _optimizer_maker(optimizer)(task.model.parameters(), lr=rate),
            next(iter(loader)),
            num_classes=count,
            parts=parts if parts is not None or cut else 2,
            cuts=cut or (),
            labels=labels,
            mode=mode,  # type: ignore[arg-type]  # it checks these
            strategy=strategy,  # type: ignore[arg-type]  # likewise
            refine=refine,
            noise=noise,
            memory=memory,
            store=store,
            resume=resume,
            seed=seed,
            progress=tell,
        ) as trainer:
            trainer.fit(loader, epochs)
            accuracies: dict[str, float] = {}
            if not trainer.is_recovered:  # else parts are no longer what they were trained to by themselves
                accuracies["accuracy"] = trainer.evaluate(tested)
            described, report = trainer.describe(), trainer.report()
            if recover:
                trainer.recover(loader, recover)
            if trainer.is_recovered:
                accuracies["recovered"] = trainer.evaluate(tested)
            described |= accuracies
            if save is not None:
                trainer.save(save)
    if as_json:
        typer.echo(json.dumps(described, indent=2))
        return
    console.print(Text(report))
    console.print(", ".join(f"{name} {accuracy:.2%}" for name, accuracy in accuracies.items()))


def _open_test(test: str, task: Task, rows: int, num_classes: int) -> Labelled:
    """Its classes are checked before anything is trained."""
    found = open_labelled(test, task, rows, num_classes, None, "--test")
    try:
        check_classes(to_classes(found.y), num_classes)
    except BatchError as error:
        raise BatchError(f"--test {test}: {error}") from error
    return found


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `inspect`.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    memory: Memory = None,
    machine: Annotated[
        str, typer.Option(help="'here', a machine that comes with packhorse (such as v100-16gb), or a TOML file.")
    ] = "here",
    on_disk: Annotated[
        bool | None,
        typer.Option("--disk/--ram", help="Where the model lives. Default: in RAM if it fits, else on disk."),
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: the faster of fp32 and bf16.")] = "fp32",
    microbatches: Microbatches = None,
    strategy: Annotated[str, typer.Option(help="auto, resident or relay.")] = "auto",
    optimizer: Optimizer = "adamw",
    layers: Annotated[int | None, typer.Option(min=1, help="Of a built-in transformer.")] = None,
    ranks: Annotated[
        str,
        typer.Option(help="So many such machines, as torchrun would start them, or replicas x stages, such as 4x2."),
    ] = "1",
    network: Annotated[str | None, typer.Option(help="How fast they talk to each other, such as 1Gbit.")] = None,
    pin: PlanFile = None,
    sweep: Annotated[str | None, typer.Option(help="depth, batch, memory or ranks: a table of plans.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the sweep's picture goes, as SVG.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine anew.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say beforehand whether and how a model fits, how long a step takes, and why. Nothing is trained."""
    where = Machine.probe(fresh=True) if measure and machine == "here" else find_machine(machine)
    options: dict[str, Any] = {
        "memory": memory,
        "strategy": strategy,
        "microbatches": microbatches,
        "on_disk": on_disk,
        "optimizer": _optimizer_maker(optimizer),
        "plan": pin,
        "ranks": parse_ranks(ranks),
        "network": network,
    }

    def make(rows: int, layers: int | None, **changes: Any) -> Plan:
        task = load_task(model, rows=rows, layers=layers)
        plans: list[Plan] = []
        refusal: BudgetError | None = None
        for name in ("fp32", "bf16") if precision == "auto" else (precision,):
            graph = capture(task.model, task.example, task.loss, precision=name)  # type: ignore[arg-type]  # it checks
            try:
                plans.append(make_plan(graph, where, **{**options, **changes}))
            except BudgetError as error:
                refusal = error
        if not plans:
            assert refusal is not None
            raise refusal
        return min(plans, key=lambda p: p.estimate.seconds)

    if sweep is None:
        found = make(batch, layers)
        typer.echo(found.to_json() if as_json else str(found))
        return
    if sweep == "batch" and ".py:" in model:
        raise PackhorseError("--sweep batch needs a model whose example packhorse makes; a function makes its own")
    rows: list[SweepRow] = []
    for point in sweep_points(sweep, memory, where):
        changed = {{"depth": "layers", "batch": "rows"}.get(sweep, sweep): point}
        try:
            rows.append((point, make(**{"rows": batch, "layers": layers, **changed}), ""))  # type: ignore[arg-type]
        except BudgetError as error:
            rows.append((point, None, str(error)))
    if as_json:
        described = [
            {sweep: p, "refused": why} if made is None else {sweep: p, **json.loads(made.to_json())}
            for p, made, why in rows
        ]
        typer.echo(json.dumps(described, indent=2))
    else:
        Console().print(sweep_table(sweep, model, where, rows))
    if picture is not None:
        picture.write_text(sweep_chart(sweep, model, where, rows))
        typer.echo(f"picture: {picture}", err=as_json)


def _optimizer_maker(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name not in OPTIMIZERS:
        raise PackhorseError(f"--optimizer is {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


stores = typer.Typer(no_args_is_help=True, help="Look at a store on disk, check it, export it, reclaim its space.")
app.add_typer(stores, name="store")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a store.")]


@stores.command("ls")
def list_store(directory: Directory, as_json: AsJson = False) -> None:
    """Show what a store holds, also while a run uses it."""
    described = describe_store(directory)
    typer.echo(json.dumps(described, indent=2)) if as_json else Console().print(store_table(directory, described))


@stores.command("check")
def check(directory: Directory, as_json: AsJson = False) -> None:
    """Read all that is committed and verify every checksum. Exit code 1 if anything is damaged, 2 if it cannot be opened."""
    count, problems, compared = check_store(directory)
    if as_json:
        typer.echo(json.dumps({"bytes": count, "problems": problems, "compared": compared}, indent=2))
    else:
        for problem in problems:
            typer.echo(problem)
        typer.echo(
            f"{format_bytes(count)} read, {len(problems)} damaged parts"
            if problems
            else f"{format_bytes(count)} read: {'whole' if compared else 'not compared, it has no checksums'}"
        )
    raise typer.Exit(1 if problems else 0)


@stores.command("export")
def export(
    directory: Directory, target: Annotated[Path, typer.Argument(metavar="TARGET", help="Where the checkpoint goes.")]
) -> None:
    """Write the stored model as safetensors, with its config if it has one."""
    for path in export_store(directory, target):
        typer.echo(f"{path}  {format_bytes(path.stat().st_size)}")


@stores.command("gc")
def collect_garbage(directory: Directory) -> None:
    """Give back the disk space that the last commit does not need. The run can still be resumed."""
    typer.echo(f"{format_bytes(reclaim(directory))} given back")


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `inspect`.")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 3,
    rows: Rows = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Into how many a batch is split.")] = 2,
    store: Store = None,
    precision: PrecisionName = "fp32",
    optimizer: Optimizer = "adamw",
    rate: Rate = 3e-4,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model's first values and dropout.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a model streamed and plainly, and compare them value by value. Exit code 1 if they differ."""
    torch.manual_seed(seed)
    task = load_task(model, rows=rows, device="cpu")
    verification = verify_model(
        task.model,
        _optimizer_maker(optimizer)(task.model.parameters(), lr=rate),
        task.example,
        task.loss,
        steps=steps,
        microbatches=microbatches,
        store=store,
        precision=precision,
        clip_norm=clip_norm,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps(describe_verification(verification), indent=2))
    else:
        Console().print(verification_table(task.name, verification))
    raise typer.Exit(0 if verification.ok else 1)


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

"""Planned beside measured: memory, time, the order of alternatives, and whether `auto` finds the best of them.

    python benchmarks/plan.py cases     # peak memory and seconds of a step, over models, strategies, stores and precisions
    python benchmarks/plan.py auto      # `auto` beside every strategy and number of microbatches that fits
    python benchmarks/plan.py search    # how long the search takes for 48 and 384 layers
    python benchmarks/plan.py elsewhere # plans for machines one does not have

Every case is a process of its own; the machine is measured anew before each. Alternatives of `auto` run in turns (turns.py).
`cases` and `elsewhere` also write their tables into docs/plan.md. Options: --only NAMES, --directory for stores, --steps.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from results_file import load, save
from turns import run_in_turns


@dataclass(frozen=True)
class Case:
    model: str
    rows: int
    choices: dict[str, Any]
    on_disk: bool = False
    precision: str = "fp32"
    optimizer: str = "AdamW"
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        chosen = " ".join(f"{k}={v}" for k, v in self.choices.items())
        return f"{self.model} {self.rows} rows {self.precision} {'disk' if self.on_disk else 'RAM'} {chosen}"


def relay(microbatches: int, **more: Any) -> dict[str, Any]:
    return {"strategy": "relay", "microbatches": microbatches, **more}


def resident(microbatches: int) -> dict[str, Any]:
    return {"strategy": "resident", "microbatches": microbatches}


DOUBT = 0.2  # the error that is let pass
DUELS, DUEL = 3, 5  # times that `auto` and the best of the others start anew, and steps of each, in turns

CASES = [
    Case("gpt-124m", 4, resident(4)),
    Case("gpt-124m", 4, relay(4)),
    Case("gpt-124m", 4, relay(2, memory="4GiB")),
    Case("gpt-124m", 4, relay(4), on_disk=True),
    Case("bert-110m", 8, resident(4)),
    Case("bert-110m", 8, relay(2)),
    Case("bert-110m", 8, relay(4), on_disk=True),
    Case("resnet50", 16, resident(4)),
    Case("resnet50", 16, relay(4)),
    Case("resnet50", 16, relay(2), on_disk=True),
    Case("unet", 4, resident(4)),
    Case("unet", 4, relay(2)),
    Case("unet", 4, relay(4), on_disk=True),
    Case("mlp-270m", 256, resident(1)),
    Case("mlp-270m", 256, relay(4)),
    Case("mlp-270m", 256, relay(1), on_disk=True),
    Case("gpt-124m", 4, relay(4), precision="bf16"),
    Case("gpt-124m", 4, relay(2), on_disk=True, precision="bf16"),
    Case("mlp-270m", 256, resident(2), precision="bf16"),
    Case("mlp-1b", 512, relay(2), on_disk=True),
    Case("gpt2-xl", 4, relay(4, memory="2GiB"), on_disk=True, precision="bf16"),
]


def make_task(case: Case) -> tuple[Any, Any, Any]:
    import torch

    from packhorse.models import GPT, MLP, Bert, BertConfig, GPTConfig, ResNet50, UNet
    from packhorse.models.zoo import classify, predict_tokens

    rows = case.rows
    with torch.device("meta"):
        if case.model.startswith("gpt"):
            sizes = {
                "gpt-124m": (12, 12, 768, 256, 50257),
                "gpt-30m": (8, 8, 512, 128, 8192),
                "gpt2-xl": (48, 25, 1600, 512, 50257),
            }
            config: Any = GPTConfig(*sizes[case.model])
            model: Any = GPT(config)
        elif case.model.startswith("bert"):
            sizes = {"bert-110m": (12, 12, 768, 128, 30522), "bert-30m": (8, 8, 512, 128, 8192)}
            config = BertConfig(*sizes[case.model])
            model = Bert(config)
        elif case.model.startswith("mlp"):
            width = {"mlp-67m": 2048, "mlp-270m": 4096, "mlp-1b": 8192}[case.model]
            model = MLP([width] * 16 + [1000])
        else:
            model = {"resnet50": ResNet50, "unet": UNet}[case.model]()
    torch.manual_seed(0)
    if case.model.startswith(("gpt", "bert")):
        tokens = torch.randint(config.vocabulary, (rows, config.context + 1))
        return model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, predict_tokens
    if case.model.startswith("mlp"):
        return model, (torch.randn(rows, width), torch.randint(1000, (rows,))), classify
    size = 224 if case.model == "resnet50" else 128
    images = torch.randn(rows, 3, size, size)
    if case.model == "unet":
        return model, (images, torch.randint(2, (rows, size, size))), classify
    return model, (images, torch.randint(1000, (rows,))), classify


class Run:
    """A case as it runs: the plan is made, then steps are taken."""

    def __init__(self, case: Case, directory: str):
        import torch

        import packhorse as ph

        model, self.batch, loss = make_task(case)
        optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-4)
        self.parameters = sum(p.numel() for p in model.parameters())
        started = time.perf_counter()
        self.trainer = ph.Trainer(
            model,
            optimizer,
            self.batch,
            loss=loss,
            precision=case.precision,  # type: ignore[arg-type]  # the trainer checks it
            store=Path(directory) / "store" if case.on_disk else None,
            **case.choices,
        )
        self.made = time.perf_counter() - started

    def __call__(self) -> float:
        return self.trainer.step(self.batch)

    @property
    def facts(self) -> dict[str, Any]:
        plan = self.trainer.plan
        planned = plan.estimate
        return {
            "parameters": self.parameters,
            "planned_mb": round(planned.peak["host"] / 1e6),
            "planned_seconds": round(planned.seconds, 3),
            "microbatches": plan.microbatches,
            "graphs_kept": len(plan.kept),
            "strategy": plan.strategy,
            "planned_kinds_mb": {k: round(n / 1e6) for k, n in planned.kinds["host"].items()},
            "measured_kinds_mb": {k: round(n / 1e6) for k, n in self.trainer._ledger.at_peak["host"].items()},
            "planned_busy": {k: round(n, 3) for k, n in planned.busy.items()},
            "seconds_to_make": round(self.made, 2),
        }


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The machine's speed changes by a third within minutes, between plan and step too.

    So a case whose time is off by more than `DOUBT` is run twice more, and the one in the middle counts.
    """
    runs = [run_once(case, options)]
    if abs(runs[0]["time_error"]) > DOUBT:
        runs += [run_once(case, options) for _ in range(2)]
    runs.sort(key=lambda found: found["time_error"])
    middle = runs[len(runs) // 2]
    return {**middle, "time_errors": [found["time_error"] for found in runs]}


def run_once(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    import packhorse as ph

    ph.Machine.probe(options.directory, fresh=True)  # a shared machine is not always equally fast
    directory = tempfile.mkdtemp(dir=options.directory)
    steps = 1 if case.model in ("gpt2-xl", "mlp-1b") else options.steps
    (found,) = run_in_turns({case.name: partial(Run, case, directory)}, steps).values()
    shutil.rmtree(directory)
    found["memory_error"] = round(found["planned_mb"] / found["peak_rss_mb"] - 1, 4)
    found["time_error"] = round(found["planned_seconds"] / found["median_seconds"] - 1, 4)
    print(
        f"{case.name}: memory {found['planned_mb']} planned, {found['peak_rss_mb']} MB ({found['memory_error']:+.1%}); time "
        f"{found['planned_seconds']} planned, {found['median_seconds']} s ({found['time_error']:+.1%})",
        flush=True,
    )
    return found


def compare_order(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Pairs of alternatives for one model and batch whose times differ by more than 15 %: is the planned order theirs?"""
    right, wrong = 0, []
    for (a, x), (b, y) in itertools.combinations(found.items(), 2):
        if a.split()[:3] != b.split()[:3] or "failed" in x or "failed" in y:
            continue
        longer, shorter = (
            max(x["median_seconds"], y["median_seconds"]),
            min(x["median_seconds"], y["median_seconds"]),
        )
        if longer <= 1.15 * shorter:
            continue
        same = (x["planned_seconds"] < y["planned_seconds"]) == (x["median_seconds"] < y["median_seconds"])
        right += same
        wrong += [] if same else [[a, b]]
    return {"pairs": right + len(wrong), "right": right, "wrong": wrong}


def measure_auto(options: argparse.Namespace) -> dict[str, Any]:
    """Each case as `auto` plans it, and every strategy with every number of microbatches, as far as they fit, in turns.

    Then `auto` and the best of the others once more, step by step, by which it is judged: a process may be some per cent slower
    than another that does the same, for all of its life, so that is done a few times.
    """
    import packhorse as ph

    cases: list[tuple[str, int, bool, str]] = [
        ("gpt-30m", 8, False, "1500MiB"),
        ("gpt-30m", 8, True, "900MiB"),
        ("bert-30m", 8, False, "1500MiB"),
        ("resnet50", 8, False, "1300MiB"),
        ("unet", 4, False, "1300MiB"),
        ("mlp-67m", 256, False, "2GiB"),
    ]
    results = load(options.name or "plan_auto") if options.further else {}
    for model, rows, on_disk, memory in cases:
        place = f"{model} {rows} rows {'disk' if on_disk else 'RAM'} {memory}"
        if place in results or (options.only and not any(word in model for word in options.only)):
            continue
        ph.Machine.probe(options.directory, fresh=True)
        directory = Path(tempfile.mkdtemp(dir=options.directory))
        ways: dict[str, dict[str, Any]] = {"auto": {"strategy": "auto"}}
        for strategy in ("relay",) if on_disk else ("resident", "relay"):
            for count in [1 << i for i in range(4) if 1 << i <= rows]:
                ways[f"{strategy} {count}"] = {"strategy": strategy, "microbatches": count}
        makers = {
            name: partial(Run, Case(model, rows, way | {"memory": memory}, on_disk)) for name, way in ways.items()
        }

        def contest(names: Iterable[str], steps: int, place: Path, makers: Any = makers) -> dict[str, dict[str, Any]]:
            return run_in_turns({name: partial(makers[name], str(place / name)) for name in names}, steps)

        found = contest(makers, options.steps, directory / "all")
        medians = {name: tried["median_seconds"] for name, tried in found.items() if "seconds" in tried}
        best = min((name for name in medians if name != "auto"), key=lambda name: medians[name])
        duels = [contest(("auto", best), DUEL, directory / f"duel{i}") for i in range(DUELS)]  # the best was also lucky
        shutil.rmtree(directory)
        chosen = found["auto"]
        ratios = [duel["auto"]["median_seconds"] / duel[best]["median_seconds"] for duel in duels]
        results[place] = {
            "auto": f"{chosen['strategy']} {chosen['microbatches']}, {chosen['graphs_kept']} graphs kept",
            "best of the others": f"{best}, {found[best]['graphs_kept']} graphs kept",
            "auto / best": round(statistics.median(ratios), 3),
            "of each duel": [round(ratio, 3) for ratio in ratios],
            "seconds of auto and best": [[duel[name]["seconds"] for name in ("auto", best)] for duel in duels],
            "planned": {name: found[name]["planned_seconds"] for name in medians},
            "seconds": {name: found[name]["seconds"] for name in medians},
            "peak_rss_mb": {name: found[name]["peak_rss_mb"] for name in medians},
            "do not fit": [name for name in found if name not in medians],
        }
        print(place, results[place], flush=True)
        save(options.name or "plan_auto", results)
    return results


def plan_elsewhere() -> dict[str, Any]:
    """What `packhorse plan` says of the papers' machine, by its own command line."""
    commands = {
        "BERT-Large, 512 tokens a row, fp16, AdamW, over the batch": (
            "bert-large --machine v100-16gb --precision fp16 --sweep batch"
        ),
        "The same, layer to layer": ("bert-large --machine v100-16gb --precision fp16 --strategy relay --sweep batch"),
        "GPT of width 1024, 1024 tokens a row, fp16, AdamW, 16 rows, over the depth": (
            "gpt2-medium --machine v100-16gb --precision fp16 --batch 16 --sweep depth"
        ),
        "50 B parameters, fp16, 16 rows, AdamW": "gpt-50b --machine v100-16gb --precision fp16 --batch 16 --ram",
        "50 B parameters, fp16, 16 rows, AdamW on disk": "gpt-50b --machine v100-16gb --precision fp16 --batch 16 --disk",
        "50 B parameters, fp16, 16 rows, SGD with momentum": (
            "gpt-50b --machine v100-16gb --precision fp16 --batch 16 --ram --optimizer sgd"
        ),
        "50 B parameters, fp16, 16 rows, Adafactor": (
            "gpt-50b --machine v100-16gb --precision fp16 --batch 16 --ram --optimizer adafactor"
        ),
    }
    results: dict[str, Any] = {}
    for title, arguments in commands.items():
        command = [sys.executable, "-m", "packhorse", "plan", *arguments.split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        plans = json.loads(done.stdout) if done.returncode == 0 else {"refused": done.stderr.strip()}
        results[title] = {
            "command": f"packhorse plan {arguments}",
            "plans": plans if isinstance(plans, list) else [plans],
        }
        print(title, done.returncode, done.stderr[-300:], flush=True)
    return results


def describe_elsewhere(results: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for title, found in results.items():
        lines += [f"**{title}** (`{found['command']}`)", ""]
        sweep = next((k for k in ("batch", "depth") if k in found["plans"][0]), "")
        columns = (
            "how",
            "device",
            "host",
            "disk",
            "a step",
            "rows/s",
            "waits most for",
            "plain: device",
            "plain: rows/s",
        )
        lines.append(f"| {sweep or 'rows'} | {' | '.join(columns)} |")
        lines.append("|" + "---|" * 10)
        for plan in found["plans"]:
            point = plan.get(sweep) or plan.get("batch_rows", "")
            if "refused" in plan:
                lines.append(f"| {point} | refused: {plan['refused']} |" + " |" * 8)
                continue
            taken, plain = plan["estimate"], plan["plain"]
            peak = taken["peak"]
            kept = f", {len(plan['kept'])} graphs kept" if plan["kept"] else ""
            cells = [
                point,
                f"{plan['strategy']}, {plan['microbatches']} microbatches{kept}",
                *(f"{peak[tier] / 1e9:.1f} GB" if tier in peak else "" for tier in ("device", "host", "disk")),
                f"{taken['seconds']:.2f} s",
                f"{plan['batch_rows'] / taken['seconds']:.2f}",
                taken["bottleneck"],
                f"{plain['peak']['device'] / 1e9:.1f} GB",
                f"{plan['batch_rows'] / plain['seconds']:.2f}" if plan["plain_fits"] else "does not fit",
            ]
            lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
        lines.append("")
    return lines


def describe_cases(results: dict[str, Any]) -> list[str]:
    lines = [
        "| case | memory planned | measured | off | step planned | measured | off |",
        "|" + "---|" * 7,
    ]
    for name, found in results.items():
        if "failed" in found or name == "order":
            continue
        lines.append(
            f"| {name} | {found['planned_mb']} MB | {found['peak_rss_mb']} MB | {found['memory_error']:+.1%} | "
            f"{found['planned_seconds']:.2f} s | {found['median_seconds']:.2f} s | {found['time_error']:+.0%} |"
        )
    order = results["order"]
    return [
        *lines,
        "",
        f"Order of alternatives whose times differ by more than 15 %: {order['right']} of {order['pairs']} pairs right.",
    ]


def publish(mark: str, lines: list[str]) -> None:
    """Puts a table between its marks in docs/plan.md."""
    page = Path(__file__).parent.parent / "docs" / "plan.md"
    before, rest = page.read_text().split(f"<!-- {mark} -->")
    after = rest.split(f"<!-- end of {mark} -->")[1]
    page.write_text("\n".join([f"{before}<!-- {mark} -->", "", *lines, "", f"<!-- end of {mark} -->{after}"]))


def measure_search() -> dict[str, Any]:
    import packhorse as ph
    from packhorse.models import load_task

    results = {}
    for layers in (48, 384):
        for machine in ("laptop", "v100-16gb"):
            task = load_task("gpt2", rows=64, layers=layers)
            graph = ph.capture(task.model, task.example, task.loss)
            started = time.perf_counter()
            try:
                text = str(ph.make_plan(graph, machine, memory="12GB"))
            except ph.BudgetError as error:
                text = str(error)
            results[f"{layers} layers, {machine}"] = {"seconds": round(time.perf_counter() - started, 2), "plan": text}
            print(layers, machine, results[f"{layers} layers, {machine}"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["cases", "auto", "search", "elsewhere"])
    parser.add_argument("--only", nargs="*", help="words of names")
    parser.add_argument("--directory", help="where stores go")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--further", action="store_true", help="cases that the result file does not have yet")
    options = parser.parse_args()
    name = options.name or f"plan_{options.question}"
    if options.question == "search":
        results: dict[str, Any] = measure_search()
    elif options.question == "elsewhere":
        results = plan_elsewhere()
        publish("elsewhere", describe_elsewhere(results))
    else:
        if options.question == "auto":
            results = measure_auto(options)
        else:
            results = load(name) if options.further else {}
            results.pop("order", None)
            for case in CASES:
                if case.name not in results and (not options.only or any(word in case.name for word in options.only)):
                    results[case.name] = run(case, options)
                    save(name, results)  # hours of measuring are not lost
            results["order"] = compare_order(results)
            print(results["order"])
            if not options.only:
                publish("cases", describe_cases(results))
    save(name, results)


if __name__ == "__main__":
    main()

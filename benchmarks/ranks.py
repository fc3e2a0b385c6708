"""Several ranks on slow links, one core each: what hides behind compute, beside the serial order and beside torch's own.

    python benchmarks/ranks.py data       # two replicas of AlexNet, VGG16, ResNet50; links where messages are a share of a step

Ranks run in network namespaces of their own (shaped.py; as root). All contenders live in the same processes and take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results_file import load, save

SHARES = (0.1, 0.2, 0.3, 0.5)


def make_image_task(name: str) -> tuple[Callable[[], Any], Any, Any]:
    """(a model, a batch of both ranks, a loss): small enough for one core, large enough that gradients are megabytes."""
    import torch

    from packhorse import models
    from packhorse.models.zoo import classify

    make = {
        "alexnet": lambda: models.AlexNet(100, width=0.35),
        "vgg16": lambda: models.VGG16(100, width=0.25),
        "resnet50": lambda: models.ResNet50(100, width=0.5),
    }[name]
    size, rows = {"alexnet": (224, 32), "vgg16": (64, 16), "resnet50": (96, 8)}[name]

    def build() -> Any:
        torch.manual_seed(0)
        return make()

    torch.manual_seed(1)
    return build, (torch.randn(rows, 3, size, size), torch.randint(100, (rows,))), classify


def make_contender(kind: str, build: Any, batch: Any, loss: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    import packhorse as ph

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if kind.startswith("packhorse"):
        trainer = ph.Trainer(
            model,
            optimizer,
            batch,
            loss=loss,
            strategy="resident",
            microbatches=2,
            overlap="serial" not in kind,
            ranks=ph.Ranks(data=2),
        )
        return lambda: trainer.step(batch)
    rank = dist.get_rank()
    own = tuple(part.chunk(2)[rank] for part in batch)
    replica: Any = model
    if kind != "alone":
        options = {"bucket_cap_mb": float(kind.split()[1])} if len(kind.split()) > 1 else {}
        replica = torch.nn.parallel.DistributedDataParallel(model, **options)

    def step() -> None:
        optimizer.zero_grad()
        loss(replica(own[0]), own).backward()
        optimizer.step()

    return step


def work(options: argparse.Namespace) -> None:
    """One rank: contenders in turns; what it measured goes to a file."""
    import torch

    torch.set_num_threads(1)
    import torch.distributed as dist

    from packhorse.ranks.world import find_world

    find_world()
    build, batch, loss = make_image_task(options.model)
    steps = {kind: make_contender(kind, build, batch, loss) for kind in options.contenders}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(options.repeats):
        for kind, step in steps.items():
            step()  # what the one before left under way is not this one's
            dist.barrier()
            started = time.perf_counter()
            for _ in range(options.steps):
                step()
            dist.barrier()
            seconds[kind].append((time.perf_counter() - started) / options.steps)
    model = build()
    nbytes = sum(p.nbytes for p in model.parameters())
    Path(options.output).write_text(json.dumps({"seconds": seconds, "bytes": nbytes}))
    os._exit(0)


def run(model: str, contenders: list[str], mbit: float, options: argparse.Namespace) -> dict[str, Any]:
    from shaped import shaped

    with tempfile.TemporaryDirectory() as directory, shaped(2, mbit) as places:
        children = []
        for rank, place in enumerate(places):
            output = Path(directory) / str(rank)
            command = [sys.executable, __file__, "work", "--model", model, "--output", str(output)]
            command += ["--repeats", str(options.repeats), "--steps", str(options.steps), "--contenders", *contenders]
            environment = place.environment(rank, 2, places[0].address)
            children.append(subprocess.Popen(["taskset", "-c", str(rank), *place.command(command)], env=environment))
        for child in children:
            if child.wait() != 0:
                raise SystemExit("a rank failed")
        return json.loads((Path(directory) / "0").read_text())


def measure_data(options: argparse.Namespace) -> dict[str, Any]:
    name = options.name or "ranks_data"
    results = load(name) if options.further else {}
    contenders = ["packhorse", "packhorse serial", "ddp", "ddp 1", "ddp 4", "alone"]
    for model in options.models:
        free = run(model, ["alone"], 10_000, options)
        compute = statistics.median(free["seconds"]["alone"])
        for share in options.shares:
            title = f"{model}, communication {share:.0%}"
            if title in results:
                continue
            mbit = 8e-6 * free["bytes"] / (compute * share / (1 - share))  # a ring of two sends as much as there is
            found = run(model, contenders, mbit, options)
            medians = {kind: statistics.median(seconds) for kind, seconds in found["seconds"].items()}
            serial = medians["packhorse serial"]
            results[title] = {
                "mbit": round(mbit, 1),
                "gradient bytes": found["bytes"],
                "median seconds": {kind: round(value, 4) for kind, value in medians.items()},
                "over serial": {kind: round(serial / value, 3) for kind, value in medians.items()},
                "seconds": found["seconds"],
            }
            print(title, results[title]["median seconds"], results[title]["over serial"], flush=True)
            save(name, results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["data", "work"])
    parser.add_argument("--models", nargs="*", default=["alexnet", "vgg16", "resnet50"])
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed together")
    parser.add_argument("--further", action="store_true", help="what the result file does not have yet")
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.question == "work":
        work(options)
    else:
        save(options.name or "ranks_data", measure_data(options))


if __name__ == "__main__":
    main()

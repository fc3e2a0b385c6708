"""Several ranks, one core each, on slow links: what hides behind compute, beside the serial order and torch's own.

    python benchmarks/ranks.py data       # two replicas of AlexNet, VGG16, ResNet50, beside DistributedDataParallel
    python benchmarks/ranks.py pipeline   # GPTs as deep as GPT-2's, as a pipeline, and as replicas of one
    python benchmarks/ranks.py standard   # the same stages by torch.distributed.pipelining, messages of 0, 35 and 70 ms
    python benchmarks/ranks.py cuts       # automatic cuts beside an equal number of layers and 20 random ones
    python benchmarks/ranks.py shards     # bytes of state of each of four ranks
    python benchmarks/ranks.py kills      # 20 kills of random ranks at random moments

Ranks run in network namespaces of their own (shaped.py; as root). Contenders have processes of their own and take turns.
Every trainer also tells how long it had planned a step to take.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results_file import load, save
from shaped import Place, shaped

SHARES = (0.1, 0.2, 0.3, 0.5)
FREE = 10_000  # Mbit/s: no limit
TIMED = 1.5  # seconds of steps that are timed together: short turns, since the machine's speed changes
FINALISTS, STARTS = 3, 3  # of the cuts that are tried, and how often those start anew
PORT = 29517  # of the first contender
MARK = "told: "  # before what a rank tells
Job = dict[str, Any]

# -- tasks: small enough for one core


def make_images(name: str) -> tuple[Callable[[], Any], Any, Any]:
    """(a model, a batch of both ranks, a loss): half a second or more a step, so that slow links do for any share.

    Above 1 or 2 Gbit/s copying between sockets is work for the cores that compute.
    """
    import torch

    from packhorse import models
    from packhorse.models.zoo import classify

    make = {
        "alexnet": lambda: models.AlexNet(100, width=0.35),
        "vgg16": lambda: models.VGG16(100, width=0.2),
        "resnet50": lambda: models.ResNet50(100, width=0.5),
    }[name]
    size, rows = {"alexnet": (224, 256), "vgg16": (128, 48), "resnet50": (160, 64)}[name]
    torch.manual_seed(1)
    return make, (torch.randn(rows, 3, size, size), torch.randint(100, (rows,))), classify


def make_text(layers: int, width: int, rows: int, context: int = 64) -> tuple[Callable[[], Any], Any, Any]:
    import torch
    import torch.nn.functional as F

    config = {"layers": layers, "width": width, "context": context}
    torch.manual_seed(1)
    tokens = torch.randint(1000, (rows, context + 1))

    def loss(logits: Any, batch: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return lambda: make_stack(**config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), loss


def make_stack(layers: int, width: int, context: int) -> Any:
    """A GPT whose head is not tied, so that a pipeline of torch's can run it too."""
    from torch import nn

    from packhorse.models.gpt import Block, Embedding, GPTConfig

    config = GPTConfig(layers, 4, width, context, 1000)
    blocks = [Block(config) for _ in range(layers)]
    return nn.Sequential(Embedding(1000, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 1000, bias=False))


def make_task(job: Job) -> tuple[Callable[[], Any], Any, Any]:
    import torch

    make, batch, loss = make_images(job["model"]) if "model" in job else make_text(**job["text"])

    def build() -> Any:
        torch.manual_seed(0)
        return make()

    return build, batch, loss


# -- one rank


class Ours:
    """A trainer; `options` are those of the contender: what `ph.Ranks` takes, `serial`, `stage_cuts`."""

    def __init__(self, job: Job, options: dict[str, Any], build: Any, batch: Any, loss: Any):
        import torch

        import packhorse as ph
        from packhorse import arrange

        options = {**job.get("ranks", {}), **options}
        serial, cuts = options.pop("serial", False), options.pop("stage_cuts", None)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        whole = arrange.cut_into_stages
        if cuts is not None:
            arrange.cut_into_stages = lambda *_: tuple(cuts)
        ranks = ph.Ranks(**options)
        self.batch = batch
        self.trainer = ph.Trainer(
            model,
            optimizer,
            batch,
            loss=loss,
            strategy="resident" if ranks.pipeline == 1 else "pipeline",
            microbatches=job["microbatches"],
            overlap=not serial,
            ranks=ranks,
        )
        arrange.cut_into_stages = whole

    def __call__(self) -> None:
        self.trainer.step(self.batch)

    @property
    def facts(self) -> dict[str, Any]:
        plan = self.trainer.plan
        seconds: Counter[str] = Counter()
        for record in self.trainer.records:
            seconds[record.action.kind] += record.end - record.start
        return {
            "last step": {kind: round(taken, 4) for kind, taken in seconds.most_common(6)},
            "planned_seconds": round(plan.estimate.seconds, 4),
            "planned busy": {lane: round(seconds, 4) for lane, seconds in plan.estimate.busy.items()},
            "sent": plan.estimate.moved.get("network", 0),
            "order": plan.ranks.order,
            "ahead": plan.ranks.ahead,
        }


def make_alone(options: dict[str, Any], build: Any, batch: Any, loss: Any) -> Callable[[], None]:
    """A plain loop over this rank's half; with `ddp` gradients are averaged, in buckets of so many MB."""
    import torch
    import torch.distributed as dist

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    own = tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    replica: Any = model
    if options["ddp"] is not None:
        buckets = {"bucket_cap_mb": options["ddp"]} if options["ddp"] else {}
        replica = torch.nn.parallel.DistributedDataParallel(model, **buckets)

    def step() -> None:
        optimizer.zero_grad()
        loss(replica(own[0]), own).backward()
        optimizer.step()

    return step


def make_torch_pipeline(job: Job, build: Any, batch: Any, loss: Any) -> Callable[[], None]:
    """torch.distributed.pipelining, each rank an equal number of blocks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size, layers = dist.get_rank(), dist.get_world_size(), list(build())
    middle = 1 + job["text"]["layers"] // 2
    own = torch.nn.Sequential(*(layers[:middle] if rank == 0 else layers[middle:]))
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job["microbatches"], loss_fn=lambda y, target: loss(y, (None, target)))

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=[])
        optimizer.step()

    return step


def make_contender(job: Job, options: dict[str, Any], task: Any) -> Callable[[], Any]:
    options = dict(options)
    kind = options.pop("by")
    if kind == "packhorse":
        return Ours(job, options, *task)
    return make_torch_pipeline(job, *task) if kind == "torch" else make_alone(options, *task)


def work(job: Job) -> None:
    """One rank of one contender: takes as many steps as it is told, and tells the seconds of each; then its facts."""
    import torch

    torch.set_num_threads(1)

    from packhorse.ranks.world import find_world

    find_world()
    step = make_contender(job, job["contender"], make_task(job))
    tell("ready")
    for line in sys.stdin:
        step()  # from a standstill, which is not timed
        started = time.perf_counter()  # from the end of a step to that of another: a barrier would wait behind sums
        for _ in range(int(line)):
            step()
        tell((time.perf_counter() - started) / int(line))
    tell(step.facts if isinstance(step, Ours) else {})
    os._exit(0)


def tell(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


# -- all of them


class Contender:
    """The ranks of one contender, processes of their own: what others allocate is not theirs."""

    def __init__(self, job: Job, options: dict[str, Any], places: list[Place], port: int):
        command = [sys.executable, __file__, "work", "--job", json.dumps({**job, "contender": options})]
        self.children = []
        for rank, place in enumerate(places):  # each has one of the two cores, or a part of one
            environment = place.environment(rank, len(places), places[0].address, port)
            pinned = ["taskset", "-c", str(rank % 2), *place.command(command)]
            pipe = subprocess.PIPE
            self.children.append(subprocess.Popen(pinned, env=environment, stdin=pipe, stdout=pipe, text=True))
        self.hear()
        self.steps = max(3, round(TIMED / self.time(1)))
        self.signal(signal.SIGSTOP)

    def hear(self) -> list[Any]:
        """What every rank tells next."""
        found = []
        for child in self.children:
            assert child.stdout is not None
            line = next((line for line in child.stdout if line.startswith(MARK)), None)
            if line is None:
                raise SystemExit("a rank failed")
            found.append(json.loads(line.removeprefix(MARK)))
        return found

    def time(self, steps: int) -> float:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
        return float(max(self.hear()))

    def take_turn(self) -> float:
        """Seconds of a step. Between turns it stands still, or its threads would wake up a hundred times a second."""
        self.signal(signal.SIGCONT)
        seconds = self.time(self.steps)
        self.signal(signal.SIGSTOP)
        return seconds

    def signal(self, number: int) -> None:
        for child in self.children:
            child.send_signal(number)

    def end(self) -> list[dict[str, Any]]:
        self.signal(signal.SIGCONT)
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
        facts = self.hear()
        for child in self.children:
            child.wait()
        return facts


def run(job: Job, mbit: float, size: int = 2, starts: int = 1) -> dict[str, Any]:
    """All contenders, in turns, one called `unhindered` on free links. The most that a rank sends is what counts.

    They start anew as often as is said: a process may be some per cent slower than another that does the same.
    """
    job = dict(job)
    wanted = job.pop("contenders")
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(starts):
        with shaped(size, mbit) as slow, shaped(size, FREE, 1) as free:
            places = {name: free if name == "unhindered" else slow for name in wanted}
            contenders: dict[str, Contender] = {}
            try:
                for i, name in enumerate(wanted):
                    contenders[name] = Contender(job, wanted[name], places[name], PORT + i)
                for _ in range(job["repeats"]):
                    for name, contender in contenders.items():
                        seconds[name].append(round(contender.take_turn(), 5))
                told = {name: contender.end() for name, contender in contenders.items()}
            finally:
                for contender in contenders.values():  # who stands still would not hear that this process has ended
                    contender.signal(signal.SIGCONT)
    return {
        "mbit": round(mbit, 1),
        "median seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "facts": {name: {**f[0], "sent": max(o["sent"] for o in f)} for name, f in told.items() if f[0]},
        "seconds": seconds,
    }


def rate(nbytes: int, compute: float, share: float) -> float:
    """Mbit/s at which so many bytes take that share of compute and messages one after the other."""
    return 8e-6 * nbytes / (compute * share / (1 - share))


def compare(found: dict[str, Any]) -> None:
    """How much of what the serial order waits for messages is hidden, and how each fares against that order."""
    medians = found["median seconds"]
    serial, ours, unhindered = (medians[name] for name in ("serial", "packhorse", "unhindered"))
    found["communication"] = round(1 - unhindered / serial, 3)
    found["hidden"] = round((serial - ours) / (serial - unhindered), 3)
    found["over serial"] = {name: round(serial / seconds, 3) for name, seconds in medians.items()}
    found["planned / measured"] = {
        name: round(facts["planned_seconds"] / medians[name], 3) for name, facts in found["facts"].items()
    }


def sweep(
    title: str,
    job: Job,
    size: int,
    options: argparse.Namespace,
    results: dict[str, Any],
    more: dict[float, dict[str, Any]] | None = None,
    ways: float = 1.0,
) -> None:
    """Over links on which messages take a share of the serial step; at some shares with more contenders.

    `ways`: more than 1 where a rank waits for what it receives, too, as long as nothing else is to do.
    """
    ours = {"unhindered": job["contenders"]["packhorse"]}
    job = {**job, "contenders": {**job["contenders"], **ours}}
    free = None
    for share in options.shares:
        place = f"{title}, communication {share:.0%}"
        if place in results:
            continue
        if free is None:
            free = run({**job, "contenders": ours}, FREE, size)
            print(title, free["median seconds"], free["facts"], flush=True)
        mbit = rate(ways * free["facts"]["unhindered"]["sent"], free["median seconds"]["unhindered"], share)
        contenders = {**job["contenders"], **(more or {}).get(share, {})}
        found = run({**job, "contenders": contenders}, mbit, size, options.starts)
        compare(found)
        results[place] = found
        print(place, {k: v for k, v in found.items() if k not in ("seconds", "facts")}, flush=True)
        save(options.name, results)


def measure_data(options: argparse.Namespace, results: dict[str, Any]) -> None:
    contenders: dict[str, Any] = {
        "packhorse": {"by": "packhorse"},
        "serial": {"by": "packhorse", "serial": True},
        "ddp": {"by": "plain", "ddp": 0},
        "ddp 2 MB": {"by": "plain", "ddp": 2},
    }
    others = {"ddp 1 MB": {"by": "plain", "ddp": 1}, "ddp 4 MB": {"by": "plain", "ddp": 4}}
    more = {0.3: {**others, "alone": {"by": "plain", "ddp": None}}}
    for model in options.models:
        job = {
            "model": model,
            "ranks": {"data": 2},
            "microbatches": 2,
            "contenders": contenders,
            "repeats": options.repeats,
        }
        sweep(model, job, 2, options, results, more)


def measure_pipeline(options: argparse.Namespace, results: dict[str, Any]) -> None:
    contenders = {"packhorse": {"by": "packhorse"}, "serial": {"by": "packhorse", "serial": True, "ahead": 0}}
    for name, layers in (("medium", 24), ("large", 36), ("xl", 48)):
        for data in options.replicas:
            job = {
                "text": {"layers": layers, "width": 64, "rows": 128 * data, "context": 128},  # messages of 512 KiB
                "ranks": {"data": data, "pipeline": 2},
                "microbatches": 8 * data,
                "contenders": contenders,
                "repeats": options.repeats,
            }
            sweep(f"GPT-2 {name} depth, {data} x 2", job, 2 * data, options, results, ways=1.4)


def find_cuts(job: Job) -> tuple[list[int], int]:
    """Nodes before which the model may be cut in two, and the one that gives both stages as many layers."""
    import packhorse as ph
    from packhorse.partition import find_places, partition

    build, batch, loss = make_task(job)
    graph = ph.capture(build(), batch, loss)
    legal = [place.index for place in find_places(graph) if place.legal]
    between = [place.index for place in partition(graph).cuts]
    blocks = job["text"]["layers"]
    return legal, between[(len(between) - blocks + 1) // 2 + blocks // 2 - 1] if blocks <= len(between) else between[0]


def measure_standard(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Messages of some milliseconds; both by the same cut."""
    text = {"layers": 8, "width": 256, "rows": 32, "context": 128}
    job = {"text": text, "ranks": {"pipeline": 2}, "microbatches": 8, "repeats": options.repeats}
    _, middle = find_cuts(job)
    job["contenders"] = {"packhorse": {"by": "packhorse", "stage_cuts": [middle]}, "torch": {"by": "torch"}}
    nbytes = text["rows"] // 8 * text["context"] * text["width"] * 4
    for milliseconds in (0, 35, 70):
        found = run(job, 8e-3 * nbytes / milliseconds if milliseconds else FREE, starts=options.starts)
        medians = found["median seconds"]
        found["over torch"] = round(medians["torch"] / medians["packhorse"], 3)
        found["planned / measured"] = round(found["facts"]["packhorse"]["planned_seconds"] / medians["packhorse"], 3)
        results[f"messages of {milliseconds} ms"] = found
        print(milliseconds, {k: v for k, v in found.items() if k != "seconds"}, flush=True)
        save(options.name, results)


def measure_cuts(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """A model whose layers are not alike: an embedding, blocks, a head as costly as several of them.

    The fastest of twenty is so by luck too: those that came first start anew, and take more turns with the automatic cut.
    """
    job: Job = {"text": {"layers": 8, "width": 192, "rows": 32}, "ranks": {"pipeline": 2}, "microbatches": 4}
    legal, middle = find_cuts(job)
    chosen = random.Random(0).sample(legal, 20)
    automatic = {"automatic": {"by": "packhorse"}}
    others = {
        "equal layers": {"by": "packhorse", "stage_cuts": [middle]},
        **{f"cut before {cut}": {"by": "packhorse", "stage_cuts": [cut]} for cut in sorted(chosen)},
    }
    found = results["two stages"] = run({**job, "contenders": {**automatic, **others}, "repeats": 3}, FREE)
    fastest = sorted(others, key=lambda name: found["median seconds"][name])[:FINALISTS]
    final = {**automatic, **{name: others[name] for name in fastest}}
    again = {**job, "contenders": final, "repeats": options.repeats}
    duel = results["the fastest, again"] = run(again, FREE, starts=STARTS)
    medians = duel["median seconds"]
    best = min(fastest, key=lambda name: medians[name])
    duel["best of the others"], duel["automatic / best"] = best, round(medians["automatic"] / medians[best], 3)
    print(found["median seconds"], medians, best, duel["automatic / best"], flush=True)


def measure_shards(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Of a GPT trained layer to layer, each rank with its part: on disk, and as the trainer counts it."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import torch

    import packhorse as ph
    from launch import run_ranks

    torch.set_num_threads(1)
    build, batch, loss = make_task({"text": {"layers": 4, "width": 128, "rows": 8}})

    def train(store: Path | None, ranks: ph.Ranks | None) -> dict[str, int]:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        with ph.Trainer(
            model, optimizer, batch, loss=loss, strategy="relay", microbatches=8, store=store, ranks=ranks
        ) as trainer:
            trainer.step(batch)
            return {"state": sum(block.all_nbytes for block in trainer._layout.blocks)}

    def size_of(place: Path) -> int:
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        one, four = Path(directory) / "one", Path(directory) / "four"
        alone = train(one, None)["state"]
        told = run_ranks(4, lambda _: train(four, ph.Ranks(data=4)))
        on_disk = [size_of(place) for place in sorted(four.rglob("rank*"))]
        results["relay x data 4"] = {
            "state of one process": alone,
            "of each rank": [entry["state"] for entry in told],
            "largest / one": round(max(entry["state"] for entry in told) / alone, 4),
            "files of one process": size_of(one),
            "files of each rank": on_disk,
            "largest files / one": round(max(on_disk) / size_of(one), 4),
        }
    print(results, flush=True)


def measure_kills(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Any rank, at a random action: all must end, and go on to the numbers of an undisturbed run."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import torch

    import packhorse as ph
    from launch import run_ranks
    from test_rank_faults import train

    torch.set_num_threads(1)
    chance = random.Random(0)
    cases = [
        ("relay x data 2", ph.Ranks(data=2), "relay"),
        ("pipeline 2", ph.Ranks(pipeline=2), "pipeline"),
        ("data 2 x pipeline 2", ph.Ranks(data=2, pipeline=2), "pipeline"),
        ("data 2", ph.Ranks(data=2), "resident"),
    ]
    for title, ranks, strategy in cases:
        ends: list[float] = []
        differences = 0
        with tempfile.TemporaryDirectory(dir=options.directory) as place:
            directory = Path(place)
            expected = run_ranks(ranks.size, lambda _, d=directory, r=ranks, s=strategy: train(d / "whole", r, s))
            for i in range(options.kills // len(cases)):
                store, victim, moment = directory / str(i), chance.randrange(ranks.size), chance.uniform(0, 4)

                def disturbed(rank: int, store=store, victim=victim, moment=moment, r=ranks, s=strategy) -> Any:
                    return train(store, r, s, moment if rank == victim else None)

                started = time.perf_counter()
                run_ranks(ranks.size, disturbed, expect_failure=True)
                ends.append(round(time.perf_counter() - started, 1))
                found = run_ranks(ranks.size, lambda _, d=store, r=ranks, s=strategy: train(d, r, s))
                differences += any(
                    not torch.equal(values[name], value)
                    for values, wanted in zip(found, expected, strict=True)
                    for name, value in wanted.items()
                )
        results[title] = {"kills": len(ends), "differences found": differences, "seconds until all ended": ends}
        print(title, results[title], flush=True)
        save(options.name, results)


QUESTIONS = {
    "data": measure_data,
    "pipeline": measure_pipeline,
    "standard": measure_standard,
    "cuts": measure_cuts,
    "shards": measure_shards,
    "kills": measure_kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=[*QUESTIONS, "work"])
    parser.add_argument("--models", nargs="*", default=["alexnet", "vgg16", "resnet50"])
    parser.add_argument("--replicas", nargs="*", type=int, default=[1, 2], help="of a pipeline")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2, help="of all contenders, each with so many repeats")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--directory", help="where stores go")
    parser.add_argument("--further", action="store_true", help="what the result file does not have yet")
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.question == "work":
        work(json.loads(options.job))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    options.name = options.name or f"ranks_{options.question}"
    results = load(options.name) if options.further else {}
    QUESTIONS[options.question](options, results)
    save(options.name, results)


if __name__ == "__main__":
    main()

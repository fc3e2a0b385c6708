"""Parts that train apart, on real data, beside conventional training.

    python benchmarks/sil.py emnist    # EMNIST Letters: 2, 3 and 6 parts, labels, kappa, processes at once; accuracy by seed
    python benchmarks/sil.py memory    # a net ten times wider: peak memory of each part's process against conventional
    python benchmarks/sil.py memory --net convolutions    # or transformer: likewise
    python benchmarks/sil.py wall      # two parts at once on two cores against conventional on one and on two: seconds
    python benchmarks/sil.py cifar --epochs 2    # CIFAR-10 (JPEG; needs Pillow), a convolutional net
    python benchmarks/sil.py sst2 --epochs 1     # SST-2, a small transformer

Every run is a process of its own with one thread; two run at a time where only accuracy is asked. --seeds, --only, --epochs.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from results_file import load, save


@dataclass(frozen=True)
class Way:
    """How a model is trained: in parts, or, without cuts, conventionally."""

    cuts: tuple[str, ...] = ()
    labels: str = "readout"
    options: dict[str, Any] = field(default_factory=dict)  # of the labels, synthetic or not
    mode: str = "sequential"
    refine: int = 1
    noise: float = 0.3


TWO, MEMORY, THREE = ("layers.2",), ("layers.0",), ("layers.0", "layers.1")
SIX = tuple(f"layers.{i}" for i in range(5))
LENGTH = 32  # word pieces of a sentence
ROUNDS, STEPS = 3, 8  # processes, and steps of each, where memory is measured

EMNIST: dict[str, Way] = {
    "conventional": Way(),
    "conventional, smoothed": Way(options={"smoothing": 0.1}),  # as labels of read-outs are
    "two parts, readout": Way(TWO),
    "two parts, hadamard": Way(TWO, "hadamard"),
    "two parts, uniform": Way(TWO, "uniform"),
    "two parts for memory": Way(MEMORY),
    "three parts": Way(THREE),
    "six parts": Way(SIX),
    "six parts, uniform": Way(SIX, "uniform"),
    **{f"two parts, uniform, kappa {k}": Way(TWO, "uniform", {"kappa": k}) for k in (0.01, 0.1, 10.0)},
    "two parts at once, not refined": Way(TWO, "hadamard", mode="parallel", refine=0),
    "two parts at once": Way(TWO, "hadamard", mode="parallel"),
}
CIFAR: dict[str, Way] = {
    "conventional": Way(),
    **{f"two parts, {name}": Way(("2",), name) for name in ("readout", "hadamard", "uniform")},
    "two parts, readout of the mean": Way(("2",), options={"grid": 1}),
    "three parts, readout": Way(("1", "3")),
}
SST2: dict[str, Way] = {
    "conventional": Way(),
    **{f"two parts, {name}": Way(("blocks.1",), name) for name in ("readout", "hadamard", "uniform")},
    "three parts, readout": Way(("blocks.0", "blocks.2")),
}


def make_mlp(times: int = 1, device: str = "cpu") -> Any:
    import torch

    from packhorse.models import MLP

    with torch.device(device):
        return MLP([784, *(times * width for width in (512, 512, 256, 256, 128)), 26])


def make_convolutions() -> Any:
    """Six convolutions, small enough for many runs, and a linear layer: 10 classes of 32 x 32 images."""
    from torch import nn

    widths = [(3, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    return nn.Sequential(*(make_block(*w) for w in widths), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def make_block(a: int, b: int, stride: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def make_transformer(vocabulary: int, width: int = 64, layers: int = 4, classes: int = 2) -> Any:
    import torch
    from torch import Tensor, nn

    class Transformer(nn.Module):
        """Padding takes no part."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True, norm_first=True)
                for _ in range(layers)
            )
            self.head = nn.Linear(width, classes)

        def reset_parameters(self) -> None:
            nn.init.normal_(self.places, std=0.02)

        def forward(self, tokens: Tensor) -> Tensor:
            padding = tokens == 0
            x = self.words(tokens) + self.places
            for layer in self.blocks:
                x = layer(x, src_key_padding_mask=padding)
            return self.head(x.mean(1))

    return Transformer()


def cosine(optimizer: Any, steps: int) -> Any:
    import torch

    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def load_task(task: str) -> tuple[Any, Any, Any, int]:
    """(train, test, a function that makes the model, classes)."""
    import datasets

    if task == "emnist":
        return *datasets.load_emnist(), make_mlp, 26
    if task == "cifar":
        return *datasets.load_cifar(), make_convolutions, 10
    train, test, vocabulary = datasets.load_sst2(LENGTH)
    return train, test, partial(make_transformer, vocabulary), 2


def run(task: str, way: Way, seed: int, epochs: int, rate: float, threads: int = 1) -> dict[str, Any]:
    """One training; accuracy on held-out data in per cent, that of every part's own read-out, seconds, bytes."""
    import torch

    torch.set_num_threads(threads)
    import packhorse as ph
    from packhorse.data import Labelled
    from packhorse.sil import labels as schemes

    train, test, make, classes = load_task(task)
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    loader, held_out = Labelled(*train, 256, seed=seed), Labelled(*test, 1000, seed=None)
    started = time.perf_counter()
    if not way.cuts:
        scheduler, smoothing = cosine(optimizer, epochs * len(loader)), way.options.get("smoothing", 0.0)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y, label_smoothing=smoothing).backward()
                optimizer.step()
                scheduler.step()
        seconds = time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in held_out)
        return {"accuracy": 100 * right / len(test[1]), "seconds": round(seconds, 1)}
    scheme = {"readout": schemes.Readout, "hadamard": schemes.Hadamard, "uniform": schemes.Uniform}[way.labels]
    with ph.SegmentedTrainer(
        model,
        optimizer,
        next(iter(loader)),
        num_classes=classes,
        cuts=way.cuts,
        labels=scheme(**way.options),
        mode=way.mode,  # type: ignore[arg-type]  # it checks
        refine=way.refine,
        noise=way.noise,
        scheduler=cosine,
        seed=seed,
    ) as trainer:
        trainer.fit(loader, epochs)
        seconds = time.perf_counter() - started
        accuracy = trainer.evaluate(held_out)
        described = trainer.describe()
    return {
        "accuracy": 100 * accuracy,
        "read-outs": [round(100 * s.accuracy, 2) for s in trainer.standings[:-1]],
        "seconds": round(seconds, 1),
        "exchanged_bytes": described["exchanged_bytes"],
        "pipeline_bytes": described["conventional"]["pipeline_bytes"],
    }


def measure_accuracy(task: str, ways: dict[str, Way], options: argparse.Namespace) -> dict[str, Any]:
    name = options.name or f"sil_{task}"
    results = load(name) if options.further else {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = {
            (title, seed): pool.submit(run, task, way, seed, options.epochs, options.rate)
            for seed in range(options.seeds)
            for title, way in ways.items()
            if (not options.only or title in options.only) and str(seed) not in results.get(title, {}).get("runs", {})
        }
        for (title, seed), future in waiting.items():
            found = future.result()
            results.setdefault(title, {"runs": {}})["runs"][str(seed)] = found
            print(title, seed, found, flush=True)
            save(name, summarise(results))
        for title in results:
            if ways[title].cuts:
                results[title]["planned memory ratio"] = pool.submit(plan_ratio, task, ways[title]).result()
    return summarise(results)


def plan_ratio(task: str, way: Way) -> float:
    """Tensors of the largest part, of those of all in one piece."""
    import torch

    import packhorse as ph
    from packhorse.data import Labelled

    train, _, make, classes = load_task(task)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    batch = next(iter(Labelled(*train, 256, seed=0)))
    with ph.SegmentedTrainer(model, optimizer, batch, num_classes=classes, cuts=way.cuts, labels=way.labels) as trainer:
        return round(float(trainer.describe()["tensor_ratio"]), 3)


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Means and spreads over seeds, and the gap to conventional training of the same seed."""
    conventional = results.get("conventional", {}).get("runs", {})
    for found in results.values():
        runs = found["runs"]
        accuracies = [r["accuracy"] for r in runs.values()]
        found["mean"] = round(statistics.fmean(accuracies), 3)
        found["spread"] = round(statistics.stdev(accuracies), 3) if len(accuracies) > 1 else None
        gaps = [conventional[seed]["accuracy"] - r["accuracy"] for seed, r in runs.items() if seed in conventional]
        found["mean gap"] = round(statistics.fmean(gaps), 3) if gaps else None
    return results


# -- memory and wall time


@dataclass(frozen=True)
class Net:
    """What is trained where memory is measured; a small one of its kind first, for what a process loads once."""

    name: str
    times: int  # as wide as the net of the paper

    @property
    def classes(self) -> int:
        return 26 if self.name == "mlp" else 10

    def make(self, device: str = "cpu", *, small: bool = False) -> Any:
        import torch
        from torch import nn

        if self.name == "mlp":
            return make_mlp(1 if small else self.times, device)
        with torch.device(device):
            if self.name == "transformer":
                return make_transformer(8000, 64, 2, 10) if small else make_transformer(8000, 512, 6, 10)
            if small:
                return make_convolutions()
            widths = [
                (3, 64, 1),
                (64, 64, 1),
                (64, 128, 2),
                (128, 128, 1),
                (128, 256, 2),
                (256, 512, 1),
                (512, 1024, 2),
            ]
            blocks = (make_block(*w) for w in widths)
            return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4096, 10))

    def make_batch(self) -> tuple[Any, Any]:
        import torch

        rows = {"mlp": 256, "convolutions": 128, "transformer": 64}[self.name]
        shape = {"mlp": (784,), "convolutions": (3, 32, 32), "transformer": (LENGTH,)}[self.name]
        x = torch.randint(1, 8000, (rows, *shape)) if self.name == "transformer" else torch.randn(rows, *shape)
        return x, torch.randint(self.classes, (rows,))


def grow(net: Net, where: dict[str, Any], part: int | None, steps: int) -> dict[str, Any]:
    """Trains one part of a wide net, or all of it conventionally; by how much the process grew beyond what it had before."""
    import torch

    torch.set_num_threads(1)
    import packhorse as ph
    from packhorse.data import Labelled
    from packhorse.memory import release, resident_bytes

    x, y = net.make_batch()

    def train_whole(model: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def train_part(model: Any, where: dict[str, Any], part: int) -> tuple[int, Any]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        with ph.SegmentedTrainer(
            model, optimizer, (x, y), num_classes=net.classes, labels="hadamard", mode="parallel", **where
        ) as trainer:
            release()  # or a part would find what the small net has left
            base = resident_bytes()
            trainer.fit(Labelled(x, y, len(y), seed=0), steps, only=part)
        return base, trainer

    if part is None:  # the small net first: what a process loads when it trains at all is none of the model's
        train_whole(net.make(small=True))
        model = net.make()
        release()
        base = resident_bytes() - sum(p.nbytes for p in model.parameters())
        train_whole(model)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"grown_mb": round((peak - base) / 1e6, 1), "parameters": sum(p.numel() for p in model.parameters())}
    train_part(net.make("meta", small=True), {"parts": 2}, 1)
    base, trainer = train_part(net.make("meta"), where, part)
    planned, whole = trainer.standings[part].planned_bytes, trainer.describe()["conventional"]["planned_bytes"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "grown_mb": round((peak - base) / 1e6, 1),
        "planned_mb": round(planned / 1e6, 1),
        "planned ratio": round(planned / whole, 3),
        "parameters": trainer.standings[part].num_parameters,
    }


def in_child(work: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Ten times wider, other layers are the large ones: beside the cuts of the small net there are those for memory."""
    net = Net(options.net, options.times)
    runs = [in_child(grow, net, {}, None, STEPS) for _ in range(ROUNDS)]
    whole = {**runs[0], "grown_mb": statistics.median(run["grown_mb"] for run in runs)}
    results: dict[str, Any] = {"conventional": whole}
    ways: list[tuple[str, int, dict[str, Any]]] = [
        ("two parts for memory", 2, {"parts": 2}),
        ("three parts for memory", 3, {"parts": 3}),
    ]
    if net.name == "mlp":
        ways = [("two parts, cut 3", 2, {"cuts": TWO}), *ways, ("six parts", 6, {"cuts": SIX})]
    for title, parts, where in ways:
        for part in range(parts):
            runs = [in_child(grow, net, where, part, STEPS) for _ in range(ROUNDS)]
            named = ("grown_mb", "planned_mb", "planned ratio")
            found = {**runs[0], **{name: statistics.median(run[name] for run in runs) for name in named}}
            found["measured ratio"] = round(found["grown_mb"] / whole["grown_mb"], 3)
            results.setdefault(title, {})[f"part {part}"] = found
        largest = max(results[title].values(), key=lambda p: p["grown_mb"])
        results[title]["largest"] = {key: value for key, value in largest.items() if "ratio" in key}
        print(title, results[title], flush=True)
    return results


def measure_wall(options: argparse.Namespace) -> dict[str, Any]:
    """Nothing else runs; ways take turns."""
    ways = {
        "conventional, one core": (Way(), 1),
        "conventional, two cores": (Way(), 2),
        "two parts at once, one core each": (Way(TWO, "hadamard", mode="parallel"), 1),
        "the same, cut for memory": (Way(MEMORY, "readout", mode="parallel"), 1),
    }
    results: dict[str, Any] = {name: {"runs": {}} for name in ways}
    for seed in range(options.seeds):
        for name, (way, threads) in ways.items():
            found = in_child(run, "emnist", way, seed, options.epochs, options.rate, threads)
            results[name]["runs"][str(seed)] = found
            print(name, seed, found, flush=True)
    for found in results.values():
        found["median seconds"] = statistics.median(r["seconds"] for r in found["runs"].values())
        found["mean"] = round(statistics.fmean(r["accuracy"] for r in found["runs"].values()), 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["emnist", "memory", "wall", "cifar", "sst2"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--net", choices=["mlp", "convolutions", "transformer"], default="mlp", help="of which memory")
    parser.add_argument("--times", type=int, default=10, help="as wide as the net, where memory is measured")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="ways, by name")
    parser.add_argument("--further", action="store_true", help="runs that the result file does not have yet")
    parser.add_argument("--name", help="of the result file")
    options = parser.parse_args()
    net = "" if options.net == "mlp" else f"_{options.net}"
    name = options.name or f"sil_{options.question}{net}"
    if options.question == "memory":
        save(name, measure_memory(options))
    elif options.question == "wall":
        save(name, measure_wall(options))
    else:
        ways = {"emnist": EMNIST, "cifar": CIFAR, "sst2": SST2}[options.question]
        save(name, measure_accuracy(options.question, ways, options))


if __name__ == "__main__":
    main()

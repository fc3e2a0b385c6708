"""Relay against plain PyTorch: speed and memory, interleaved.

    python benchmarks/relay.py speed   # GPT 12 x 1024, 2048 tokens in 4 microbatches: plain against relay in RAM and on disk
    python benchmarks/relay.py xl      # GPT2-XL in 2 GiB, against the same list with movement and update made no-ops
    python benchmarks/relay.py durability  # versions, checksums and commits on disk, against none of them
    python benchmarks/relay.py depth   # peak memory over depth, and over the number of microbatches
    python benchmarks/relay.py overlap # a store slowed until it takes as long as compute: with overlap, and without

Contenders run in turns (turns.py). Options: --precision, --repeats, --tokens, --context, --layers.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from results_file import save
from turns import ratio, run_in_turns


def make_task(options: argparse.Namespace, device: str) -> tuple[Any, Any, Any]:
    import torch

    from packhorse.models import GPT, GPTConfig
    from packhorse.models.zoo import predict_tokens

    config = GPTConfig(options.layers, options.heads, options.width, options.context, options.vocabulary)
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    tokens = torch.randint(config.vocabulary, (options.tokens // options.context, options.context + 1))
    return model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, predict_tokens


def plain(options: argparse.Namespace, checkpoint: bool) -> Any:
    """The ordinary loop: autocast, fused AdamW, microbatches, with or without checkpointed blocks."""
    import torch
    from torch.utils.checkpoint import checkpoint as recompute

    model, batch, loss = make_task(options, "cpu")
    if checkpoint:
        for block in model.blocks:
            block.forward = partial(recompute, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp32": None}[options.precision]

    def step() -> float:
        total = 0.0
        for tokens, targets in zip(*(batch[k].chunk(options.microbatches) for k in ("tokens", "targets")), strict=True):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                value = loss(model(tokens), {"targets": targets}) / options.microbatches
            value.backward()
            total += value.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def relay(options: argparse.Namespace, directory: str | None, **choices: Any) -> Any:
    import torch

    import packhorse as ph

    model, batch, loss = make_task(options, "cpu" if directory is None else "meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    trainer = ph.Trainer(
        model,
        optimizer,
        batch,
        loss=loss,
        strategy="relay",
        microbatches=options.microbatches,
        precision=options.precision,
        store=directory,
        **choices,
    )
    return lambda: trainer.step(batch)


def still(options: argparse.Namespace) -> Any:
    """The same list as on disk, but nothing moves: blocks of one size share memory, and updates do nothing."""
    import torch

    import packhorse as ph
    from packhorse.memory import map_bytes
    from packhorse.store import Block, Store
    from packhorse.store.store import done

    class Loan:
        def __init__(self, piece: torch.Tensor):
            self.ready = done(piece)

        def give_back(self, dirty: bool = False) -> None:
            return None

    class Still(Store):
        on_disk = True
        pieces: dict[Any, torch.Tensor] = {}  # noqa: RUF012

        def create(self, blocks: Sequence[Block], ledger: Any, identity: Mapping[str, Any]) -> None:
            pass

        def borrow(
            self,
            block: Block,
            kind: str,
            start: int = 0,
            stop: int | None = None,
            dtype: torch.dtype | None = None,
            **_: Any,
        ) -> Loan:
            numel, dtype = (block.numel if stop is None else stop) - start, dtype or block.kinds[kind]
            if (numel, dtype) not in self.pieces:
                self.pieces[numel, dtype] = map_bytes(numel * dtype.itemsize).view(dtype)
            return Loan(self.pieces[numel, dtype])

        def publish(self, block: Block) -> None:
            pass

        def close(self) -> None:
            pass

    model, batch, loss = make_task(options, "meta")
    trainer = ph.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        batch,
        loss=loss,
        strategy="relay",
        microbatches=options.microbatches,
        precision=options.precision,
        store=Still(),
        memory="2GiB",  # as the contender has it, or the list would be another
    )
    executor = trainer._executor

    def drop(task: Any, action: Any) -> None:
        for key in [key for key in task.sums if key[1] == action.segment]:
            task.sums.pop(key).let_go()

    executor.handlers["UPDATE"] = executor.handlers["PARK"] = drop
    return lambda: trainer.step(batch)


CONTENDERS: dict[str, Any] = {
    "plain": lambda options, directory: plain(options, checkpoint=False),
    "plain, checkpointed": lambda options, directory: plain(options, checkpoint=True),
    "relay in RAM": lambda options, directory: relay(options, None),
    "relay in RAM, graphs kept": lambda options, directory: relay(options, None, memory="20GiB"),
    "relay on disk": lambda options, directory: relay(options, directory),
    "relay on disk, in 1.6 GiB": lambda options, directory: relay(options, directory, memory="1.6GiB"),
    "relay on disk, in 2 GiB": lambda options, directory: relay(options, directory, memory="2GiB"),
    "the same list, nothing moves": lambda options, directory: still(options),
    "durability none": lambda options, directory: relay(options, directory, durability="none"),
    "durability process": lambda options, directory: relay(options, directory, durability="process"),
    "durability power": lambda options, directory: relay(options, directory, durability="power"),
}


def prepare(name: str, options: argparse.Namespace, directory: str) -> Any:
    return CONTENDERS[name](options, directory)


def run(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    directory = tempfile.mkdtemp(dir=options.directory)
    makers = {name: partial(prepare, name, options, str(Path(directory) / str(i))) for i, name in enumerate(names)}
    results = run_in_turns(makers, options.repeats)
    for found in results.values():
        found["tokens_per_second"] = round(options.tokens * len(found["seconds"]) / sum(found["seconds"]), 1)
    shutil.rmtree(directory)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["speed", "xl", "durability", "depth", "overlap"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512, help="tokens of a row")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--directory", help="where stores go")
    parser.add_argument("--only", nargs="*", help="contenders, by name")
    parser.add_argument("--name", help="of the result file")
    options = parser.parse_args()
    options.vocabulary = 50257
    if options.question == "speed":
        options.layers, options.heads, options.width = options.layers or 12, 16, 1024
        names = options.only or list(CONTENDERS)[:6]
        results = run(names, options)
        checkpointed = "plain, checkpointed"
        for name in names:
            for against in ("plain", checkpointed):
                if against in results and name.startswith("relay"):
                    results[name][f"against {against}"] = ratio(results, name, against)
    elif options.question == "xl":
        options.layers, options.heads, options.width = options.layers or 48, 25, 1600
        moving, staying = list(CONTENDERS)[6:8]
        results = run([moving, staying], options)
        results["step / the same list without movement"] = round(1 / ratio(results, moving, staying)["speed"], 3)
    elif options.question == "durability":
        options.layers, options.heads, options.width = options.layers or 12, 16, 1024
        names = options.only or list(CONTENDERS)[8:]
        results = run(names, options)
        for name in names[1:]:
            results[name]["against none"] = ratio(results, name, names[0])
    elif options.question == "overlap":
        results = measure_overlap(options)
    else:
        results = measure_depth(options)
    save(options.name or f"relay_{options.question}_{options.precision}", results)


def measure_overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Steps at full speed, and on a disk that takes as long as they do: the larger of the two, or their sum?"""
    import torch

    import packhorse as ph

    options.layers, options.heads, options.width, options.vocabulary = 12, 8, 512, 256
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    trainers: dict[str, Any] = {}

    def start(name: str, rate: float | None, overlap: bool) -> float:
        model, batch, loss = make_task(options, "meta")
        trainers[name] = ph.Trainer(
            model,
            torch.optim.AdamW(model.parameters(), fused=True),
            batch,
            loss=loss,
            strategy="relay",
            microbatches=options.microbatches,
            store=ph.DiskStore(directory / name, bytes_per_second=rate),
            overlap=overlap,
        )
        step = partial(trainers[name].step, batch)
        step()
        return time_step(step)

    free = start("full speed", None, True)
    moved = sum(trainers["full speed"].plan.estimate.moved.values())
    rate = moved / free
    for name, overlap in (("slowed", True), ("slowed, no overlap", False)):
        start(name, rate, overlap)
    _, batch, _ = make_task(options, "meta")
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(options.repeats):
        for name, trainer in trainers.items():
            seconds[name].append(time_step(partial(trainer.step, batch)))
            print(name, seconds[name][-1], flush=True)
    for trainer in trainers.values():
        trainer.close()
    shutil.rmtree(directory)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    transfer = moved / rate
    longer = max(medians["full speed"], transfer)
    return {
        "bytes a step": moved,
        "bytes a second": round(rate),
        "seconds of transfers": round(transfer, 3),
        **{name: {"median_seconds": round(medians[name], 3), "seconds": seconds[name]} for name in medians},
        "slowed / the larger of compute and transfers": round(medians["slowed"] / longer, 3),
        "without overlap": round(medians["slowed, no overlap"] / longer, 3),
    }


def time_step(step: Any) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure_depth(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory above import: at 12 and at 384 layers of width 512, with 4 and with 64 microbatches of the same size."""
    options.heads, options.width, options.context, options.repeats = 8, 512, 128, 1
    results = {}
    for layers, microbatches in ((12, 4), (384, 4), (12, 64)):
        options.layers, options.microbatches, options.tokens = layers, microbatches, 256 * microbatches
        (found,) = run(["relay on disk"], options).values()
        results[f"{layers} layers, {microbatches} microbatches"] = found
        print(layers, microbatches, found, flush=True)
    first, *others = results.values()
    for found in others:
        found["growth"] = round(found["above_import_mb"] / first["above_import_mb"] - 1, 4)
    return results


if __name__ == "__main__":
    main()

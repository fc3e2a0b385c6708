"""Runs that die: a small training run, killed at any point and resumed, beside one that was left alone.

Used by the tests and by `benchmarks/kills.py`. Every attempt is a process of its own, forked from one that has captured the
model already; it dies from a signal after some time, or by its own hand at a given file operation, in the middle of it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import packhorse as ph
import packhorse.tasks
from packhorse.memory import Ledger, Pool
from packhorse.store.files import FileSystem

STEPS = 6


class Positions:
    """Batches by number."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(self.position)
            self.position += 1
            yield torch.randn(6, 24, generator=generator), torch.randint(4, (6,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Knot(nn.Module):
    """Skips over several segments, a weight used in three of them, dropout, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(24, 24, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.tied(x)
        second = self.blocks[0](first)
        third = self.blocks[1](self.tied(second)) + first
        return self.head(self.tied(self.blocks[2](third) + second) + first)


def make_model(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    if kind == "knot":
        return Knot()
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(24, 4))


def classify(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def make_trainer(
    store: Path | ph.DiskStore, *, model_kind: str = "plain", momentum: float | None = None, **options: Any
) -> ph.Trainer:
    """AdamW, or with `momentum` SGD. `versions` of a store that is given as a directory."""
    model = make_model(model_kind)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=momentum)
    versions = options.pop("versions", None)
    if versions is not None and isinstance(store, Path):
        store = ph.DiskStore(store, durability=options.pop("durability", "process"), versions=versions)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5)
    data = Positions()
    options = {"strategy": "relay", "microbatches": 2, "resume": True, **options}
    example = (torch.randn(6, 24), torch.randint(4, (6,)))
    return ph.Trainer(model, optimizer, example, loss=classify, store=store, scheduler=scheduler, data=data, **options)


def train(trainer: ph.Trainer, steps: int = STEPS) -> None:
    batches = iter(trainer.data)
    while trainer.steps < steps:
        trainer.step(next(batches))


def capture_once() -> None:
    """All trainers of this process, and of those forked from it, share one graph."""
    known: dict[type, ph.Graph] = {}
    original = ph.capture

    def capture(model: nn.Module, *arguments: Any, **options: Any) -> ph.Graph:
        if type(model) not in known:
            known[type(model)] = original(model, *arguments, **options)
        return known[type(model)]

    packhorse.tasks.capture = capture  # type: ignore[attr-defined]


def read_state(store: Path) -> tuple[int, dict[str, Tensor]]:
    """The step and all values of the last commit, checked as they are read."""
    opened = ph.DiskStore(store)
    try:
        manifest = opened.open_as_it_is(Pool(Ledger()))
        values = dict(opened.read_small())
        for block in opened.files.blocks.values():
            for kind in block.kinds:
                for slot in block.slots:
                    if any(s is not None for s in opened.files.sums[block.name, kind]):
                        values[f"{kind}:{slot.name}"] = opened.files.read_elements(slot.name, kind, 0, slot.numel)
        return int(manifest["facts"]["step"]), values
    finally:
        opened.close()


def is_interrupted(store: Path) -> bool:
    """Whether it holds a step that has to be finished."""
    opened = ph.DiskStore(store)
    try:
        return opened.find_unfinished() is not None
    finally:
        opened.close()


def reference(directory: Path, **options: Any) -> list[dict[str, Tensor]]:
    """All values after every step of a run that nothing disturbs, with two versions."""
    states = []
    options.pop("versions", None)
    for step in range(STEPS + 1):
        with make_trainer(directory, **options) as trainer:
            train(trainer, step)
        found, values = read_state(directory)
        assert found == step
        states.append(values)
    return states


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{where}: {name} differs"


class Killer(FileSystem):
    """Ends its own process at the given operation that changes something: before it, after it, or half way through a write."""

    def __init__(self, at: int, moment: str):
        self.left, self.moment = at, moment

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _count(self, operation: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.moment != "after":
            self._die()
        result = operation()
        if self.left == 0:
            self._die()
        return result

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        self.left -= 1
        if self.left == 0:
            if self.moment == "half":
                half = len(view) // 2 if len(view) < 8192 else len(view) // 8192 * 4096  # direct I/O writes whole pages
                super().write(descriptor, view[:half], offset)
            elif self.moment == "after":
                super().write(descriptor, view, offset)
            self._die()
        return super().write(descriptor, view, offset)

    def sync(self, descriptor: int) -> None:
        self._count(lambda: super(Killer, self).sync(descriptor))

    def replace(self, source: Path, target: Path) -> None:
        self._count(lambda: super(Killer, self).replace(source, target))

    def sync_directory(self, path: Path) -> None:
        self._count(lambda: super(Killer, self).sync_directory(path))


def attempt(store: Path, kill: Any, steps: int = STEPS, **options: Any) -> bool:
    """One process that goes on with the run; `kill` is seconds, or a `Killer`. True if it came to the end."""
    child = os.fork()
    if child == 0:
        try:
            system = kill if isinstance(kill, FileSystem) else None
            choices = {"durability": options.pop("durability", "process"), "versions": options.pop("versions", None)}
            with make_trainer(ph.DiskStore(store, filesystem=system, **choices), **options) as trainer:
                train(trainer, steps)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    if isinstance(kill, float):
        time.sleep(kill)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed instead of being killed"
    return not os.WIFSIGNALED(status)


def kill_many(directory: Path, kills: int, seed: int = 0, **options: Any) -> dict[str, int]:
    """Kills runs until so many were killed; after every kill the store must be at a step of the reference, value by value."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    random = Random(seed)
    expected = reference(directory / "reference", **options)
    counts = {"killed by time": 0, "killed in an operation": 0, "runs completed": 0, "found before the first commit": 0}
    counts["found with a step to finish"] = 0
    durations = []
    for i in range(3):
        started = time.perf_counter()
        attempt(directory / f"timing-{i}", None, **options)
        durations.append(time.perf_counter() - started)
        assert_equal(
            read_state(directory / f"timing-{i}")[1], expected[STEPS], "resumed after every step, and not at all"
        )
    duration = min(durations)
    number, last = 0, -1
    while counts["killed by time"] + counts["killed in an operation"] < kills:
        store = directory / f"run-{number}"
        by_time = random.random() < 0.5
        kill = (
            random.random() * duration
            if by_time
            else Killer(random.randint(1, 120), random.choice(["before", "half", "after"]))
        )
        completed = attempt(store, kill, **options)
        counts["runs completed" if completed else "killed by time" if by_time else "killed in an operation"] += 1
        if not (store / "manifest.json").exists():
            counts["found before the first commit"] += 1
            continue
        found = store
        if is_interrupted(store):  # finished in a copy: the next attempt, which may die in doing so, has it as it is
            counts["found with a step to finish"] += 1
            found = directory / "finished"
            shutil.rmtree(found, ignore_errors=True)
            shutil.copytree(store, found)
            attempt(found, None, steps=0, **options)
        step, values = read_state(found)
        assert step >= last, f"step {step} after {last}: a commit was lost"
        assert_equal(values, expected[step], f"run {number}, after step {step}")
        last = step if found == store else step - 1
        if last == STEPS:
            number, last = number + 1, -1
    return counts


def run_kills(tmp_path: Path, kills: int, **options: Any) -> dict[str, int]:
    """In a process of its own, whose threads do not stand in the way of a fork."""
    program = (
        "import json, sys; from pathlib import Path; import crash; crash.capture_once();"
        "print(json.dumps(crash.kill_many(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(kills), json.dumps(options)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- crashes between operations


class Recorder(FileSystem):
    """Notes every operation that changes something, with what it wrote."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.paths: dict[int, Path] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        count = super().write(descriptor, view, offset)
        self.operations.append(("write", self.paths[descriptor], bytes(view[:count]), offset))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(("sync", self.paths[descriptor]))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.operations.append(("replace", source, target))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.operations.append(("sync directory", path))


def replay(before: Path, target: Path, operations: list[tuple[Any, ...]], origin: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(before, target)
    for kind, path, *rest in operations:
        moved = target / path.relative_to(origin)
        if kind == "write":
            content, offset = rest
            with open(moved, "r+b" if moved.exists() else "w+b") as file:
                if not moved.name.endswith(".bin") and offset == 0:
                    file.truncate(0)
                file.seek(offset)
                file.write(content)
        elif kind == "replace" and moved.exists():
            os.replace(moved, target / rest[0].relative_to(origin))


def survive(operations: list[tuple[Any, ...]], random: Random) -> list[tuple[Any, ...]]:
    """Those that were synced, in order; of the others some, in any order, writes perhaps in part."""
    synced: set[int] = set()
    for i, (kind, path, *_) in enumerate(operations):
        if kind == "sync":
            synced |= {j for j in range(i) if operations[j][:2] == ("write", path)}
        elif kind == "sync directory":
            synced |= {j for j in range(i) if operations[j][0] == "replace"}
    kept = [operations[i] for i in sorted(synced)]
    loose = [
        operations[i] for i in range(len(operations)) if i not in synced and operations[i][0] in ("write", "replace")
    ]
    random.shuffle(loose)
    for operation in loose:
        if random.random() < 0.5:
            if operation[0] == "write" and random.random() < 0.5:
                operation = (*operation[:2], operation[2][: len(operation[2]) // 2], operation[3])
            kept.append(operation)
    return kept

"""Parts at once: each in a process of its own, one thread each, that talk to no other while they train.

In: work for each part. Out: it is done. Under torchrun the ranks are the processes, and share the parts among them; else as
many processes as parts are forked from this one.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from packhorse.errors import PackhorseError

PATIENCE = (
    24 * 3600.0
)  # seconds that a rank waits for what another is to leave; torchrun ends it earlier if that one dies


def find_rank() -> tuple[int, int] | None:
    """(rank, ranks) under torchrun, if there are several."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), ranks) if ranks > 1 else None


def is_mine(part: int) -> bool:
    """Whether this process trains a part: alone all, under torchrun every so-manieth."""
    place = find_rank()
    return place is None or part % place[1] == place[0]


def await_file(path: Path) -> None:
    """Until another rank has left it."""
    started = time.monotonic()
    while not path.exists():
        if time.monotonic() - started > PATIENCE:
            raise PackhorseError(
                f"{path} did not appear within {PATIENCE:.0f} s; is the rank that makes it still there?"
            )
        time.sleep(0.05)


def run_apart(work: Callable[[int], None], num_parts: int) -> None:
    """Does the work of all parts that are this process's, at once."""
    place = find_rank()
    if place is not None:
        for part in range(num_parts):
            if is_mine(part):
                work(part)
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise PackhorseError(
            f"mode='parallel' forks processes, which this system cannot; start it under torchrun with {num_parts} processes"
        )
    context = multiprocessing.get_context("fork")
    failures = context.SimpleQueue()
    children = [context.Process(target=_child, args=(work, part, failures)) for part in range(num_parts)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    failed = [(part, child.exitcode) for part, child in enumerate(children) if child.exitcode != 0]
    if failed:
        part, code = failed[0]
        said = "" if failures.empty() else f":\n{failures.get()}"
        raise PackhorseError(f"the process of part {part} ended with {code}{said}")


def _child(work: Callable[[int], None], part: int, failures: "multiprocessing.SimpleQueue[str]") -> None:
    torch.set_num_threads(1)  # the pool of threads of the process it was forked from does not exist here
    try:
        work(part)
    except BaseException:
        failures.put(traceback.format_exc(limit=-8))
        raise SystemExit(1) from None

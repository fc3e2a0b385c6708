"""Parts at once: each in a process of its own, one thread each, that talk to no other while they train.

In: work for each part. Out: it is done. Under torchrun the ranks are the processes, and share the parts among them; else as
many processes as parts are forked from this one. They tell it how far they are, and end when it does.
"""

import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import torch

from packhorse.errors import PackhorseError
from packhorse.sil.standing import Progress

logger = logging.getLogger("packhorse")

PATIENCE = 24 * 3600.0  # seconds that a rank waits for another's part; torchrun ends it earlier if that one dies

Tell = Callable[[Progress], None]


def find_rank() -> tuple[int, int] | None:
    """(rank, ranks) under torchrun, if there are several."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), ranks) if ranks > 1 else None


def is_mine(part: int) -> bool:
    """Whether this process trains a part: alone all, under torchrun every so-manieth."""
    place = find_rank()
    return place is None or part % place[1] == place[0]


def await_part(part: int, is_done: Callable[[], bool]) -> None:
    """Until another rank has done it."""
    started = time.monotonic()
    while not is_done():
        if time.monotonic() - started > PATIENCE:
            raise PackhorseError(
                f"part {part} was not done within {PATIENCE:.0f} s; is the rank that trains it still there?"
            )
        time.sleep(0.1)


def run_apart(work: Callable[[int, Tell], None], num_parts: int, tell: Tell) -> None:
    """Does the work of all parts that are this process's, at once. What a part has to tell, `tell` hears in this process."""
    if find_rank() is not None:
        for part in range(num_parts):
            if is_mine(part):
                work(part, tell)
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise PackhorseError(
            f"mode='parallel' forks processes, which this system cannot; start it under torchrun with {num_parts} processes"
        )
    context = multiprocessing.get_context("fork")
    ours, theirs = zip(*(context.Pipe() for _ in range(num_parts)), strict=True)
    children = [context.Process(target=_child, args=(work, part, ours, theirs)) for part in range(num_parts)]
    try:
        for child in children:
            child.start()
        for end in theirs:
            end.close()
        said = _listen(ours, tell)
        for child in children:
            child.join()
    finally:
        for child in children:
            if child.is_alive():
                child.terminate()
                child.join()
        for end in ours:
            end.close()
    failed = [(part, child.exitcode) for part, child in enumerate(children) if child.exitcode != 0]
    if failed:
        part, code = failed[0]
        raise PackhorseError(
            f"the process of part {part} ended with {code}" + (f":\n{said[part]}" if part in said else "")
        )


def _listen(ends: tuple[Connection, ...], tell: Tell) -> dict[int, str]:
    """Until all have ended; what went wrong in which. The others go on: with a store they need not train again."""
    open_ends, said = dict(zip(ends, range(len(ends)), strict=True)), {}
    while open_ends:
        for end in wait(list(open_ends)):
            assert isinstance(end, Connection)
            try:
                message = end.recv()
            except (EOFError, OSError):
                del open_ends[end]
                continue
            if isinstance(message, str):
                said[open_ends[end]] = message
                logger.error("part %d failed: %s", open_ends[end], message.strip().splitlines()[-1])
            else:
                tell(message)
    return said


def _child(
    work: Callable[[int, Tell], None], part: int, ours: tuple[Connection, ...], theirs: tuple[Connection, ...]
) -> None:
    for end in (*ours, *theirs[:part], *theirs[part + 1 :]):
        end.close()  # or nobody would see that another has ended
    end = theirs[part]
    threading.Thread(target=_end_with_parent, args=(end,), daemon=True).start()
    torch.set_num_threads(1)  # the pool of threads of the process it was forked from does not exist here
    try:
        work(part, end.send)
    except BaseException:
        end.send(traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


def _end_with_parent(end: Connection) -> None:
    """Nothing is ever sent this way: it ends when the process that listens does."""
    try:
        end.recv()
    except (EOFError, OSError):
        os._exit(1)

"""Ranks for tests: forked from this process, whose imports they share, and connected as torchrun would connect them."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

PATIENCE = 120.0


def run_ranks(size: int, work: Callable[[int], Any], *, expect_failure: bool = False) -> list[Any]:
    """What `work(rank)` returns on each rank; with `expect_failure` the errors, as text, instead."""
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as directory:
        port = find_port()
        children = [
            context.Process(target=_child, args=(work, rank, size, port, directory), daemon=False)
            for rank in range(size)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(PATIENCE)
        stuck = [rank for rank, child in enumerate(children) if child.is_alive()]
        for rank in stuck:
            children[rank].kill()
        found = [_read(Path(directory) / str(rank)) for rank in range(size)]
    assert not stuck, f"ranks {stuck} did not end; the others: {found}"
    failures = [error for is_error, error in found if is_error]
    assert bool(failures) == expect_failure, "\n".join(map(str, failures)) or "no rank failed"
    return [value for _, value in found]


def _child(work: Callable[[int], Any], rank: int, size: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PACKHORSE_PATIENCE": "40",
    }
    try:
        result = (False, work(rank))
    except BaseException as error:
        result = (True, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    torch.save(result, Path(directory) / str(rank))
    os._exit(0)


def _read(path: Path) -> tuple[bool, Any]:
    return torch.load(path, weights_only=False) if path.exists() else (True, "ended without a word")


def find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

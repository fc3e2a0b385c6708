"""Contenders in turns: each a process of its own, all take the same steps, stopped in between.

The speed of a shared machine changes from minute to minute; in turns of two seconds it changes for all alike. A step's seconds
are those in which its process ran. Memory is the peak of the process.
"""

import multiprocessing
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

TURN = 2.0  # seconds

Make = Callable[[], Callable[[], Any]]  # makes what takes a step; picklable


def contend(make: Make, pipe: Connection) -> None:
    """A contender's process: takes a step when told to, says when it is done, and tells its memory at last."""
    import torch  # noqa: F401

    import packhorse
    from packhorse.memory import resident_bytes

    imported = resident_bytes()
    try:
        step = make()
    except packhorse.BudgetError as error:
        pipe.send(str(error))
        return
    losses = []
    pipe.send("ready")
    while pipe.recv() == "step":
        losses.append(step())
        pipe.send("done")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told = {"peak_rss_mb": round(peak / 1e6), "above_import_mb": round((peak - imported) / 1e6), "losses": losses}
    pipe.send(told | getattr(step, "facts", {}))


class Contender:
    """A process that takes steps, in turns, and the seconds it ran for each."""

    def __init__(self, name: str, make: Make):
        context = multiprocessing.get_context("spawn")
        self.name, self.running = name, 0.0
        self.seconds: list[float] = []
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=contend, args=(make, theirs))
        self.process.start()
        theirs.close()
        self.said = self.pipe.recv()  # "ready", or why not

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.pipe.send("step")
        self._signal(signal.SIGSTOP)

    def run(self, steps: int) -> None:
        """One turn, of at most `steps` in all."""
        self._signal(signal.SIGCONT)
        started = time.perf_counter()
        while (left := started + TURN - time.perf_counter()) > 0 and self.pipe.poll(left):
            assert self.pipe.recv() == "done"
            self.seconds.append(self.running + time.perf_counter() - started)
            started, self.running = time.perf_counter(), 0.0
            print(f"{self.name}: step {len(self.seconds)}: {self.seconds[-1]:.2f} s", flush=True)
            if len(self.seconds) == steps:
                return
        self._signal(signal.SIGSTOP)
        self.running += time.perf_counter() - started

    def end(self) -> dict[str, Any]:
        self.pipe.send("quit")
        told = self.pipe.recv()
        self.process.join()
        return dict(told)

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def run_in_turns(makers: Mapping[str, Make], repeats: int) -> dict[str, dict[str, Any]]:
    """One warm-up step each, then `repeats` steps each, in turns. Who does not fit a budget is told apart."""
    everyone = [Contender(name, make) for name, make in makers.items()]
    results: dict[str, dict[str, Any]] = {c.name: {"refused": c.said} for c in everyone}
    contenders = [c for c in everyone if c.said == "ready"]
    steps = repeats + 1
    for contender in contenders:
        contender.take(steps)
    while waiting := [c for c in contenders if len(c.seconds) < steps]:
        for contender in waiting:
            contender.run(steps)
    for contender in contenders:
        seconds = contender.seconds[1:] or contender.seconds
        results[contender.name] = contender.end() | {
            "seconds": [round(s, 3) for s in seconds],
            "median_seconds": round(statistics.median(seconds), 3),
        }
    return results


def ratio(results: Mapping[str, dict[str, Any]], name: str, against: str) -> dict[str, float]:
    """Speed, over all steps, and memory of one contender against another."""
    return {
        "speed": round(sum(results[against]["seconds"]) / sum(results[name]["seconds"]), 3),
        "memory": round(results[name]["peak_rss_mb"] / results[against]["peak_rss_mb"], 3),
    }

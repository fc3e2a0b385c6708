"""A lane: a few threads that move bytes between memory and files, the urgent first.

They only wait for the disk, so they take little from the cores that compute.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from packhorse.errors import StoreError
from packhorse.memory import share_heap
from packhorse.threads import use_threads

URGENT, ORDINARY = 0, 1 << 62  # between them, whatever order the jobs are needed in


class Lane:
    """Jobs in the order of their priority, the lowest first, then of arrival."""

    def __init__(self, name: str, num_threads: int):
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._closed = False
        share_heap()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], Any], *, priority: int = ORDINARY) -> "Future[Any]":
        if self._closed:
            raise StoreError("the store is closed: its trainer has ended; read what you need before")
        future: Future[Any] = Future()
        self._jobs.put((priority, next(self._numbers), partial(_do, job, future)))
        return future

    def submit_all(self, jobs: list[Callable[[], Any]], result: Any, *, priority: int = ORDINARY) -> "Future[Any]":
        """One future for several jobs."""
        return gather([self.submit(job, priority=priority) for job in jobs], lambda: result)

    def close(self, *, waits: bool = True) -> None:
        """Finishes what was submitted; without waiting for that, its threads end with the process, if not before."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put((float("inf"), next(self._numbers), None))
        for thread in self._threads if waits else ():
            thread.join()

    def _work(self) -> None:
        use_threads(1)
        while True:
            job = self._jobs.get()[2]
            if job is None:
                return
            job()
            del job  # its buffers must not wait here for the next job


def _do(job: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def do_now(job: Callable[[], Any]) -> "Future[Any]":
    """By the calling thread; what is returned is done, or has failed."""
    future: Future[Any] = Future()
    _do(job, future)
    return future


def gather(parts: Sequence["Future[Any]"], then: Callable[[], Any]) -> "Future[Any]":
    """Done with the result of `then` when the last part is, or failed with the first failure."""
    whole: Future[Any] = Future()
    lock, waiting, failure = threading.Lock(), len(parts), None

    def count(part: "Future[Any]") -> None:
        nonlocal waiting, failure
        with lock:
            waiting -= 1
            failure = failure or part.exception()
            last = waiting == 0
        if last and failure is not None:
            whole.set_exception(failure)
        elif last:
            _do(then, whole)

    if not parts:
        _do(then, whole)
    for part in parts:
        part.add_done_callback(count)
    return whole


def pass_on(target: "Future[Any]", source: "Future[Any]") -> None:
    """What came of one future becomes what came of another."""
    error = source.exception()
    target.set_result(source.result()) if error is None else target.set_exception(error)

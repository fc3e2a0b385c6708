"""Threads: how many cores the kernels of one thread use.

OpenMP gives every thread that runs a parallel kernel helpers of its own. As soon as there are more of them than cores, all
stop to spin at their barriers and go to sleep instead, and every kernel of the thread that computes starts late.
So threads in the background use one core each, unless the order of a sum depends on it.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def _find_setter() -> Callable[[int], None] | None:
    """OpenMP's own, which is for the calling thread only; torch's would set that of other libraries for all."""
    names = [None, *map(str, (Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))]
    for name in names:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            return ctypes.CDLL(name).omp_set_num_threads  # type: ignore[no-any-return]
    return None


_set_threads = _find_setter()


def use_threads(count: int) -> None:
    """From now on kernels of the calling thread use so many; without effect where torch does not use OpenMP."""
    if _set_threads is not None:
        torch.get_num_threads()  # the first time a thread asks, torch sets its own number
        _set_threads(count)


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)

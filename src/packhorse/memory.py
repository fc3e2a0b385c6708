"""Memory: where bytes are, who holds them, and where new ones come from.

In: requests for buffers. Out: page-aligned tensors, and a ledger of live and peak bytes by tier and kind. Buffers are mapped
rather than taken from malloc: freed, they go back to the operating system at once, and direct I/O may use them.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from packhorse.errors import BudgetError
from packhorse.units import parse_bytes

PAGE = 4096
HUGE_PAGE = 2 << 20
IDLE = 32 << 20  # bytes of buffers that may wait for their next use
PATIENCE = 2  # takes of other buffers, after which a large one waits no longer
TYPICAL = 400 << 20  # of a process that has loaded torch, where it cannot be told

Tier = str  # "device", "host" or "disk"; on a machine without accelerator the device tier is the working part of RAM


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes (or as `2GiB`); None: no limit but what the machine has."""

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None

    def limit(self, tier: Tier) -> int | None:
        found = {"device": self.device, "host": self.host, "disk": self.disk}[tier]
        return None if found is None else parse_bytes(found)


def read_budget(memory: "int | str | Memory | None", device: str) -> Memory:
    """What the user gave as `memory`: on a machine without accelerator an amount is that of the whole process."""
    if isinstance(memory, Memory):
        budget = memory
    elif device != "cpu":
        budget = Memory(device=memory)
    else:
        budget = Memory(host=memory)
    for tier in ("device", "host", "disk"):
        limit = budget.limit(tier)
        if limit is not None and limit <= 0:
            raise BudgetError(f"memory.{tier} is {limit} bytes, expected more than nothing; leave it out for no limit")
    return budget


def resident_bytes() -> int:
    """Resident memory of this process, as the operating system sees it. Cheap: it is asked often."""
    try:
        return int(os.pread(_open_statm(os.getpid()), 128, 0).split()[1]) * mmap.PAGESIZE
    except (OSError, AttributeError):  # no /proc, or nothing of the kind: macOS, Windows
        return peak_resident_bytes()


@functools.cache
def _open_statm(process: int) -> int:
    """Kept open, for one process: after a fork, what was open tells of the parent."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def peak_resident_bytes() -> int:
    """The most this process ever had."""
    try:
        import resource
    except ImportError:  # Windows
        return TYPICAL
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def settle() -> None:
    """Loads what torch loads on first use, so that nobody takes it for what training takes: 80 MB of Python modules."""
    import torch._dynamo  # as every optimizer does when it is made

    one = torch.ones(1, requires_grad=True)
    torch.autograd.grad(one * 1, one)


class PeakWatch:
    """By how much this process grows from now on, at most; None where the system does not tell."""

    def __init__(self) -> None:
        self._before: int | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
            self._before = self._peak()
        except (OSError, ValueError):
            pass

    def read(self) -> int | None:
        return None if self._before is None else self._peak() - self._before

    def _peak(self) -> int:
        """Not what getrusage says: that includes the process that started this one."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def available_bytes() -> int:
    """Memory that a new allocation may use without pushing anything out; where it is not told, a guess."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30


def total_bytes() -> int:
    """The memory of this computer."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else available_bytes()


class Ledger:
    """Live and peak bytes by tier and kind. Safe to use from any thread."""

    def __init__(self) -> None:
        self.live: Counter[tuple[Tier, str]] = Counter()
        self.peak: Counter[Tier] = Counter()
        self.at_peak: dict[Tier, dict[str, int]] = {}  # what it was made of, by kind
        self._totals: Counter[Tier] = Counter()
        self._lock = threading.Lock()

    def add(self, tier: Tier, kind: str, nbytes: int) -> None:
        """Counts bytes that have come, or, negative, gone."""
        with self._lock:
            self.live[tier, kind] += nbytes
            self._totals[tier] += nbytes
            if self._totals[tier] > self.peak[tier]:
                self.peak[tier] = self._totals[tier]
                self.at_peak[tier] = {kind: n for (where, kind), n in self.live.items() if where == tier and n}

    def total(self, tier: Tier) -> int:
        with self._lock:
            return self._totals[tier]


def map_bytes(nbytes: int) -> Tensor:
    """Zeroed, page-aligned memory of its own; given back when the tensor dies."""
    # Not shared, as Python would have it: shared memory gets no huge pages.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    region = mmap.mmap(-1, max(nbytes, PAGE), **flags)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, where the system allows
    return torch.frombuffer(region, dtype=torch.uint8)[:nbytes]


def find_span(tensor: Tensor) -> int:
    """Elements between its first and its last, which keep its strides; 0 if gaps would waste more than the tensor itself."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span if tensor.numel() and span <= 4 * tensor.numel() else 0


def make_like(tensor: Tensor, allocate: Callable[[int], Tensor]) -> Tensor:
    """A tensor of the same shape and strides in new memory; without the gaps, if there are too many."""
    span = find_span(tensor)
    flat = allocate(max(span, tensor.numel(), 1) * tensor.element_size()).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()) if span else flat[: tensor.numel()].view(tensor.shape)


def never() -> bool:
    return False


class Pool:
    """Buffers that are used again.

    Together with those that wait unused they never take more than was once in use. What waits is given back, down to `IDLE`,
    when it has waited while `PATIENCE` others were taken for the same: the next layer takes at once what the last one gave,
    but what only an embedding fills would lie idle while others need the memory. Where there is room (`has_room`) it waits on:
    the system fills what it hands out with zeros, which takes longer than many a use of it.
    """

    def __init__(self, ledger: Ledger, tier: Tier = "host"):
        self.ledger, self.tier = ledger, tier
        self.has_room: Callable[[], bool] = never
        self.mapped = self._in_use = self._most_in_use = self._idle = 0
        self._takes: Counter[str] = Counter()
        self._waiting: list[tuple[str, int, Tensor]] = []  # what for, and since which take of that kind
        self._taken: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int, kind: str) -> Tensor:
        """A buffer of at least one page; what it holds is left over from its last use."""
        buffer = self._find(-(-nbytes // PAGE) * PAGE, kind)
        self._taken[buffer.data_ptr()] = buffer
        return buffer

    def _find(self, nbytes: int, kind: str) -> Tensor:
        self.ledger.add(self.tier, kind, nbytes)
        with self._lock:
            self._takes[kind] += 1
            self._in_use += nbytes
            self._most_in_use = max(self._most_in_use, self._in_use)
            for i, (_, _, buffer) in enumerate(self._waiting):
                if buffer.nbytes == nbytes:
                    self._idle -= nbytes
                    self.ledger.add(self.tier, "idle buffers", -nbytes)
                    del self._waiting[i]
                    self._drop_old()
                    return buffer
            while self._waiting and self.mapped + nbytes > self._most_in_use:
                self._drop()
            self._drop_old()
            self.mapped += nbytes
        return map_bytes(nbytes)

    def give(self, tensor: Tensor, kind: str) -> None:
        """Takes a buffer back; what is given may be a view of all that was taken."""
        buffer = self._taken.pop(tensor.data_ptr())
        self.ledger.add(self.tier, kind, -buffer.nbytes)
        with self._lock:
            self._in_use -= buffer.nbytes
            self._waiting.append((kind, self._takes[kind], buffer))
            self._idle += buffer.nbytes
            self.ledger.add(self.tier, "idle buffers", buffer.nbytes)
            self._drop_old()

    def shrink(self, idle: int) -> None:
        """Others need the memory: no more than so many bytes wait."""
        with self._lock:
            while self._idle > idle:
                self._drop()

    def _drop_old(self) -> None:
        if self._idle <= IDLE or self.has_room():
            return
        for entry in list(self._waiting):
            if self._idle > IDLE and self._takes[entry[0]] - entry[1] >= PATIENCE:
                self._waiting = [other for other in self._waiting if other is not entry]
                self._unmap(entry[2])

    def _drop(self) -> None:
        """The one that has waited longest."""
        self._unmap(self._waiting.pop(0)[2])

    def _unmap(self, buffer: Tensor) -> None:
        self.mapped -= buffer.nbytes
        self._idle -= buffer.nbytes
        self.ledger.add(self.tier, "idle buffers", -buffer.nbytes)


def _find_in_libc(name: str) -> Callable[..., int] | None:
    """None where there is no glibc: memory is kept or returned as it pleases."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


def release() -> None:
    """Gives back to the system what malloc has that nobody uses."""
    trim = _find_in_libc("malloc_trim")
    if trim is not None:
        trim(0)


def find_heap() -> tuple[int, int]:
    """Where malloc's own memory lies, without pieces that are mapped by themselves; nowhere, where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                start, _, end = line.split()[0].partition("-")
                return int(start, 16), int(end, 16)
    return 0, 0


def take_huge_pages(start: int) -> None:
    """For what malloc has from an address on: fewer steps from an address to its place. A system that has none says so."""
    advise, (begin, end) = _find_in_libc("madvise"), find_heap()
    first = -(-max(start, begin) // HUGE) * HUGE
    if advise is None or end - first < WORTH_HUGE:
        return
    for page in range(first, end - HUGE + 1, HUGE):  # one by one: some are in use in a way that keeps them as they are
        advise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), _COLLAPSE)


LEEWAY = 16 << 20  # growth that is let pass
HUGE = 2 << 20
WORTH_HUGE = 64 << 20  # of a heap, beside the millisecond for each such page
STEADY = 3  # times that steps have ended, or been waited for, until a heap does not grow any more
WORTHWHILE = 4 << 20  # to be given back, beside the milliseconds that takes
LARGE = 16 << 20  # pieces from that size on malloc gives back as soon as they are freed;
LARGEST = 32 << 20  # left alone it learns to keep those below this one, and no larger ones
KEPT_ON_TOP = 64 << 20  # of the heap, before malloc gives back by itself
# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_COLLAPSE = 25  # of madvise, from mman.h


def share_heap() -> None:
    """Threads from now on take memory from the heap of all.

    Of their own ones tens of megabytes stayed resident where threads step optimizers, free as they were, and trimmed.
    """
    set_option = _find_in_libc("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, 1)


class Heap:
    """Says what malloc does with freed memory: give it back, or keep it for the next use.

    By default malloc returns every large piece at once, and each step faults the same gigabytes in again, page by page: a
    fifth of the time of a step on two cores. Kept, pieces of many sizes take up to twice the memory. Small pieces are kept
    in any case, and add up over many segments; `tidy`, asked often, gives back what lies idle when memory has grown so much
    that what comes next would take the process above `ceiling`, the peak that was planned; None: it never does. Of what the
    process has now, `going` bytes are not its own: the model as it was given, before it goes to the store. What others in the
    process take between steps does not count, unless the ceiling is the user's own limit, `strict`.

    Where it never gives back, what two steps have taken becomes huge pages, once.
    """

    def __init__(self, ledger: Ledger, *, keeps: bool, ceiling: int | None = 0, going: int = 0, strict: bool = False):
        self.ledger, self.keeps, self._ceiling, self.strict = ledger, keeps, ceiling, strict
        self._others = self._steps = 0
        self._began_at = find_heap()[1]
        self._left: tuple[int, int] | None = None  # when the last step ended: what there was, and what of it is counted
        self._base = self._floor = self._uncounted_bytes() - going
        self._trim, set_option = _find_in_libc("malloc_trim"), _find_in_libc("mallopt")
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, LARGEST if keeps else LARGE)
            set_option(_TRIM_THRESHOLD, (1 << 31) - 1 if keeps else KEPT_ON_TOP)

    @property
    def ceiling(self) -> int | None:
        return None if self._ceiling is None else self._ceiling + self._others

    def enter(self) -> None:
        """Before a step: what has come since the last one is somebody else's, and no less needed for it.

        What was still counted then and is not now may be gone or lie idle, so that others' part is known only within bounds:
        the least counts. A step that is one segment turns to no other, and gives back here.
        """
        if not self.strict and self._left is not None:
            grown, counted = resident_bytes() - self._left[0], self.ledger.total("host") - self._left[1]
            least, most = sorted((grown, grown - counted))
            others = max(self._others + min(max(least, 0), most), 0)
            self._base, self._floor = self._base + others - self._others, self._floor + others - self._others
            self._others = others
        self.tidy(needed=0)

    def leave(self) -> None:
        """After a step."""
        self._steps += 1
        if self._steps == STEADY and self.keeps and self.ceiling is None:
            take_huge_pages(self._began_at)
        self._left = resident_bytes(), self.ledger.total("host")

    def tidy(self, reusable: int = 0, *, needed: int | None = None, computing: bool = False) -> None:
        """Gives back what lies idle, if what is `needed` next finds no room beside it; where that is not known, in any case.

        Of what lies idle, so much is `reusable` for what comes next. While something is `computing`, what it uses looks idle
        too, so what is left then is no measure for the next time.
        """
        if self._trim is None or self.ceiling is None:
            return
        resident = resident_bytes()
        idle = resident - self.ledger.total("host") - self._floor
        if idle <= WORTHWHILE:
            return
        if needed is None and self.keeps:
            needed = 0
        if idle <= LEEWAY + reusable if needed is None else self._has_room(resident, needed - min(reusable, idle)):
            return
        self._trim(0)
        if not computing:  # rising slowly: an update that is about to end may hold what no longer counts
            self._floor = max(min(self._uncounted_bytes(), self._floor + 2 * LEEWAY), self._base)

    def has_room(self, nbytes: int) -> bool:
        """Below the peak that was planned."""
        return self._has_room(resident_bytes(), nbytes)

    def _has_room(self, resident: int, nbytes: int) -> bool:
        return self.ceiling is None or resident + max(nbytes, 0) <= self.ceiling

    def _uncounted_bytes(self) -> int:
        """What the process has beside the tensors that are counted: code, records, and what malloc keeps."""
        return resident_bytes() - self.ledger.total("host")

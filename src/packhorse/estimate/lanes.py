"""Lanes: clocks of what a step keeps busy, such as compute, the disk, links and the network.

In: jobs, with when they may start and how long they take on a machine. Out: when each is done. Each lane knows when it is free.
"""

import math
from collections import Counter, defaultdict

from packhorse.machine import Machine

_LANES = {"read": "disk", "write": "disk", "up": "host to device", "down": "device to host"}  # links that share one

_BESIDE = {"read": "beside disk", "write": "beside disk", "network": "beside network"}  # what takes from the cores


class Lanes:
    """`now` is the time of the thread that computes, `debt` what others have taken from its cores since it last did."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.on_cpu = machine.device == "cpu"
        self.now = self.debt = 0.0
        self.busy: defaultdict[str, float] = defaultdict(float)  # seconds
        self.moved: Counter[str] = Counter()  # bytes, by link
        self._free: defaultdict[str, float] = defaultdict(float)
        self._urgent: defaultdict[str, float] = defaultdict(float)  # when a lane is free for those

    def work(self, lane: str, start: float, seconds: float, *, urgent: bool = False) -> float:
        """A job on a lane: when it is done. The urgent pass those that wait."""
        self.busy[lane] += seconds
        if urgent:
            self._urgent[lane] = max(start, self._urgent[lane]) + seconds
            self._free[lane] = max(self._free[lane] + seconds, self._urgent[lane])
            return self._urgent[lane]
        self._free[lane] = max(start, self._free[lane]) + seconds
        return self._free[lane]

    def compute(self, start: float, seconds: float) -> None:
        """By the thread that computes, which first makes up for what was taken from it."""
        self.now = self.work("compute", max(self.now, start) + self.debt, seconds)
        self.debt = 0.0

    def wait(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def move(self, link: str, start: float, nbytes: int, *, urgent: bool = False) -> float:
        """Bytes over a link. Reads and writes share the disk."""
        if not nbytes:
            return start
        self.moved[link] += nbytes
        if link in _BESIDE:
            self.debt += nbytes / self.machine.kernels.get(_BESIDE[link], math.inf)
        rate = self.machine.bandwidth["link" if link in ("up", "down") else link]
        return self.work(_LANES.get(link, link), start, nbytes / rate, urgent=urgent)

    def bring(self, start: float, nbytes: int) -> float:
        """From the host to the device, where there is one."""
        return start if self.on_cpu else self.move("up", start, nbytes)

    def take_home(self, start: float, nbytes: int) -> float:
        return start if self.on_cpu else self.move("down", start, nbytes)

    def fill(self, nbytes: int) -> float:
        """Seconds of a core until a buffer that is new has been filled: the system hands out pages one by one."""
        return nbytes / self.machine.kernels.get("fresh", math.inf)

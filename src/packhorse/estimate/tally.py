"""The tally: bytes that come and go in a walk.

In: bytes by tier and kind, at once or from some moment on. Out: the peak of each tier, and what it is made of.
"""

import heapq
from collections import Counter
from collections.abc import Mapping

from packhorse.memory import IDLE, Tier

_POOLED = ("weights", "update", "stash")  # in buffers that serve again, where the model is on disk


class Tally:
    """`is_over` where a tier has exceeded its limit."""

    def __init__(self, limits: Mapping[Tier, int], *, pools: bool):
        self.limits, self.pools = limits, pools
        self.live: Counter[tuple[Tier, str]] = Counter()
        self.peak: dict[Tier, int] = {}
        self.at_peak: dict[Tier, dict[str, int]] = {}
        self.is_over = False
        self._totals: Counter[Tier] = Counter()
        self._releases: list[tuple[float, Tier, str, int]] = []
        self._most_pooled = 0

    def add(self, tier: Tier, kind: str, nbytes: int) -> None:
        self.live[tier, kind] += nbytes
        self._totals[tier] += nbytes
        if nbytes > 0:
            self.note(tier)

    def note(self, tier: Tier, working: int = 0, kind: str = "activations") -> None:
        """Takes note of a peak, with so many bytes in use for a moment."""
        idle = self._idle_bytes() if tier == "host" else 0
        if self._totals[tier] + working + idle > self.peak.get(tier, 0):
            self.peak[tier] = self._totals[tier] + working + idle
            self.is_over = self.is_over or self.peak[tier] > self.limits.get(tier, self.peak[tier])
            found = {name: n for (where, name), n in self.live.items() if where == tier and n}
            self.at_peak[tier] = found | {k: n for k, n in ((kind, working), ("idle buffers", idle)) if n}

    def later(self, moment: float, tier: Tier, kind: str, nbytes: int) -> None:
        """So many bytes go then."""
        heapq.heappush(self._releases, (moment, tier, kind, nbytes))

    def release(self, now: float) -> None:
        """What was to go by now."""
        while self._releases and self._releases[0][0] <= now:
            _, tier, kind, nbytes = heapq.heappop(self._releases)
            self.add(tier, kind, -nbytes)

    def drop_idle(self) -> None:
        """Where there is no room for what comes, idle buffers go."""
        self._most_pooled = 0

    def _idle_bytes(self) -> int:
        """Of the buffers that serve again: what is not in use, but was for segments like this, up to what may wait."""
        used = sum(self.live["host", kind] for kind in _POOLED) if self.pools else 0
        self._most_pooled = max(self._most_pooled, used)
        return min(IDLE, self._most_pooled - used)

"""Lowering: passes over a list of actions, each adding one concern.

In: the compute actions of a generator. Out: the list that runs, with movement, update and commit. Every pass is a function
from list to list, so a strategy is a generator and a choice of passes.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from packhorse.schedule import Action

COMPUTE = ("F", "R", "B", "W")
UNDER_WAY = 2.0  # pieces of sums at a time: one on the network, one to follow it
LEAST = 0.1  # of the time of a piece, however small it is


def recompute(actions: Sequence[Action], kept: Collection[int]) -> list[Action]:
    """Before a backward whose graph is not kept, the segment runs forward again.

    Kept are the graphs of the segments in `kept`, and those whose backward follows at once.
    """
    lowered: list[Action] = []
    for action in actions:
        kind, s, k = action
        follows = bool(lowered) and lowered[-1] == Action("F", s, k)
        if kind == "B" and s not in kept and not follows:
            lowered.append(Action("R", s, k))
        lowered.append(action)
    return lowered


def stash(actions: Sequence[Action]) -> list[Action]:
    """Boundary values and gradients leave the device after they are made and come back before they are used."""
    lowered: list[Action] = []
    backward = {a.segment for a in actions if a.kind == "B" and a.segment is not None}
    first, latest = min(backward, default=-1), max(backward, default=-1)
    here = [a.segment for a in actions if a.segment is not None]  # on a rank, those of its stage
    lowest, last = min(here), max(here)
    for action in actions:
        kind, s, k = action
        assert s is not None
        if kind == "R" or (kind == "F" and s > lowest):
            lowered.append(Action("RESTORE", s, k))
        if kind == "B" and s != latest:
            lowered.append(Action("RESTOREG", s, k))
        lowered.append(action)
        if kind == "F" and s < last:
            lowered.append(Action("STASH", s, k))
        if kind == "B" and s != first:
            lowered.append(Action("STASHG", s, k))
    return lowered


def fetch(actions: Sequence[Action], stays: Collection[int] = ()) -> list[Action]:
    """Each run of uses of a segment is preceded by its FETCH and followed by its EVICT.

    A run ends where compute turns to another segment. Segments in `stays` stay from their first use to their last: a graph
    that is kept holds on to the parameters it was made with.
    """
    compute = [(i, a.segment) for i, a in enumerate(actions) if a.kind in COMPUTE and a.segment is not None]
    uses: dict[int, list[int]] = {}
    for i, s in compute:
        uses.setdefault(s, []).append(i)
    first = {u[0]: s for s, u in uses.items()}
    last = {u[-1]: s for s, u in uses.items()}
    for (i, s), (j, t) in itertools.pairwise(compute):
        if s != t and s not in stays:
            last[i] = s
        if s != t and t not in stays:
            first[j] = t
    lowered: list[Action] = []
    for i, action in enumerate(actions):
        if i in first:
            lowered.append(Action("FETCH", first[i]))
        lowered.append(action)
        if i in last:
            lowered.append(Action("EVICT", last[i]))
    return lowered


def prefetch(actions: Sequence[Action], sizes: Mapping[int, int], budget: int, *, distance: int = 2) -> list[Action]:
    """FETCH moves ahead, past other segments' compute, as long as what is then fetched stays within `budget` bytes.

    RESTORE and RESTOREG move ahead by at most `distance` compute actions: what they bring is small, but it adds up.
    A fetch stays behind the eviction that makes room for it, and behind its own segment's previous eviction.
    """
    lowered: list[Action] = []
    room = _Room(budget)
    for action in actions:
        kind, s, _ = action
        at = len(lowered)
        if kind == "FETCH" and s is not None:
            at = room.fetch(s, sizes[s], at)
        elif kind in ("RESTORE", "RESTOREG"):
            at = _ahead(lowered, action, distance)
            room.shift(at)
        elif kind == "EVICT" and s is not None:
            room.evict(s, sizes[s], at)
        lowered.insert(at, action)
    return lowered


class _Room:
    """Where a fetch may go: behind the last one, and behind the evictions since then that make room for it.

    Since the last fetch what is fetched has only become less, so the first evictions are those that stand in the way.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.live = 0  # bytes fetched, at the end of the list
        self._after = 0  # where the last fetch stands, plus one
        self._evictions: deque[list[int]] = deque()  # since then: segment, place, bytes fetched before it
        self._shifted = self._added = 0  # to be added to their places and bytes

    def fetch(self, s: int, size: int, end: int) -> int:
        at = self._after
        if self.live + size > self.budget:
            at = end
            self._evictions.clear()
        own = max((i for i, (other, _, _) in enumerate(self._evictions) if other == s), default=-1)
        while self._evictions and (own >= 0 or self._evictions[0][2] + self._added + size > self.budget):
            at = self._evictions.popleft()[1] + self._shifted + 1
            own -= 1
        self._after = at + 1
        self._shifted += 1
        self._added += size
        self.live += size
        return at

    def evict(self, s: int, size: int, at: int) -> None:
        self._evictions.append([s, at - self._shifted, self.live - self._added])
        self.live -= size

    def shift(self, at: int) -> None:
        """Something is put in at a place."""
        for eviction in reversed(self._evictions):
            if eviction[1] + self._shifted < at:
                break
            eviction[1] += 1
        if at < self._after:
            self._after += 1


def _ahead(lowered: Sequence[Action], action: Action, distance: int) -> int:
    """Where a restore may go: not before what it restores was stashed, nor past `distance` compute actions."""
    at, passed = len(lowered), 0
    made = "STASH" if action.kind == "RESTORE" else "STASHG"
    while at > 0:
        before = lowered[at - 1]
        if before.kind == made and before.microbatch == action.microbatch:
            break
        if before.kind in ("RESTORE", "RESTOREG") or (
            before.kind in COMPUTE and before[1:] == action[1:] and before.kind == "F"
        ):
            break
        passed += before.kind in COMPUTE
        if passed > distance:
            break
        at -= 1
    return at


def update(
    actions: Sequence[Action], num_microbatches: int, *, deferred: bool = False, parks: Collection[int] = ()
) -> list[Action]:
    """A segment is updated as soon as its gradient is complete, or, deferred, when all are and the norm is known.

    `parks` are segments whose gradient, or a part of it, waits for an earlier segment that uses the same parameter.
    """
    lowered: list[Action] = []
    done: list[int] = []
    split = {a.segment for a in actions if a.kind == "W"}
    for action in actions:
        lowered.append(action)
        kind, s, k = action
        if kind == ("W" if s in split else "B") and s is not None and k == num_microbatches - 1:
            done.append(s)
            if deferred or s in parks:
                lowered.append(Action("PARK", s))
            if not deferred:
                lowered.append(Action("UPDATE", s))
    if deferred:
        lowered.append(Action("NORM"))
        lowered += [Action("UPDATE", s) for s in sorted(done)]
    return [*lowered, Action("COMMIT")]


def roll_forward(actions: Sequence[Action]) -> list[Action]:
    """For a store with one version: a step that has updated something can be finished, should it be interrupted.

    Before the first update what that takes is written down; and a segment is updated when the gradients at its boundary,
    which could not be made again afterwards, have been stashed.
    """
    stashed = {a.segment: i for i, a in enumerate(actions) if a.kind == "STASHG"}
    moved = {
        a: stashed[a.segment] for i, a in enumerate(actions) if a.kind == "UPDATE" and stashed.get(a.segment, -1) > i
    }
    behind = {i: update for update, i in moved.items()}
    lowered: list[Action] = []
    for i, action in enumerate(actions):
        lowered += [] if action in moved else [action]
        lowered += [behind[i]] if i in behind else []
    first = next((i for i, a in enumerate(lowered) if a.kind == "UPDATE"), len(lowered) - 1)
    return [*lowered[:first], Action("INTENT"), *lowered[first:]]


# -- between ranks


def exchange(
    actions: Sequence[Action],
    receives: tuple[Collection[int], Collection[int]],
    sends: tuple[Collection[int], Collection[int]],
    distance: int,
) -> list[Action]:
    """Segments receive what other ranks made before they run, values forward and gradients backward, and send what they made.

    Receives are posted up to `distance` runs of segments ahead, in the order in which they are needed.
    """
    before = {"F": ("RECV", receives[0]), "B": ("RECVG", receives[1])}
    behind = {"F": ("SEND", sends[0]), "B": ("SENDG", sends[1])}
    lowered: list[Action] = []
    starts: list[int] = []  # where the last runs of segments begin
    posted = 0  # behind the last receive
    for action in actions:
        kind, s, k = action
        if kind in before and s in before[kind][1]:
            at = max(posted, starts[-distance] if len(starts) >= distance > 0 else 0 if distance else len(lowered))
            lowered.insert(at, Action(before[kind][0], s, k))
            starts = [start + (start >= at) for start in starts]
            posted = at + 1
        if kind in COMPUTE:
            starts.append(len(lowered))
        lowered.append(action)
        if kind in behind and s in behind[kind][1]:
            lowered.append(Action(behind[kind][0], s, k))
    return lowered


def tell_losses(actions: Sequence[Action], last: int) -> list[Action]:
    """All ranks learn the losses: from the one that runs the last segment, when it has; the others can listen at once."""
    ends = [i for i, a in enumerate(actions) if a.kind == "F" and a.segment == last]
    at = ends[-1] + 1 if ends else 0
    return [*actions[:at], Action("LOSS"), *actions[at:]]


def reduce(
    actions: Sequence[Action], pieces: Sequence[Sequence[float]] = (), pace: Sequence[float] = ()
) -> list[Action]:
    """Complete gradients are summed over replicas before anything else is done with them, each segment's in its `pieces`.

    Those are parts of a whole one. `pace` tells for each segment how many whole ones pass over the network while it runs
    backward. With it, no more are begun than will have passed, and one or two, those of the first segment first, which the next
    step needs first; what is left goes at the end. All replicas have the same list, and so the same order of sums. Without it,
    pieces are begun as they come.
    """
    lowered: list[Action] = []
    begun: set[int] = set()
    split = {a.segment for a in actions if a.kind == "W"}
    waiting: list[tuple[int, int]] = []
    under_way = 0.0

    def begin(most: float) -> None:
        nonlocal under_way
        while waiting and under_way < most:
            s, i = heapq.heappop(waiting)
            lowered.append(Action("SUM", s, i))
            under_way += max(pieces[s][i], LEAST) if pieces else 1.0

    for action in actions:
        kind, s, _ = action
        if kind in ("PARK", "PASS", "UPDATE") and s is not None and s not in begun:
            begun.add(s)
            lowered.append(Action("REDUCE", s))
            for i in range(len(pieces[s]) if pieces else 1):
                heapq.heappush(waiting, (s, i))
            begin(UNDER_WAY if pace else math.inf)
        passing = pace[s] / (2 if s in split else 1) if kind in ("B", "W") and s is not None and pace else 0.0
        if passing:  # the network is not idle before the next occasion to begin one
            begin(passing + UNDER_WAY)
        if kind in ("NORM", "COMMIT"):
            begin(math.inf)
        lowered.append(action)
        under_way = max(under_way - passing, 0.0)
    return lowered


def share(
    actions: Sequence[Action],
    passes: Collection[int],
    takes: Collection[int],
    tells: Collection[int],
    hears: Collection[int],
) -> list[Action]:
    """Parameters that several ranks use: one of them updates, with the gradients of all, and tells the others."""
    lowered: list[Action] = []
    complete: set[int | None] = set()
    for action in actions:
        kind, s, _ = action
        if kind in ("PARK", "UPDATE") and s not in complete:
            complete.add(s)
            lowered += [Action("TAKE", s)] * (s in takes) + [Action("PASS", s)] * (s in passes)
        if kind == "COMMIT":
            lowered += [Action("HEAR", t) for t in sorted(hears)]
        lowered.append(action)
        if kind == "UPDATE" and s in tells:
            lowered.append(Action("TELL", s))
    return lowered


def finish(actions: Sequence[Action], updated: Collection[int]) -> list[Action]:
    """What is left of a step that was interrupted when the segments `updated` had been updated, and the journal said so.

    Updated eagerly, all segments from some one on were: those before it run again, from the batch, and go on with the
    gradients that were stashed. Deferred, all gradients are parked.
    """
    if any(action.kind == "NORM" for action in actions):
        return [a for a in actions if a.kind in ("UPDATE", "COMMIT") and a.segment not in updated]
    return [a for a in actions if a.segment is None or a.segment < min(updated)]

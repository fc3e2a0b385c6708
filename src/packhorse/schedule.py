"""Schedules: what is computed in which order, as a list of small values.

In: how many segments and microbatches. Out: a list of `Action`, compute only; the passes in `lowering` add movement. The same
list is checked, estimated, run and shown: `12F3` is the forward of segment 12 on microbatch 3, `7UPDATE` the update of
segment 7.
"""

import itertools
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, overload

from packhorse.errors import ScheduleError

# kind -> what it means, and whether it names a segment and a microbatch.
KINDS: dict[str, tuple[str, bool, bool]] = {
    "F": ("run a segment forward", True, True),
    "R": ("run it forward again, from what was stashed, to have its graph", True, True),
    "B": ("run it backward; where a W follows, only to its inputs", True, True),
    "W": ("the gradients of its parameters, which B left for later", True, True),
    "FETCH": ("start to bring its parameters to the device", True, False),
    "EVICT": ("let them go", True, False),
    "STASH": ("move what it made away from the device", True, True),
    "RESTORE": ("start to bring what it reads back", True, True),
    "STASHG": ("move the gradients it made of its inputs away from the device", True, True),
    "RESTOREG": ("start to bring the gradients it needs back", True, True),
    "RECV": ("start to receive what it reads from other ranks", True, True),
    "SEND": ("start to send what it made to ranks that read it", True, True),
    "RECVG": ("start to receive the gradients it needs from other ranks", True, True),
    "SENDG": ("start to send the gradients it made of its inputs to the ranks they belong to", True, True),
    "LOSS": ("the losses are known here: start to tell all ranks", False, False),
    "REDUCE": ("its gradients are complete on this rank: they are to be summed over replicas", True, False),
    "SUM": ("start to sum a piece of them, which the second number tells", True, True),
    "PASS": ("start to send its gradients of parameters that another rank updates", True, False),
    "TAKE": ("start to receive gradients of parameters that are updated here from other ranks", True, False),
    "TELL": ("when its update is done: send parameters that other ranks use too", True, False),
    "HEAR": ("start to receive parameters that another rank updates", True, False),
    "PARK": ("its gradients are complete: let them wait in the store", True, False),
    "NORM": ("all gradients are complete: find the global norm", False, False),
    "INTENT": ("write down what finishing the step takes: from here on it is not undone any more", False, False),
    "UPDATE": ("its gradients are complete: start to update its parameters", True, False),
    "COMMIT": ("the step is done: make it the store's version", False, False),
}

_TEXT = re.compile(r"(\d*)([A-Z]+)(\d*)")


class Action(NamedTuple):
    """One step of a schedule. Text and value convert into each other exactly."""

    kind: str
    segment: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        segment = "" if self.segment is None else self.segment
        return f"{segment}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = _TEXT.fullmatch(text)
        if not match or match[2] not in KINDS:
            raise ScheduleError(
                f"{text!r} is no action; expected such as 12F3, 12FETCH or COMMIT, of {', '.join(KINDS)}"
            )
        _, takes_segment, takes_microbatch = KINDS[match[2]]
        if bool(match[1]) != takes_segment or bool(match[3]) != takes_microbatch:
            names = ["a segment before it"] * takes_segment + ["a microbatch after it"] * takes_microbatch
            raise ScheduleError(f"{text!r} is no action; {match[2]} takes {' and '.join(names) or 'no number'}")
        return cls(match[2], int(match[1]) if match[1] else None, int(match[3]) if match[3] else None)


class Actions(Sequence[Action]):
    """A list of actions for as long as a program lives: of a deep model it is long, so it is packed."""

    _NOTHING = -1  # where an action names no segment, or no microbatch

    def __init__(self, actions: Iterable[Action]):
        self._kinds, self._numbers = bytearray(), array("i")
        for kind, *places in actions:
            self._kinds.append(_NUMBERS[kind])
            self._numbers.extend(self._NOTHING if place is None else place for place in places)

    def __len__(self) -> int:
        return len(self._kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> list[Action]: ...
    def __getitem__(self, index: int | slice) -> Action | list[Action]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._unpack(self._kinds[index], *self._numbers[2 * index : 2 * index + 2])

    def __iter__(self) -> Iterator[Action]:
        numbers = iter(self._numbers)
        return map(self._unpack, self._kinds, numbers, numbers)

    def _unpack(self, kind: int, segment: int, microbatch: int) -> Action:
        return Action(
            _KINDS[kind],
            None if segment == self._NOTHING else segment,
            None if microbatch == self._NOTHING else microbatch,
        )


_KINDS = tuple(KINDS)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def parse(text: str) -> list[Action]:
    """Actions from text, separated by white space."""
    return [Action.parse(word) for word in text.split()]


def show(actions: Iterable[Action], mark: int | None = None, around: int = 8) -> str:
    """The list as text; with `mark`, only the neighbourhood of that action, which is put in brackets."""
    words = [str(a) for a in actions]
    if mark is None:
        return " ".join(words)
    start, stop = max(0, mark - around), mark + around + 1
    shown = [f"[{w}]" if i == mark else w for i, w in enumerate(words[start:stop], start)]
    return " ".join(["..."] * (start > 0) + shown + ["..."] * (stop < len(words)))


def resident(num_segments: int, num_microbatches: int, backward: Collection[int]) -> list[Action]:
    """One microbatch after another through the whole model, forward and backward, as the plain loop does."""
    actions: list[Action] = []
    for k in range(num_microbatches):
        actions += [Action("F", s, k) for s in range(num_segments)]
        actions += [Action("B", s, k) for s in reversed(range(num_segments)) if s in backward]
    return actions


def relay(num_segments: int, num_microbatches: int, backward: Collection[int]) -> list[Action]:
    """Layer to layer: all microbatches through a segment before the next is touched, forward, then backward.

    The last segment goes straight from forward to backward, so its graph is never needed twice.
    """
    last, microbatches = num_segments - 1, range(num_microbatches)
    actions = [Action("F", s, k) for s in range(last) for k in microbatches]
    for k in microbatches:
        actions.append(Action("F", last, k))
        actions += [Action("B", last, k)] * (last in backward)
    actions += [Action("B", s, k) for s in reversed(range(last)) if s in backward for k in microbatches]
    return actions


def forward(num_segments: int, num_microbatches: int) -> list[Action]:
    """Evaluation and prediction: the first half of a relay."""
    return [Action("F", s, k) for s in range(num_segments) for k in range(num_microbatches)]


class Turn(NamedTuple):
    """What a rank of a pipeline does at a time: all segments of a stage on a microbatch, F, B or W."""

    kind: str
    stage: int
    microbatch: int


def pipeline(
    place: int,
    stages: Sequence[Sequence[int]],
    num_ranks: int,
    num_microbatches: int,
    backward: Collection[int],
    ahead: int = 0,
    *,
    splits: bool = False,
    group: int = 1,
    gathers: bool = False,
) -> list[Action]:
    """The order in which the rank at a place runs its stages, of which each `num_ranks`-th is its own.

    One forward, one backward: a rank runs a backward as soon as it can, and otherwise a forward, but has no more
    microbatches under way than it takes to keep all ranks busy, and `ahead` more for each rank behind it, which hide the
    time of messages. With several stages a rank, microbatches go through each in groups of as many as there are ranks.

    With `splits`, a backward leaves the gradients of parameters for later: others wait only for those of its inputs, and
    what is left fills the time in which a rank would wait itself, for messages too, the longer the more are `ahead`.
    Microbatches go in groups of `group`, all of them through a segment before the next, as in a relay: then what a segment
    needs is brought once for all of them. What nobody waits for at the end goes likewise if the rank `gathers` it: gradients
    of later segments are then complete, and under way to other replicas, while those of earlier ones are still computed.
    """
    differentiable = [[s for s in stage if s in backward] for stage in stages]
    first = next((c for c, segments in enumerate(differentiable) if segments), 0)  # nobody waits for its backward
    backwards = [
        ("BW" if splits and c != first else "B") if segments else "" for c, segments in enumerate(differentiable)
    ]
    rounds = -(-num_microbatches // group)
    own, tail = _take_turns(num_ranks, tuple(backwards), rounds, ahead, first if splits else None)[place]

    def spread(turn: Turn, segments: Iterable[int]) -> list[Action]:
        members = range(turn.microbatch * group, min((turn.microbatch + 1) * group, num_microbatches))
        return [Action(turn.kind, s, k) for s in segments for k in members]

    num_gathered = len(tail) if gathers else 0
    actions: list[Action] = []
    for turn in own[: len(own) - num_gathered]:
        actions += spread(turn, stages[turn.stage] if turn.kind == "F" else differentiable[turn.stage][::-1])
    for turn, i in _by_segment(tail[:num_gathered], len(differentiable[own[-1].stage])):
        actions += spread(turn, [differentiable[turn.stage][-1 - i]])
    return actions


class _Wait(NamedTuple):
    """A turn, when it begins, how long it takes, and when what it waits for is there."""

    turn: Turn
    start: int
    length: int
    ready: int


def _by_segment(tail: Sequence[_Wait], num_segments: int) -> Iterator[tuple[Turn, int]]:
    """Turns on following microbatches, a segment at a time: of what is ready, that which lags behind most."""
    if not tail:
        return
    now, done = float(tail[0].start), [0] * len(tail)
    while done[-1] < num_segments:
        before = [num_segments + 1, *done]  # a segment takes microbatches in order
        possible = [(d, i) for i, d in enumerate(done) if d < min(num_segments, before[i])]
        ready = [(d, i) for d, i in possible if tail[i].ready <= now]
        if not ready:
            now = min(tail[i].ready for _, i in possible)
            continue
        d, i = min(ready)
        yield tail[i].turn, d
        done[i] += 1
        now += tail[i].length / num_segments


@lru_cache(maxsize=32)  # every rank asks for its own
def _take_turns(
    num_ranks: int, backwards: tuple[str, ...], num_microbatches: int, ahead: int, patient: int | None
) -> list[tuple[list[Turn], list[_Wait]]]:
    """Plays the pipeline: forwards take 2, backwards, which each stage has as a whole, in halves, or not at all, 4. For each
    rank its turns, and those of the last for which no other rank waits.

    Who is free does what is ready: backwards, then forwards, then what backwards left. With a `patient` stage, whose backward
    nobody waits for and which comes last too, a message takes 1 for each that is `ahead`.
    """
    num_stages, lag = len(backwards), 0 if patient is None else ahead
    behind = [next((d for d in range(c + 1, num_stages) if backwards[d]), None) for c in range(num_stages)]
    urgency = {(kind, c): "BFW".index(kind) for c in range(num_stages) for kind in "F" + backwards[c]}
    urgency |= {("B", patient): 2} if patient is not None and backwards[patient] else {}
    ends: dict[Turn, int] = {}
    turns: list[list[Turn]] = [[] for _ in range(num_ranks)]
    free = [0] * num_ranks
    next_turn = dict.fromkeys(urgency, 0)
    limits = [_most_under_way(rank, num_ranks, num_stages, ahead) for rank in range(num_ranks)]
    under_way, left = [0] * num_ranks, [0] * num_ranks  # forwards without their backwards; graphs

    def ready_at(turn: Turn) -> int | None:
        """None: what it waits for has no time yet."""
        kind, c, k = turn
        if kind == "F" and c == 0:
            return 0
        following = behind[c]
        if kind == "F":
            awaited = Turn("F", c - 1, k)
        elif kind == "W":
            awaited = Turn("B", c, k)
        else:
            awaited = Turn("F", c, k) if following is None else Turn("B", following, k)
        end = ends.get(awaited)
        return end if end is None or awaited.stage == c else end + lag

    def order_of(turn: Turn) -> tuple[int, int, int]:
        group = turn.microbatch // num_ranks if num_stages > num_ranks else 0
        return group, (turn.stage if turn.kind == "F" else -turn.stage), turn.microbatch

    while any(k < num_microbatches for k in next_turn.values()):
        offers: list[tuple[int, bool, int, tuple[int, int, int], int, Turn]] = []
        for (kind, c), k in next_turn.items():
            turn, rank = Turn(kind, c, k), c % num_ranks
            ready = ready_at(turn) if k < num_microbatches else None
            if ready is not None:
                is_over = bool(backwards[c]) and (under_way[rank] >= limits[rank] or left[rank] >= limits[0])
                is_over = is_over and kind == "F"
                offers.append((max(ready, free[rank]), is_over, urgency[kind, c], order_of(turn), rank, turn))
        within = [offer for offer in offers if not offer[1]] or offers  # nobody may go on: one has more under way, then
        start, _, _, _, rank, turn = min(within)
        kind, c, _ = turn
        free[rank] = ends[turn] = start + (4 if kind == backwards[c] else 2)
        turns[rank].append(turn)
        next_turn[kind, c] += 1
        if backwards[c]:
            under_way[rank] += (kind == "F") - (kind == "B")
            left[rank] += (kind == "F") - (kind == backwards[c][-1])

    def find_tail(own: Sequence[Turn]) -> list[_Wait]:
        last = own[-1]
        if last.kind != "W" and (last.kind, last.stage) != ("B", patient):
            return []
        alike = itertools.takewhile(lambda turn: turn[:2] == last[:2], reversed(own))
        length = 4 if last.kind == backwards[last.stage] else 2
        return [_Wait(turn, ends[turn] - length, length, ready_at(turn) or 0) for turn in alike][::-1]

    return [(own, find_tail(own)) for own in turns]


def _most_under_way(rank: int, num_ranks: int, num_stages: int, ahead: int) -> int:
    """Forwards of a rank without their backwards."""
    behind, rounds = num_ranks - 1 - rank, num_stages // num_ranks
    if rounds == 1:
        return 1 + behind * (1 + ahead)
    return 1 + 2 * behind + (rounds - 1) * num_ranks + ahead * behind


def check(
    actions: Sequence[Action],
    num_segments: int,
    num_microbatches: int,
    backward: Collection[int],
    *,
    moves: bool = True,
    parked: Collection[int] = (),
    local: Collection[int] | None = None,
    receives: tuple[Collection[int], Collection[int]] = ((), ()),
) -> None:
    """Raises a `ScheduleError` that shows the first illegal action in its place and says why it is illegal.

    `backward` are the segments that have a gradient to compute (none in evaluation). With `moves` the list must fetch what
    it runs and restore what it stashed; without, only the order of compute is looked at, as a generator emits it. The
    gradients of `parked` were parked before the list begins: it finishes a step that was interrupted. On a rank that runs
    only `local` segments, those in `receives` must get what others made, values or gradients, before they run.
    """
    here = frozenset(range(num_segments) if local is None else local)
    state = _State(num_segments, num_microbatches, frozenset(backward) & here, moves, frozenset(parked), here, receives)
    state.split = frozenset(s for kind, s, _ in actions if kind == "W" and s is not None)
    for i, action in enumerate(actions):
        reason = state.advance(action)
        if reason:
            raise ScheduleError(f"{action} is illegal here: {reason}\n  {show(actions, i)}")
    reason = state.finish()
    if reason:
        raise ScheduleError(f"the schedule ends too early: {reason}\n  {show(actions, len(actions) - 1)}")


class _State:
    """What has been done so far. `advance` returns why an action may not come now, or an empty text."""

    def __init__(
        self,
        num_segments: int,
        num_microbatches: int,
        backward: frozenset[int],
        moves: bool,
        before: frozenset[int],
        local: frozenset[int],
        receives: tuple[Collection[int], Collection[int]],
    ):
        self.num_segments, self.num_microbatches, self.local = num_segments, num_microbatches, local
        self.receives = receives
        self.backward, self.moves, self.before = backward, moves, before
        self.fetched: set[int] = set()
        self.forwards = [0] * num_segments  # microbatches run forward so far
        self.backwards = [0] * num_segments
        self.split: frozenset[int] = frozenset()  # segments whose backward leaves something for later
        self.rests = [0] * num_segments  # microbatches for which that is done
        self.graphs: set[tuple[int, int]] = set()
        self.away: set[tuple[str, int, int]] = set()  # stashed: values or gradients, segment, microbatch
        self.restored: set[tuple[str, int, int]] = set()
        self.received: set[tuple[str, int, int]] = set()
        self.passed: set[tuple[str, int]] = set()  # what was started once for a segment
        self.summed: set[tuple[int, int]] = set()
        self.parked = set(before)
        self.normed = self.intended = False
        self.updated: set[int] = set()
        self.committed = False

    def advance(self, action: Action) -> str:
        kind, s, k = action
        if self.committed:
            return "nothing may follow COMMIT"
        if s is not None and not 0 <= s < self.num_segments:
            return f"there are {self.num_segments} segments"
        if k is not None and kind != "SUM" and not 0 <= k < self.num_microbatches:
            return f"there are {self.num_microbatches} microbatches"
        of_microbatch: dict[str, Callable[[int, int], str]] = {
            "F": self._forward,
            "R": self._recompute,
            "B": self._backward,
            "W": self._rest,
            "STASH": self._stash,
            "RESTORE": self._restore,
            "STASHG": self._stash_gradients,
            "RESTOREG": self._restore_gradients,
            "RECV": partial(self._receive, "values"),
            "RECVG": partial(self._receive, "gradients"),
            "SEND": self._send,
            "SENDG": self._send_gradients,
            "SUM": self._sum,
        }
        of_segment: dict[str, Callable[[int], str]] = {
            "FETCH": self._fetch,
            "EVICT": self._evict,
            "PARK": self._park,
            "UPDATE": self._update,
            "REDUCE": partial(self._once, "REDUCE"),
            "PASS": partial(self._once, "PASS"),
            "TAKE": partial(self._once, "TAKE"),
            "TELL": partial(self._once, "TELL"),
            "HEAR": partial(self._once, "HEAR"),
        }
        if s is not None and k is not None:
            return of_microbatch[kind](s, k)
        if s is not None:
            return of_segment[kind](s)
        return {"NORM": self._norm, "INTENT": self._intent, "COMMIT": self._commit, "LOSS": self._loss}[kind]()

    def finish(self) -> str:
        for s in self.local - self.before:
            if self.forwards[s] < self.num_microbatches:
                return f"segment {s} ran forward on {self.forwards[s]} of {self.num_microbatches} microbatches"
            if s in self.backward and self.backwards[s] < self.num_microbatches:
                return f"segment {s} ran backward on {self.backwards[s]} of {self.num_microbatches} microbatches"
            if self.moves and s in self.backward and s not in self.updated:
                return f"segment {s} was not updated"
        if self.moves and self.fetched:
            return f"segment {min(self.fetched)} was not evicted"
        return "" if self.committed or not (self.moves and self.backward) else "the step was not committed"

    def _needs(self, s: int) -> str:
        if s not in self.local:
            return f"segment {s} is another rank's"
        if s in self.updated:
            return f"segment {s} is already updated, and would run on the next step's parameters"
        return f"segment {s} is not fetched" if self.moves and s not in self.fetched else ""

    def _has_inputs(self, s: int, k: int) -> str:
        """Values of the segment before; those of earlier ones have been made before those."""
        if s in self.receives[0] and ("values", s, k) not in self.received:
            return f"what other ranks made of microbatch {k} is not received"
        if s and ("values", s - 1, k) in self.away and ("values", s, k) not in self.restored:
            return f"what segment {s - 1} made of microbatch {k} is stashed and was not restored"
        return ""

    def _forward(self, s: int, k: int) -> str:
        if self.forwards[s] != k:
            return f"microbatches pass a segment in order, and {self.forwards[s]} is next"
        if s and s - 1 in self.local and self.forwards[s - 1] <= k:
            return f"segment {s - 1} has not run on microbatch {k}"
        reason = self._needs(s) or self._has_inputs(s, k)
        self.forwards[s] += 1
        self.graphs.add((s, k))
        self.restored.discard(("values", s, k))
        return reason

    def _recompute(self, s: int, k: int) -> str:
        if self.forwards[s] <= k:
            return f"{s}F{k} has not run"
        if self.backwards[s] > k:
            return f"{s}B{k} has already run"
        self.graphs.add((s, k))
        reason = self._needs(s) or self._has_inputs(s, k)
        self.restored.discard(("values", s, k))
        return reason

    def _backward(self, s: int, k: int) -> str:
        if s not in self.backward:
            return f"segment {s} has no gradient to compute"
        if self.backwards[s] != k:
            return f"microbatches pass a segment in order, and {self.backwards[s]} is next"
        if (s, k) not in self.graphs:
            return f"there is no graph: neither {s}F{k} nor {s}R{k} left one that still has its parameters"
        later = [t for t in self.backward if t > s]
        if s in self.receives[1] and ("gradients", s, k) not in self.received:
            return f"the gradients that other ranks made of microbatch {k} are not received"
        if later and self.backwards[min(later)] <= k and self._follows(s, min(later)):
            return f"{min(later)}B{k} has not run"
        if later and ("gradients", min(later), k) in self.away and ("gradients", s, k) not in self.restored:
            return f"the gradients that {min(later)}B{k} made are stashed and were not restored"
        self.backwards[s] += 1
        self.graphs.discard((s, k))
        self.restored.discard(("gradients", s, k))
        return self._needs(s)

    def _rest(self, s: int, k: int) -> str:
        if self.backwards[s] <= k:
            return f"{s}B{k} has not run"
        if self.rests[s] != k:
            return f"microbatches pass a segment in order, and {self.rests[s]} is next"
        self.rests[s] += 1
        return self._needs(s)

    def _follows(self, s: int, later: int) -> bool:
        """Whether all segments between two are here, so that one needs what the other made."""
        return all(t in self.local for t in range(s, later))

    def _receive(self, what: str, s: int, k: int) -> str:
        if (what, s, k) in self.received:
            return "it is already received"
        self.received.add((what, s, k))
        return "" if s in self.local else f"segment {s} is another rank's"

    def _send(self, s: int, k: int) -> str:
        return "" if self.forwards[s] > k else f"{s}F{k} has not run"

    def _send_gradients(self, s: int, k: int) -> str:
        return "" if self.backwards[s] > k else f"{s}B{k} has not run"

    def _sum(self, s: int, piece: int) -> str:
        if ("REDUCE", s) not in self.passed:
            return f"segment {s} has not been reduced: its gradients are not complete"
        if (s, piece) in self.summed:
            return "it was summed before"
        self.summed.add((s, piece))
        return ""

    def _once(self, kind: str, s: int) -> str:
        """What concerns complete gradients or updated parameters, and is begun once."""
        again = (kind, s) in self.passed
        self.passed.add((kind, s))
        if again:
            return "it is already begun"
        if kind == "TELL" and s not in self.updated:
            return f"segment {s} is not updated"
        return self._complete(s) if kind in ("REDUCE", "PASS") else ""

    def _loss(self) -> str:
        last = self.num_segments - 1
        missing = last in self.local and self.forwards[last] < self.num_microbatches
        return f"segment {last} has not run on all microbatches" if missing else ""

    def _stash(self, s: int, k: int) -> str:
        if self.forwards[s] <= k:
            return f"{s}F{k} has not run"
        if ("values", s, k) in self.away:
            return "it is already stashed"
        self.away.add(("values", s, k))
        return ""

    def _restore(self, s: int, k: int) -> str:
        if s and s - 1 in self.local and ("values", s - 1, k) not in self.away:
            return f"what segment {s - 1} made of microbatch {k} is not stashed"
        if ("values", s, k) in self.restored:
            return "it is already restored"
        self.restored.add(("values", s, k))
        return ""

    def _stash_gradients(self, s: int, k: int) -> str:
        if self.backwards[s] <= k:
            return f"{s}B{k} has not run"
        self.away.add(("gradients", s, k))
        return ""

    def _restore_gradients(self, s: int, k: int) -> str:
        later = [t for t in self.backward if t > s]
        if later and ("gradients", min(later), k) not in self.away:
            return f"the gradients that {min(later)}B{k} made are not stashed"
        self.restored.add(("gradients", s, k))
        return ""

    def _fetch(self, s: int) -> str:
        if s in self.fetched:
            return f"segment {s} is already fetched"
        self.fetched.add(s)
        return f"segment {s} is already updated; the next step fetches it" if s in self.updated else ""

    def _evict(self, s: int) -> str:
        if s not in self.fetched:
            return f"segment {s} is not fetched"
        self.fetched.discard(s)
        self.graphs = {(t, k) for t, k in self.graphs if t != s}  # a graph needs the parameters it was made with
        return ""

    def _complete(self, s: int) -> str:
        if s not in self.backward:
            return f"segment {s} has no gradient"
        if s in self.before:
            return ""
        done = self.rests[s] if s in self.split else self.backwards[s]
        return (
            "" if done == self.num_microbatches else f"its gradient is complete over {done} of {self.num_microbatches}"
        )

    def _park(self, s: int) -> str:
        self.parked.add(s)
        return self._complete(s)

    def _norm(self) -> str:
        self.normed = True
        waiting = [s for s in sorted(self.backward) if s not in self.parked]
        return f"the gradients of segment {waiting[0]} are not parked" if waiting else ""

    def _intent(self) -> str:
        self.intended = True
        return f"segment {min(self.updated)} is already updated" if self.updated else ""

    def _update(self, s: int) -> str:
        if s in self.updated:
            return "it is already updated"
        self.updated.add(s)
        return self._complete(s) or (self._can_be_finished(s) if self.intended and not self.normed else "")

    def _can_be_finished(self, s: int) -> str:
        """Without the parameters that an update replaces: what is left to do must not need them."""
        later = [t for t in self.backward if t > s and t not in self.updated]
        if later:
            return f"segment {max(later)} is not updated, and could not be once this one is"
        here = [k for k in range(self.num_microbatches) if ("gradients", s, k) not in self.away]
        if here and s > min(self.backward):
            return f"the gradients that {s}B{here[0]} made are not stashed, and could not be made again"
        return ""

    def _commit(self) -> str:
        self.committed = True
        waiting = [s for s in sorted(self.backward) if s not in self.updated]
        return f"segment {waiting[0]} is not updated" if waiting else ""

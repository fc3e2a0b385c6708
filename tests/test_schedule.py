"""Schedules as literal lists: text round trip, generators, passes, and a checker that says what is wrong where."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import ScheduleError, lowering, schedule
from packhorse.schedule import KINDS, Action, Actions, check, parse, show


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 999), st.integers(0, 999))
def test_text_round_trip(kind: str, segment: int, microbatch: int) -> None:
    _, takes_segment, takes_microbatch = KINDS[kind]
    action = Action(kind, segment if takes_segment else None, microbatch if takes_microbatch else None)
    assert Action.parse(str(action)) == action


@given(
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.none() | st.integers(0, 999), st.none() | st.integers(0, 9)))
)
def test_a_packed_list_is_the_list(found: list[tuple[str, int | None, int | None]]) -> None:
    actions = [Action(*action) for action in found]
    packed = Actions(actions)
    assert list(packed) == actions and list(reversed(packed)) == actions[::-1] and packed[1:-1] == actions[1:-1]
    assert show(packed) == show(actions)


@pytest.mark.parametrize("text", ["12", "F3", "3F", "COMMIT1", "3COMMIT", "3fetch", "3FETCH1", "3X1", ""])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        Action.parse(text)


def test_resident() -> None:
    assert show(schedule.resident(3, 2, {1, 2})) == "0F0 1F0 2F0 2B0 1B0 0F1 1F1 2F1 2B1 1B1"


def test_relay() -> None:
    found = show(schedule.relay(3, 2, {0, 1, 2}))
    assert found == "0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1"


def test_passes_one_by_one() -> None:
    actions = schedule.relay(3, 1, {0, 1, 2})
    actions = lowering.recompute(actions, kept={1})
    assert show(actions) == "0F0 1F0 2F0 2B0 1B0 0R0 0B0"
    actions = lowering.stash(actions)
    assert show(actions) == (
        "0F0 0STASH0 1RESTORE0 1F0 1STASH0 2RESTORE0 2F0 2B0 2STASHG0 1RESTOREG0 1B0 1STASHG0 0RESTORE0 0R0 0RESTOREG0 0B0"
    )
    actions = lowering.update(actions, 1, parks={2})
    assert show(actions[7:]) == (
        "2B0 2PARK 2UPDATE 2STASHG0 1RESTOREG0 1B0 1UPDATE 1STASHG0 0RESTORE0 0R0 0RESTOREG0 0B0 0UPDATE COMMIT"
    )
    actions = lowering.fetch(actions, stays={1})
    check(actions, 3, 1, {0, 1, 2})
    assert [str(a) for a in actions if a.kind in ("FETCH", "EVICT", "F", "R", "B")] == parse_text(
        "0FETCH 0F0 0EVICT 1FETCH 1F0 2FETCH 2F0 2B0 2EVICT 1B0 1EVICT 0FETCH 0R0 0B0 0EVICT"
    )
    ahead = lowering.prefetch(actions, {0: 10, 1: 10, 2: 10}, 20)
    check(ahead, 3, 1, {0, 1, 2})
    assert [str(a) for a in ahead if a.kind in ("FETCH", "EVICT", "F", "R", "B")] == parse_text(
        "0FETCH 1FETCH 0F0 0EVICT 2FETCH 1F0 2F0 2B0 2EVICT 0FETCH 1B0 1EVICT 0R0 0B0 0EVICT"
    )


def parse_text(text: str) -> list[str]:
    return text.split()


def test_deferred() -> None:
    actions = lowering.update(schedule.relay(2, 1, {0, 1}), 1, deferred=True)
    assert show(actions) == "0F0 1F0 1B0 1PARK 0B0 0PARK NORM 0UPDATE 1UPDATE COMMIT"


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sets(st.integers(0, 5)),
    st.booleans(),
    st.integers(0, 60),
)
def test_every_lowered_list_is_legal(
    segments: int, microbatches: int, first: int, kept: set[int], deferred: bool, budget: int
) -> None:
    """Whatever trains, is kept or fits: fetched bytes stay within the budget, or within one segment where that is larger."""
    backward = frozenset(range(min(first, segments - 1), segments))
    kept &= backward
    sizes = {s: 10 + s for s in range(segments)}
    actions = lowering.stash(lowering.recompute(schedule.relay(segments, microbatches, backward), kept))
    actions = lowering.fetch(lowering.update(actions, microbatches, deferred=deferred), kept)
    check(actions, segments, microbatches, backward)
    ahead = lowering.prefetch(actions, sizes, budget)
    check(ahead, segments, microbatches, backward)
    assert sorted(map(str, ahead)) == sorted(map(str, actions))
    compute = [a for a in ahead if a.kind in ("F", "R", "B", "UPDATE", "PARK", "NORM", "COMMIT")]
    assert compute == [a for a in actions if a in set(compute)]
    assert peak(ahead, sizes) <= max(budget, peak(actions, sizes))


def test_roll_forward() -> None:
    """An update waits for the gradients at its boundary; what finishing takes is written down before the first."""
    actions = lowering.update(lowering.stash(lowering.recompute(schedule.relay(2, 2, {0, 1}), ())), 2)
    rolling = lowering.roll_forward(actions)
    assert show(rolling) == (
        "0F0 0STASH0 0F1 0STASH1 1RESTORE0 1F0 1B0 1STASHG0 1RESTORE1 1F1 1B1 1STASHG1 INTENT 1UPDATE "
        "0RESTORE0 0R0 0RESTOREG0 0B0 0RESTORE1 0R1 0RESTOREG1 0B1 0UPDATE COMMIT"
    )
    assert show(lowering.finish(rolling, {1})) == (
        "0F0 0STASH0 0F1 0STASH1 INTENT 0RESTORE0 0R0 0RESTOREG0 0B0 0RESTORE1 0R1 0RESTOREG1 0B1 0UPDATE COMMIT"
    )
    deferred = lowering.roll_forward(lowering.update(schedule.relay(2, 1, {0, 1}), 1, deferred=True))
    assert show(deferred) == "0F0 1F0 1B0 1PARK 0B0 0PARK NORM INTENT 0UPDATE 1UPDATE COMMIT"
    assert show(lowering.finish(deferred, {0})) == "1UPDATE COMMIT"


@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.sets(st.integers(0, 5)), st.integers(0, 60), st.data()
)
def test_what_is_left_of_a_step_is_legal(
    segments: int, microbatches: int, first: int, kept: set[int], budget: int, data: st.DataObject
) -> None:
    """Interrupted after any update: the same checker admits the rest as a step of the segments that are left."""
    backward = frozenset(range(min(first, segments - 1), segments))
    kept &= backward
    sizes = {s: 10 + s for s in range(segments)}
    actions = lowering.stash(lowering.recompute(schedule.relay(segments, microbatches, backward), kept))
    actions = lowering.roll_forward(lowering.update(actions, microbatches))
    actions = lowering.prefetch(lowering.fetch(actions, kept), sizes, budget)
    check(actions, segments, microbatches, backward)
    done = data.draw(st.integers(min(backward), segments - 1))
    rest = lowering.finish(actions, range(done, segments))
    check(rest, done, microbatches, backward & set(range(done)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("INTENT 0UPDATE", "segment 1 is not updated, and could not be once this one is"),
        ("INTENT 1UPDATE", "the gradients that 1B0 made are not stashed, and could not be made again"),
        ("1UPDATE INTENT", "segment 1 is already updated"),
    ],
)
def test_an_order_that_could_not_be_finished_is_refused(text: str, reason: str) -> None:
    before = "0FETCH 0F0 1FETCH 1F0 1B0 1EVICT 0B0 0EVICT"
    with pytest.raises(ScheduleError, match=reason):
        check(parse(f"{before} {text}"), 2, 1, {0, 1})


def peak(actions: list[Action], sizes: dict[int, int]) -> int:
    live = most = 0
    for action in actions:
        if action.kind in ("FETCH", "EVICT"):
            live += sizes[action.segment or 0] * (1 if action.kind == "FETCH" else -1)
            most = max(most, live)
    return most


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0FETCH 1FETCH 1F0", "segment 0 has not run on microbatch 0"),
        ("0F0", "segment 0 is not fetched"),
        ("0FETCH 0F1", "microbatches pass a segment in order, and 0 is next"),
        ("0FETCH 0FETCH", "segment 0 is already fetched"),
        ("0EVICT", "segment 0 is not fetched"),
        ("0FETCH 0F0 0STASH0 1FETCH 1F0", "is stashed and was not restored"),
        ("0FETCH 0F0 1FETCH 1F0 0B0", "1B0 has not run"),
        ("0FETCH 0F0 0EVICT 1FETCH 1F0 1B0 0FETCH 0B0", "there is no graph"),
        ("0FETCH 0F0 1FETCH 1F0 1B0 1UPDATE", "its gradient is complete over 1 of 2"),
        ("0FETCH 0F0 0F1 1FETCH 1F0 1B0 1F1 1B1 1UPDATE 1R1", "1B1 has already run"),
        ("0FETCH 0F0 COMMIT 0F1", "segment 0 is not updated"),
        ("0RESTORE0 1RESTORE0", "is not stashed"),
        ("2FETCH", "there are 2 segments"),
        ("0FETCH 0F2", "there are 2 microbatches"),
        ("0FETCH 0F0 0F1", "the schedule ends too early: segment 0 ran backward on 0 of 2"),
    ],
)
def test_the_first_illegal_action_is_explained(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(parse(text), 2, 2, {0, 1})
    assert reason in str(caught.value)
    assert "too early" in reason or "[" in str(caught.value)


def test_a_long_list_shows_the_place() -> None:
    actions = schedule.relay(9, 4, set(range(9)))
    assert show(actions, mark=20, around=2) == "... 4F2 4F3 [5F0] 5F1 5F2 ..."


def test_many_small_segments_are_fetched_ahead_in_little_time() -> None:
    """As many as fit at once: looking through all that is ahead for each would take minutes."""
    segments = 3000
    actions = lowering.fetch(lowering.recompute(schedule.relay(segments, 2, set(range(segments))), ()))
    started = time.perf_counter()
    ahead = lowering.prefetch(actions, dict.fromkeys(range(segments), 1), 500)
    assert time.perf_counter() - started < 5.0
    assert peak(ahead, dict.fromkeys(range(segments), 1)) == 500

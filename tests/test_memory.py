"""What becomes of memory that lies idle."""

import pytest

from packhorse import memory
from packhorse.memory import IDLE, PATIENCE, Heap, Ledger, Pool

MB = 1 << 20


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = [100 * MB]
    monkeypatch.setattr(memory, "resident_bytes", lambda: found[0])
    return found


def test_idle_memory_goes_back_where_there_is_no_room_for_what_comes_next(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), plenty=False, ceiling=300 * MB), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] = 200 * MB
    heap.tidy(needed=100 * MB)
    assert not trims, "there is room up to the planned peak"
    heap.tidy(needed=101 * MB)
    assert trims == [200 * MB]
    resident[0] = 400 * MB
    heap.tidy(needed=None)  # not known: as if there were no room
    assert trims == [200 * MB, 400 * MB]


def test_little_that_lies_idle_and_what_will_be_used_again_stays(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), plenty=False, ceiling=0), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] += memory.LEEWAY
    heap.tidy(needed=MB)
    resident[0] += 50 * MB
    heap.tidy(50 * MB)
    assert not trims
    heap.tidy(49 * MB)
    assert len(trims) == 1


def test_what_comes_next_needs_no_new_room_for_what_it_uses_again(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), plenty=False, ceiling=200 * MB), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] += 90 * MB
    heap.tidy(50 * MB, needed=60 * MB)
    assert not trims, "190 MB, and 10 MB that are new"
    heap.tidy(50 * MB, needed=61 * MB)
    heap.tidy(200 * MB, needed=101 * MB)  # no more is used again than lies idle
    assert trims == [190 * MB] * 2


@pytest.mark.parametrize("room", [True, False])
def test_buffers_wait_while_there_is_room(room: bool) -> None:
    pool = Pool(Ledger())
    pool.has_room = lambda: room
    buffers = [pool.take(IDLE // 2, "weights") for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer, "weights")
    for _ in range(PATIENCE):
        pool.give(pool.take(IDLE // 2, "weights"), "weights")
    assert pool.mapped == (2 * IDLE if room else IDLE)
    pool.shrink(memory.IDLE)
    assert pool.mapped == IDLE

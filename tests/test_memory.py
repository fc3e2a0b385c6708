"""What becomes of memory that lies idle."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packhorse import memory
from packhorse.memory import IDLE, PATIENCE, Heap, Ledger, Pool
from packhorse.running import Running
from packhorse.update import share_scalar

MB = 1 << 20


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = [100 * MB]
    monkeypatch.setattr(memory, "resident_bytes", lambda: found[0])
    return found


def test_idle_memory_goes_back_where_there_is_no_room_for_what_comes_next(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), keeps=False, ceiling=300 * MB), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] = 200 * MB
    heap.tidy(needed=100 * MB)
    assert not trims, "there is room up to the planned peak"
    heap.tidy(needed=101 * MB)
    assert trims == [200 * MB]
    resident[0] = 400 * MB
    heap.tidy(needed=None)  # not known: as if there were no room
    assert trims == [200 * MB, 400 * MB]


@pytest.mark.parametrize("ceiling", [None, 300 * MB])
def test_what_is_kept_goes_back_only_where_there_is_a_ceiling(
    ceiling: int | None, resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), keeps=True, ceiling=ceiling), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] = 290 * MB
    heap.tidy(needed=None)
    heap.tidy(needed=10 * MB)
    assert not trims
    heap.tidy(needed=11 * MB)
    assert trims == ([] if ceiling is None else [290 * MB])


def test_little_that_lies_idle_and_what_will_be_used_again_stays(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), keeps=False, ceiling=0), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] += memory.WORTHWHILE
    heap.tidy(needed=MB)
    resident[0] += memory.LEEWAY - memory.WORTHWHILE + 50 * MB
    heap.tidy(50 * MB)
    assert not trims
    heap.tidy(49 * MB)
    assert len(trims) == 1


def test_what_comes_next_needs_no_new_room_for_what_it_uses_again(
    resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), keeps=False, ceiling=200 * MB), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] += 90 * MB
    heap.tidy(50 * MB, needed=60 * MB)
    assert not trims, "190 MB, and 10 MB that are new"
    heap.tidy(50 * MB, needed=61 * MB)
    heap.tidy(200 * MB, needed=101 * MB)  # no more is used again than lies idle
    assert trims == [190 * MB] * 2


@pytest.mark.parametrize("strict", [True, False])
def test_what_others_take_between_steps_makes_nobody_give_back(
    strict: bool, resident: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, trims = Heap(Ledger(), keeps=True, ceiling=200 * MB, strict=strict), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    resident[0] = 190 * MB
    heap.leave()
    resident[0] = 290 * MB  # another model, beside this one
    heap.enter()
    resident[0] = 300 * MB
    heap.tidy(needed=0)
    assert trims == ([290 * MB, 300 * MB] if strict else [])
    resident[0] = 301 * MB
    heap.tidy(needed=0)
    assert trims[-1:] == [301 * MB]
    heap.leave()
    resident[0] = 150 * MB  # it is gone, and more than that: no credit for what was there before
    heap.enter()
    assert heap.ceiling == 200 * MB


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_step_counts_no_more_when_it_is_over_is_not_others(is_kept: bool, resident: list[int]) -> None:
    """The gradients of an update that goes on behind it, which malloc keeps, or gives back."""
    ledger = Ledger()
    heap = Heap(ledger, keeps=True, ceiling=200 * MB)
    for _ in range(3):
        ledger.add("host", "gradients", 16 * MB)
        resident[0] = 150 * MB
        heap.leave()
        ledger.add("host", "gradients", -16 * MB)
        resident[0] -= 0 if is_kept else 16 * MB
        heap.enter()
        assert heap.ceiling == 200 * MB
    ledger.add("host", "gradients", 16 * MB)
    heap.leave()
    ledger.add("host", "gradients", -16 * MB)
    resident[0] += 50 * MB  # whatever becomes of the gradients, at least so much is others'
    heap.enter()
    assert heap.ceiling == 250 * MB


def test_a_step_that_is_one_segment_gives_back_too(resident: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    heap, trims = Heap(Ledger(), keeps=True, ceiling=200 * MB), []
    monkeypatch.setattr(heap, "_trim", lambda _: trims.append(resident[0]))
    for resident[0] in (199 * MB, 201 * MB):
        heap.enter()
    assert trims == [201 * MB]


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
    pool.shrink(IDLE)
    assert pool.mapped == IDLE


@pytest.mark.parametrize("room", [True, False])
def test_buffers_of_another_kind_of_segment_make_room(room: bool, resident: list[int]) -> None:
    def segment(code: str) -> Any:
        return SimpleNamespace(code=code, parameter_nbytes=0, made_nbytes=0)

    pool = Pool(Ledger())
    heap = Heap(Ledger(), keeps=False, ceiling=200 * MB)
    running = Running(heap, lambda *_: 50 * MB if room else 150 * MB, pool)
    layer, twin, head = segment(code := "layer"), segment(code), segment("head")
    running.turn_to(layer, 1.0, True)
    buffers = [pool.take(IDLE // 2, "weights") for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer, "weights")
    running.turn_to(twin, 1.0, True)
    assert pool.mapped == (2 * IDLE if room else IDLE), "a twin takes them again"
    running.turn_to(head, 1.0, True)
    assert pool.mapped == (2 * IDLE if room else 0)


def test_what_torch_loads_on_first_use_is_there_when_memory_is_measured() -> None:
    program = """
import sys, torch
from packhorse.memory import settle
settle()
before = set(sys.modules)
weight = torch.ones(2, 2, requires_grad=True)
torch.autograd.grad(weight.sum(), weight)
torch.optim.AdamW([weight])
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_equal_scalars_are_one_tensor() -> None:
    one, other = share_scalar(torch.tensor(3.0)), share_scalar(torch.tensor(3.0))
    assert one is other
    zeros = [share_scalar(torch.tensor(value)) for value in (0.0, -0.0)]
    assert zeros[0] is not zeros[1] and zeros[1].signbit()
    assert share_scalar(torch.tensor(3.0, dtype=torch.float64)).dtype is torch.float64
    assert share_scalar(torch.tensor(torch.nan)).isnan()
    vector = torch.ones(2)
    assert share_scalar(vector) is vector

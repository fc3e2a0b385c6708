"""Stores and stash: what is put in comes out, whatever is in flight; faults are named."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from packhorse import DiskStore, RamStore, StoreError
from packhorse.memory import IDLE, PAGE, PATIENCE, Ledger, Pool, map_bytes
from packhorse.store import MASTER, WORKING, Stash, Store, make_block
from packhorse.store.lane import URGENT, Lane


def make_store(where: str, path: Path, **options: Any) -> Store:
    return RamStore(**options) if where == "ram" else DiskStore(path, **options)


BLOCKS = [
    make_block("0", [("a", torch.empty(7, 300)), ("b", torch.empty(()))], {MASTER: torch.float32}, torch.bfloat16),
    make_block("1", [("c", torch.empty(2, 3, 4).transpose(0, 2)), ("d", torch.empty(9000))], {MASTER: torch.float32}),
    make_block("2", [("e", torch.empty(3, dtype=torch.bool))], {MASTER: torch.bool}),
]


def test_blocks_keep_strides_and_alignment() -> None:
    c, d = BLOCKS[1].slots
    assert c.stride == (1, 4, 12) and d.start == 4096 and BLOCKS[1].numel == 4096 * 4
    flat = torch.arange(float(BLOCKS[1].numel))
    assert torch.equal(c.view(flat), flat[:24].as_strided((4, 3, 2), (1, 4, 12)))


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_loans(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.store.blocks.UNIT", 4096)
    blocks = [replace(block) for block in BLOCKS]
    store = make_store(where, tmp_path)
    store.create(blocks, Pool(Ledger()), {})
    for block in blocks:
        for kind in block.kinds:
            loan = store.borrow(block, kind, read=False)
            loan.ready.result().copy_(torch.arange(block.numel) % 2)
            written = loan.give_back(dirty=True)
            if written is not None:
                written.result()
        store.publish(block)
    for block in blocks:
        for kind, dtype in block.kinds.items():
            for start, stop in [*block.units, (0, block.numel)]:
                found = store.borrow(block, kind, start, stop)
                assert torch.equal(found.ready.result(), (torch.arange(start, stop) % 2).to(dtype))
                found.give_back()
    store.close()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_loan_in_another_dtype_is_cast(where: str, tmp_path: Path) -> None:
    kinds = {MASTER: torch.float32} | (
        {WORKING: torch.bfloat16} if where == "disk" else {}
    )  # in RAM, when it is asked for
    block = make_block("0", [("a", torch.empty(3 << 20))], kinds, torch.bfloat16)
    assert block.is_cast and block.working_nbytes == 2 * block.numel
    store = make_store(where, tmp_path)
    pool = Pool(Ledger())
    store.create([block], pool, {})
    loan = store.borrow(block, MASTER, read=False)
    values = loan.ready.result().copy_(torch.randn(block.numel)).clone()
    written = loan.give_back(dirty=True)
    if written is not None:
        written.result()
    store.publish(block)
    cast = store.borrow(block, MASTER, dtype=block.working)
    assert torch.equal(cast.ready.result(), values.bfloat16())
    with pytest.raises(AssertionError, match="read only"):
        cast.give_back(dirty=True)
    cast.give_back()
    store.close()


def test_a_write_leaves_the_version_that_reads_see(tmp_path: Path) -> None:
    store, block = DiskStore(tmp_path), BLOCKS[1]
    store.create(BLOCKS, Pool(Ledger()), {})
    for value in (1.0, 2.0, 3.0):
        loan = store.borrow(block, MASTER, read=False)
        loan.ready.result().fill_(value)
        loan.give_back(dirty=True).result()  # type: ignore[union-attr]
        seen = store.borrow(block, MASTER)
        assert float(seen.ready.result()[0]) == value - 1
        seen.give_back()
        store.publish(block)
    store.close()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "get", "drop"]), st.integers(1, 6000)), max_size=60),
    st.sampled_from([0, 40_000, 1 << 40]),
)
def test_stash_gives_back_what_it_took(tmp_path: Path, steps: list[tuple[int, str, int]], budget: int) -> None:
    store = DiskStore(tmp_path / "s")
    store.create([], Pool(Ledger()), {})
    stash, expected = Stash(Ledger(), store, budget), dict[int, Tensor]()
    for key, verb, size in steps:
        if verb == "put" and key not in expected:
            tensor = torch.randn(2, size, 3).transpose(0, 1)[:, :, : 1 + size % 3]
            stash.put(key, tensor)
            expected[key] = tensor.clone()
        elif verb == "get" and key in expected:
            found = stash.get(key).result()
            assert torch.equal(found, expected[key])
        elif verb == "drop" and key in expected:
            stash.drop(key)
            del expected[key]
    for key, tensor in expected.items():
        assert torch.equal(stash.get(key).result(), tensor)
    stash.close()
    store.close()


def test_stash_keeps_strides(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.create([], Pool(Ledger()), {})
    stash = Stash(Ledger(), store, 0)
    tensors = [
        torch.randn(40, 50).t(),
        torch.randn(30, 3, 100)[:, 1],
        torch.randn(1, 5000).expand(4, 5000),
        torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last),
        torch.randn(9999, dtype=torch.bfloat16),
        torch.zeros(0, 4),
    ]
    for i, tensor in enumerate(tensors):
        stash.put(i, tensor)
    for i, tensor in enumerate(tensors):
        found = stash.get(i).result()
        assert torch.equal(found, tensor) and found.stride() == tensor.stride() and found.dtype == tensor.dtype


def test_urgent_jobs_pass() -> None:
    lane, order = Lane("test", 1), list[int]()
    gate = lane.submit(lambda: __import__("time").sleep(0.05))
    for i in range(3):
        lane.submit(lambda i=i: order.append(i))
    lane.submit(lambda: order.append(9), priority=URGENT)
    lane.close()
    assert gate.done() and order == [9, 0, 1, 2]


def test_a_failing_read_names_file_and_block(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.create(BLOCKS, Pool(Ledger()), {})
    os.truncate(tmp_path / "blocks-0" / "master.bin", 4096)
    loan = store.borrow(BLOCKS[1], MASTER)
    with pytest.raises(
        StoreError, match=r"reading block 1 \(master, part 1 of 1\) at byte .*master.bin failed: the file ends there"
    ):
        loan.ready.result()


def test_a_large_buffer_waits_for_the_next_layer_but_not_for_long() -> None:
    ledger = Ledger()
    pool = Pool(ledger)
    small = [pool.take(PAGE, "update buffers") for _ in range(2 * PATIENCE)]
    large, other = pool.take(2 * IDLE, "weights"), pool.take(3 * IDLE, "weights")
    for buffer in small:
        pool.give(buffer, "update buffers")
    pool.give(large, "weights")
    assert pool.take(2 * IDLE, "weights") is large
    pool.give(large, "weights")
    pool.give(other, "weights")
    for _ in range(PATIENCE):
        assert ledger.live["host", "idle buffers"] >= 5 * IDLE
        pool.take(PAGE, "update buffers")
    for _ in range(PATIENCE):
        pool.take(PAGE, "weights")
    assert ledger.live["host", "idle buffers"] <= IDLE


def test_mapped_memory_is_aligned_and_counted() -> None:
    ledger = Ledger()
    pool = Pool(ledger)
    assert map_bytes(5).data_ptr() % 4096 == 0
    buffer = pool.take(5000, "gradients")
    assert buffer.nbytes == 8192 and ledger.total("host") == 8192
    pool.give(buffer, "gradients")
    assert pool.take(8192, "weights") is buffer
    assert ledger.total("host") == 8192 and ledger.live["host", "weights"] == 8192

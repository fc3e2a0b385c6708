"""Sums of gradients: rows of tables that are looked up, casts in pieces, and that both are plain's sums."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import packhorse as ph
from packhorse import gradient as module
from packhorse.device import find_device
from packhorse.gradient import Gradient, LookedUp
from packhorse.memory import Ledger, Pool
from packhorse.store import MASTER, Slot, make_block


def make(table: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Gradient, Slot, Ledger]:
    block = make_block("b", [("table", table)], {MASTER: torch.float32}, dtype, False, (0,))
    ledger = Ledger()
    return Gradient(block, 0, find_device("cpu", Pool(ledger))), block.slots[0], ledger


def test_small_tensors_are_joined_and_large_ones_stay_where_they_are() -> None:
    named = [
        ("a", torch.randn(3)),
        ("large", torch.randn(module.SMALL // 4)),
        ("b", torch.randn(2, 2)),
        ("none", torch.randn(5)),
    ]
    block = make_block("b", named, {MASTER: torch.float32}, None, False, (0,))
    ledger = Ledger()
    found = Gradient(block, 0, find_device("cpu", Pool(ledger)))
    for slot, (_, tensor) in zip(block.slots, named[:3], strict=False):
        found.add(slot, tensor.clone(), alone=True)
    place, counted = found.tensors["large"].data_ptr(), ledger.total("host")
    large, small = found.join()
    assert large.data_ptr() == place and small.numel() == 7
    large.mul_(2), small.mul_(2)
    assert all(
        torch.equal(slot.shape_of(found.tensors[n]), 2 * t)
        for slot, (n, t) in zip(block.slots, named[:3], strict=False)
    )
    assert ledger.total("host") == counted
    found.let_go()
    assert not ledger.total("host")


def look_up(table: Tensor, numbers: Tensor, seed: Tensor, padding: int, sparse: bool) -> Tensor:
    table = table.detach().requires_grad_()
    result = torch.ops.aten.embedding(table, numbers, padding, False, sparse)
    (found,) = torch.autograd.grad(result, table, seed)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_the_dense_sum(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    padding = data.draw(st.integers(-1, rows - 1))
    table = torch.randn(rows, width, dtype=dtype)
    found, slot, ledger = make(table.float(), dtype)
    expected: Tensor | None = None
    for _ in range(data.draw(st.integers(1, 5))):
        numbers = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=30)))
        seed = torch.randn(len(numbers), width, dtype=dtype)
        dense = look_up(table, numbers, seed, padding, sparse=False).float()
        expected = dense if expected is None else expected + dense
        found.add(slot, look_up(table, numbers, seed, padding, sparse=True), alone=False)
    assert expected is not None
    assert found.present == {"table"} and (slot.name in found.looked_up) != (slot.name in found.tensors)
    start = data.draw(st.integers(0, slot.numel - 1))
    stop = data.draw(st.integers(start + 1, slot.numel))
    assert torch.equal(found.piece(slot, start, stop), expected.flatten()[start:stop])
    found.fill_all()
    assert torch.equal(slot.shape_of(found.tensors["table"]), expected)
    found.let_go()
    assert ledger.total("host") == ledger.total("device") == 0


def test_few_rows_take_little_memory_and_many_become_a_table() -> None:
    table = torch.randn(100, 8)
    found, slot, _ = make(table)
    found.add(slot, look_up(table, torch.arange(10), torch.randn(10, 8), -1, sparse=True), alone=False)
    assert found.looked_up["table"].nbytes == 10 * 8 * 4
    found.add(slot, look_up(table, torch.arange(60), torch.randn(60, 8), -1, sparse=True), alone=False)
    assert "table" in found.tensors and not found.looked_up


def test_a_row_that_is_not_finite_is_refused() -> None:
    table = torch.randn(100, 8)
    found, slot, _ = make(table)
    seed = torch.randn(2, 8)
    seed[1, 3] = torch.inf
    found.add(slot, look_up(table, torch.tensor([5, 7]), seed, -1, sparse=True), alone=False)
    with pytest.raises(ph.NumericsError, match="gradient of table"):
        found.refuse_non_finite()


def test_looked_up_rows_in_order() -> None:
    sparse = look_up(torch.randn(9, 2), torch.tensor([7, 3, 7]), torch.ones(3, 2), -1, sparse=True)
    found = LookedUp.of(sparse, torch.float32)
    assert found.numbers.tolist() == [3, 7] and found.rows[:, 0].tolist() == [1.0, 2.0]


def test_another_precision_is_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 7)
    table = torch.randn(5, 4)
    found, slot, _ = make(table, torch.bfloat16)
    parts = [torch.randn(5, 4, dtype=torch.bfloat16) for _ in range(3)]
    for part in parts:
        found.add(slot, part, alone=True)
    expected = (parts[0].float() + parts[1]) + parts[2]
    assert torch.equal(slot.shape_of(found.tensors["table"]), expected)


class Tables(nn.Module):
    """One table looked up once, one twice, one that is also a head."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.head = nn.Embedding(50, 8), nn.Embedding(50, 8, padding_idx=3), nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.once(x) + self.twice(x) + self.head(x)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        return F.linear(y + self.twice(x), self.head.weight)


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_training_with_tables_gives_plains_numbers(update: str, on_disk: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tables()
    x = torch.randint(50, (6, 3))

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch.flatten())

    found = ph.verify(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        x,
        loss,
        steps=3,
        microbatches=3,
        store=tmp_path / "store" if on_disk else None,
        clip_norm=1.0 if update == "deferred" else None,
    )
    assert found.ok


def test_which_tables_are_looked_up() -> None:
    model = Tables()
    graph = ph.capture(model, torch.randint(50, (6, 3)), lambda output, _: output.sum())
    first = ph.partition(graph).segments[0]
    assert set(first.looked_up) == {"once.weight", "twice.weight", "head.weight"}
    whole = ph.partition(graph, 1).segments[0]
    assert set(whole.looked_up) == {"once.weight"}

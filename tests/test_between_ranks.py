"""What goes between ranks, without any: orders, messages, parcels, shards, running statistics."""

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import packhorse as ph
import toys
from packhorse import lowering, schedule
from packhorse.errors import ScheduleError
from packhorse.ranks.links import Links
from packhorse.ranks.parcel import Parcel
from packhorse.ranks.shards import make_shard
from packhorse.ranks.stages import assign, cut_into_stages
from packhorse.ranks.statistics import add_up, find_momenta
from packhorse.schedule import Action, show
from packhorse.store.blocks import MASTER, Block, make_block

# -- orders


def make_lists(stages: Any, num_ranks: int, *given: Any, **options: Any) -> list[list[schedule.Action]]:
    """What all ranks of a pipeline do."""
    return [schedule.pipeline(place, stages, num_ranks, *given, **options) for place in range(num_ranks)]


def test_one_forward_one_backward() -> None:
    first, second, third = make_lists([[0], [1], [2]], 3, 4, range(3))
    assert show(first) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert show(second) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert show(third) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_more_under_way_where_messages_take_long() -> None:
    first, second = make_lists([[0, 1], [2]], 2, 4, range(3), ahead=1)
    assert show(first) == "0F0 1F0 0F1 1F1 0F2 1F2 1B0 0B0 0F3 1F3 1B1 0B1 1B2 0B2 1B3 0B3"
    assert show(second) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_interleaved_stages_go_round() -> None:
    first, second = make_lists([[0], [1], [2], [3]], 2, 2, range(4))
    assert show(first) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert show(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_gradients_of_parameters_fill_what_would_be_waiting() -> None:
    first, second, third = make_lists([[0], [1], [2]], 3, 4, range(3), splits=True)
    assert show(first) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"  # nobody waits for its backward
    assert show(second) == "1F0 1F1 1B0 1F2 1B1 1W0 1B2 1F3 1W1 1W2 1B3 1W3"
    assert show(third) == "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2W1 2F3 2B3 2W2 2W3"


def test_what_nobody_waits_for_at_the_end_goes_segment_by_segment() -> None:
    """So that replicas can sum the gradients of later segments while those of earlier ones are computed."""
    given = [[0, 1], [2, 3]], 2, 4, range(4), 1
    first, second = make_lists(*given, splits=True)
    assert show(first).endswith(" 1B1 0B1 1B2 0B2 1B3 0B3")
    assert show(second).endswith(" 3B3 2B3 3W1 2W1 3W2 2W2 3W3 2W3")
    first, second = make_lists(*given, splits=True, gathers=True)
    assert show(first).endswith(" 1B1 1B2 0B1 0B2 1B3 0B3"), "the last microbatch's gradients come when its turn does"
    assert show(second).endswith(" 3B3 2B3 3W1 3W2 3W3 2W1 2W2 2W3")
    assert make_lists(*given, gathers=True) == make_lists(*given), "for a whole backward other ranks wait"


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 9), (4, 16)])
def test_messages_cost_split_backwards_their_first_way_only(ranks: int, microbatches: int, lag: int) -> None:
    """Forwards take 2, messages `lag`: what is not hidden is that of the first microbatch, from the first rank to the last."""
    ways = [
        make_lists([[i] for i in range(ranks)], ranks, microbatches, range(ranks), ahead, splits=True)
        for ahead in range(4)
    ]
    best = min(play(lists, {"F": 2, "B": 2, "W": 2}, lag) for lists in ways)
    assert best == 6 * microbatches + (ranks - 1) * (2 + lag)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (8, 16)])
def test_split_backwards_leave_less_than_two_thirds_of_the_idle_time(ranks: int, microbatches: int) -> None:
    stages = [[i] for i in range(ranks)]
    whole = make_lists(stages, ranks, microbatches, range(ranks))
    split = make_lists(stages, ranks, microbatches, range(ranks), splits=True)
    busy = 3 * microbatches
    assert play(split, {"F": 1, "B": 1, "W": 1}) - busy <= 2 / 3 * (play(whole, {"F": 1, "B": 2, "W": 0}) - busy)


def play(lists: list[list[Action]], lengths: dict[str, int], lag: int = 0) -> int:
    """How long ranks take that wait for each other, a segment each; a backward without a W takes as long as both."""
    split = {action.segment for actions in lists for action in actions if action.kind == "W"}
    ends: dict[Action, int] = {}
    now, waiting = [0] * len(lists), [list(actions) for actions in lists]
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue and _awaited(queue[0], len(lists)) <= ends.keys():
                action = queue.pop(0)
                arrivals = [ends[a] + lag * (a.segment != rank) for a in _awaited(action, len(lists))]
                is_whole = action.kind == "B" and rank not in split
                length = lengths[action.kind] + (lengths["W"] if is_whole else 0)
                now[rank] = ends[action] = max([now[rank], *arrivals]) + length
    return max(now)


def _awaited(action: Action, num_segments: int) -> set[Action]:
    return _needs(action, range(num_segments), num_segments)


def test_groups_go_layer_to_layer_through_a_stage() -> None:
    first, second = make_lists([[0, 1], [2]], 2, 4, range(3), group=2)
    assert show(first) == "0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3 1B0 1B1 0B0 0B1 1B2 1B3 0B2 0B3"
    assert show(second) == "2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3"


def test_what_is_frozen_has_no_backward() -> None:
    first, second = make_lists([[0], [1]], 2, 3, [1])
    assert show(first) == "0F0 0F1 0F2"
    assert show(second) == "1F0 1B0 1F1 1B1 1F2 1B2"


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_pipeline_runs_to_its_end(
    ranks: int,
    rounds: int,
    microbatches: int,
    ahead: int,
    width: int,
    splits: bool,
    gathers: bool,
    data: st.DataObject,
) -> None:
    """Played with messages, no rank waits for one that never comes; each does all it has to; few are under way.

    Gradients of a parameter are added in the order of microbatches.
    """
    num_stages = ranks * rounds
    stages = [[width * c + i for i in range(width)] for c in range(num_stages)]
    first = data.draw(st.integers(0, width * num_stages - 1))
    backward = range(first, width * num_stages)
    lists = make_lists(stages, ranks, microbatches, backward, ahead, splits=splits, gathers=gathers)
    passes = defaultdict(list)
    for kind, s, k in itertools.chain(*lists):
        passes[kind, s].append(k)
    assert all(numbers == sorted(numbers) for numbers in passes.values())
    done: set[Action] = set()
    waiting = [list(actions) for actions in lists]
    while any(waiting):
        ready = [queue for queue in waiting if queue and _needs(queue[0], backward, width * num_stages) <= done]
        assert ready, "all ranks wait for each other"
        done.add(ready[0].pop(0))
    whole = [s for s in backward if s // width == first // width] if splits else backward  # nobody waits for those
    assert len(done) == microbatches * (width * num_stages + 2 * len(backward) - len(whole))
    if rounds == 1:
        for rank, actions in enumerate(lists):
            under_way = most = 0
            for action in actions:
                if action.segment == width * rank + width - 1:
                    under_way += {"F": 1, "B": -1, "W": 0}[action.kind]
                    most = max(most, under_way)
            if backward[0] == 0:
                assert most <= 1 + (ranks - 1 - rank) * (1 + ahead)


def _needs(action: Action, backward: range, num_segments: int) -> set[Action]:
    kind, s, k = action
    assert s is not None
    if kind == "F":
        return {Action("F", s - 1, k)} if s else set()
    if kind == "W":
        return {Action("B", s, k)}
    behind = Action("B", s + 1, k) if s + 1 < num_segments else Action("F", s, k)
    return {behind, Action("F", s, k)}


def test_receives_are_posted_ahead_in_order() -> None:
    actions = schedule.parse("1F0 1B0 1F1 1B1")
    found = lowering.exchange(actions, ({1}, set()), (set(), {1}), distance=2)
    assert show(found) == "1RECV0 1RECV1 1F0 1B0 1SENDG0 1F1 1B1 1SENDG1"
    serial = lowering.exchange(actions, ({1}, set()), (set(), {1}), distance=0)
    assert show(serial) == "1RECV0 1F0 1B0 1SENDG0 1RECV1 1F1 1B1 1SENDG1"


def test_a_list_that_uses_what_was_not_received_is_refused() -> None:
    actions = schedule.parse("1F0 1RECVG0 1B0")
    with pytest.raises(ScheduleError, match="what other ranks made of microbatch 0 is not received"):
        schedule.check(actions, 3, 1, range(3), moves=False, local=[1], receives=({1}, {1}))
    with pytest.raises(ScheduleError, match="the gradients that other ranks made of microbatch 0 are not received"):
        schedule.check(schedule.parse("1RECV0 1F0 1B0"), 3, 1, range(3), moves=False, local=[1], receives=({1}, {1}))
    with pytest.raises(ScheduleError, match="segment 0 is another rank's"):
        schedule.check(schedule.parse("0F0"), 3, 1, range(3), moves=False, local=[1])


# -- messages


def links_of(name: str, pipeline: int, chunks: int = 1) -> list[Links]:
    model, make_batch, loss = toys.zoo(name)
    graph = ph.capture(model, make_batch(4), loss)
    order: Any = "interleaved" if chunks > 1 else "1f1b"
    cuts = cut_into_stages(graph, ph.Ranks(pipeline=pipeline, chunks=chunks, order=order))
    places = {p.index: p for p in ph.partition(graph, "finest").cuts}
    part = ph.Partition(graph, tuple(places[i] for i in sorted({*cuts, *(p.index for p in ph.partition(graph).cuts)})))
    owners = assign(part, cuts, pipeline)
    return [Links(part, owners, place, frozenset(graph.parameters)) for place in range(pipeline)]


def test_a_value_goes_once_to_each_rank_and_its_gradient_back_along_them() -> None:
    """U-Net's skips reach over stages: their gradients come from the last that reads them, through those between."""
    (links, *_) = links_of("unet", 3)
    traffic = links.traffic
    sent: set[tuple[str, int]] = set()
    for message in traffic.messages:
        if not message.backward:
            for name in message.names:
                key = (name, traffic.owners[message.receiver])
                assert key not in sent and traffic.owners[message.sender] != key[1]
                sent.add(key)
    for segment in links.partition.segments:
        for name in segment.inputs:
            maker = next((s.index for s in links.partition.segments if name in s.outputs), None)
            if maker is not None and traffic.owners[maker] != traffic.owners[segment.index]:
                assert (name, traffic.owners[segment.index]) in sent
    back = [m for m in traffic.messages if m.backward]
    assert all(m.sender > m.receiver for m in back)


def test_a_tied_parameter_is_updated_by_the_first_that_uses_it() -> None:
    first, last = links_of("gpt", 2)
    (taken,) = [tie for ties in first.takes.values() for tie in ties]
    (passed,) = [tie for ties in last.passes.values() for tie in ties]
    assert taken.parameter == passed.parameter and (taken.place, passed.place) == (1, 0)
    assert [t.place for ties in first.tells.values() for t in ties] == [1]
    assert [t.place for ties in last.hears.values() for t in ties] == [0]
    assert first.owner_of(taken.parameter) == 0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4), st.integers(0, 99)
)
def test_what_is_unpacked_is_what_was_packed(kinds: list[tuple[int, bool, int]], seed: int) -> None:
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors: dict[str, Tensor | None] = {}
    shapes, wanted = [], []
    for i, (dtype, is_there, ndim) in enumerate(kinds):
        tensor = (10 * torch.rand([i + 2] * ndim)).to(dtypes[dtype])
        tensor = tensor.transpose(0, -1) if ndim > 1 else tensor
        tensors[str(i)] = tensor if is_there else None
        shapes.append(tuple(tensor.shape))
        wanted.append(dtypes[dtype])
    parcel = Parcel(tuple(tensors), tuple(shapes), tuple(wanted))
    buffer = torch.empty(parcel.nbytes, dtype=torch.uint8)
    parcel.pack({name: t for name, t in tensors.items() if t is not None}, buffer)
    for name, found in parcel.unpack(buffer).items():
        expected = tensors[name]
        if expected is None or found is None:
            assert expected is None and found is None
        else:
            assert torch.equal(found, expected) and found.stride() == expected.stride()
            assert (found.data_ptr() - buffer.data_ptr()) % 64 == 0


# -- shards


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=6), st.integers(1, 5), st.booleans())
def test_shards_are_all_of_a_block_once(sizes: list[int], count: int, whole: bool) -> None:
    tensors = [(str(i), torch.arange(n, dtype=torch.float32) + 100_000 * i) for i, n in enumerate(sizes)]
    block = make_block("b", tensors, {MASTER: torch.float32}, whole=whole)
    shards = [make_shard(block, i, count) for i in range(count)]
    assert len({shard.own.numel for shard in shards}) == 1
    flat = torch.full((shards[0].whole.numel,), -1.0)
    for shard in shards:
        for slot in shard.own.slots:
            value = dict(tensors)[slot.name][slot.offset : slot.offset + slot.numel]
            place = flat[shard.start + slot.start : shard.start + slot.stop]
            assert (place == -1.0).all() and (not whole or len(value) == len(dict(tensors)[slot.name]))
            place.copy_(value)
    for slot in shards[0].whole.slots:
        assert torch.equal(slot.view(flat), dict(tensors)[slot.name])


def test_four_ranks_keep_little_more_than_a_quarter_each() -> None:
    model, make_batch, loss = toys.zoo("gpt")
    del make_batch, loss
    sizes = [(name, p.detach()) for name, p in model.named_parameters()]
    block: Block = make_block("b", [(n, t.repeat(64, *[1] * (t.ndim - 1))) for n, t in sizes], {MASTER: torch.float32})
    assert make_shard(block, 0, 4).own.numel <= 0.27 * block.numel


# -- running statistics


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.floats(0.01, 0.9), st.integers(0, 99))
def test_statistics_join_as_if_all_had_passed_in_order(counts: list[int], momentum: float, seed: int) -> None:
    torch.manual_seed(seed)
    before = torch.rand(3, dtype=torch.float64)
    seen = [[torch.rand(3, dtype=torch.float64) for _ in range(n)] for n in counts]

    def advance(value: Tensor, found: list[Tensor]) -> Tensor:
        for statistic in found:
            value = (1 - momentum) * value + momentum * statistic
        return value

    expected = advance(before, [statistic for found in seen for statistic in found])
    found = [advance(torch.zeros(3, dtype=torch.float64), statistics) for statistics in seen]
    joined = add_up(before, found, counts, torch.tensor(1 - momentum, dtype=torch.float64))
    torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
    numbers = torch.tensor(7)
    assert add_up(numbers, [torch.tensor(n) for n in counts], counts, torch.tensor(1)) == 7 + sum(counts)


def test_a_count_that_training_reads_is_refused() -> None:
    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]  # it is a tensor
            return self.linear(x).sum() * self.calls

    graph = ph.capture(Warming(), torch.zeros(4, 4), lambda output, batch: output)
    with pytest.raises(ph.RanksError, match="buffer calls in a way that ranks"):
        find_momenta(graph)


def test_statistics_that_cannot_be_joined_are_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.mul_(0.5)  # type: ignore[operator]  # it is a tensor
            return self.linear(x).sum() * self.seen.sum()  # type: ignore[operator]

    graph = ph.capture(Counting(), torch.zeros(4, 4), lambda output, batch: output)
    with pytest.raises(ph.RanksError, match="changes the buffer seen in a way that ranks"):
        find_momenta(graph)

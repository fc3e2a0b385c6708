"""Cuts: what forbids them, and that the search finds the best."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import packhorse as ph
from packhorse.batch import BatchSpec
from packhorse.graph.graph import Node, Operation, Ref, Type, Value
from packhorse.graph.table import NodeTable, ValueTable
from packhorse.partition import find_constraints, find_live, find_places, join_small
from packhorse.partition.partition import SLACK, _Window
from reference import assert_partitions_same, assert_same, run_plain, run_segments
from toys import zoo


def make_chain(flops: list[int], sizes: list[int], skips: list[tuple[int, int]], writes: list[int]) -> ph.Graph:
    """A graph of given costs: node i reads what node i - 1 made, and the far ends of skips; some write in place."""
    outside = [Value("batch", "input", Type((2,), torch.float32, 8, False))]
    made = [Value("v", "node", Type((size,), torch.float32, size * 4, True)) for size in sizes]
    nodes = []
    for i, count in enumerate(flops):
        operands = [i, *(a + 1 for a, b in skips if b == i and a < i - 1)]
        operation = Operation(
            "aten.relu_.default" if i in writes else "aten.relu.default",
            tuple(Ref(at) for at in range(len(operands))),
            writes=(0,) if i in writes and i else (),
            aliases=((0, 0),) if i in writes and i else (),
            flops=count,
            nbytes=sizes[i] * 4,
        )
        nodes.append(Node(operation, tuple(operands), (i + 1,), f"m{i}"))
    return ph.Graph(
        name="Chain",
        mode="train",
        batch=BatchSpec.of(torch.zeros(2)),
        values=ValueTable(outside, made),
        nodes=NodeTable(nodes),
        outputs=(Ref(len(flops)),),
        output_tree=None,
        parameters={},
        buffers={},
        constants={},
    )


chains = st.integers(2, 9).flatmap(
    lambda n: st.builds(
        make_chain,
        st.lists(st.integers(1, 50), min_size=n, max_size=n),
        st.lists(st.integers(1, 30), min_size=n, max_size=n),
        st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=3),
        st.lists(st.integers(1, n), max_size=2),
    )
)


def time_of(partition: ph.Partition, rate: float) -> float:
    """The slowest segment: its flops, or the bytes cut after it, whichever takes longer."""
    return max([s.flops for s in partition.segments] + [rate * cut.nbytes for cut in partition.cuts])


@settings(max_examples=150, deadline=None)
@given(chains, st.integers(1, 4), st.sampled_from([0.0, 0.3, 2.0]))
def test_the_search_is_as_good_as_trying_everything(graph: ph.Graph, count: int, rate: float) -> None:
    legal = [place for place in find_places(graph) if place.legal]
    if count - 1 > len(legal):
        with pytest.raises(ph.PartitionError):
            ph.partition(graph, count, flops_per_byte=rate)
        return
    everything = [ph.Partition(graph, cuts) for cuts in itertools.combinations(legal, count - 1)]
    least = min(time_of(p, rate) for p in everything)
    found = ph.partition(graph, count, flops_per_byte=rate)
    assert len(found.segments) == count
    assert time_of(found, rate) <= least * SLACK * 1.001
    # Among those as fast, none carries less.
    carried = min(sum(c.nbytes for c in p.cuts) for p in everything if time_of(p, rate) <= least)
    assert sum(c.nbytes for c in found.cuts) <= carried or rate == 0.0


@settings(max_examples=100, deadline=None)
@given(chains, st.integers(40, 600))
def test_a_limit_of_bytes_holds_with_as_few_segments_as_possible(graph: ph.Graph, limit: int) -> None:
    legal = [place for place in find_places(graph) if place.legal]
    if max(s.nbytes for s in ph.partition(graph, "finest").segments) > limit:
        with pytest.raises(ph.PartitionError, match="cannot be cut further"):
            ph.partition(graph, max_bytes=limit)
        return
    found = ph.partition(graph, max_bytes=limit)
    assert all(segment.nbytes <= limit for segment in found.segments)
    for count in range(1, len(found.segments)):
        for cuts in itertools.combinations(legal, count - 1):
            assert any(s.nbytes > limit for s in ph.Partition(graph, cuts).segments)


@settings(max_examples=100, deadline=None)
@given(chains, st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_the_window_counts_what_segments_count(graph: ph.Graph, bounds: list[int]) -> None:
    window = _Window(graph)
    start = 0
    for stop in sorted(min(b, len(graph.nodes)) for b in bounds):
        window.extend(stop)
        assert window.nbytes == ph.Segment(graph, 0, start, stop).nbytes
        start = (start + stop) // 2
        window.shrink(start)
        assert window.nbytes == ph.Segment(graph, 0, start, stop).nbytes


@settings(max_examples=100, deadline=None)
@given(chains)
def test_places_count_what_is_alive(graph: ph.Graph) -> None:
    constraints = find_constraints(graph)
    for place in find_places(graph):
        assert place.nbytes == sum(graph.values[i].nbytes for i in find_live(graph, place.index))
        assert place.legal == (not any(c.first < place.index <= c.last for c in constraints))


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


def test_an_in_place_operation_stays_with_its_input() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    graph = ph.capture(model, (torch.randn(4, 8), torch.randn(4, 8)), squared)
    places = find_places(graph)
    assert not places[0].legal and places[1].legal
    assert places[0].forbidden is not None
    assert places[0].forbidden.reason == "relu_ in 1 writes in place into what linear in 0 made"


def test_sizes_that_depend_on_data_are_not_cut_from_their_use() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.a(x)[x[:, 0] > 0]
            return self.b(kept.relu()).sum() + self.a(x).sum()

    graph = ph.capture(Selects(), torch.randn(6, 8))
    assert not graph.opaque
    reasons = {p.forbidden.kind for p in find_places(graph) if p.forbidden}
    assert reasons == {"data-dependent size"}
    assert_partitions_same(Selects(), graph, [torch.randn(6, 8), torch.randn(5, 8)], counts=(1, 2, 3, "finest"))


def test_long_skips_are_carried_and_counted() -> None:
    model, make, loss = zoo("unet")
    graph = ph.capture(model, make(2), loss)
    widest = max(len(find_live(graph, p.index)) for p in find_places(graph) if p.legal)
    assert widest >= 3  # the skips of the upper levels beside the value at work


def test_pinned_cuts_alone_and_beside_a_number() -> None:
    model, make, loss = zoo("gpt")
    graph = ph.capture(model, make(4), loss)
    pinned = ph.partition(graph, cuts=["blocks.0", "blocks.1"])
    assert [s.modules[-1].split(".")[:2] for s in pinned.segments[:2]] == [["blocks", "0"], ["blocks", "1"]]
    wider = ph.partition(graph, 5, cuts=["blocks.0", "blocks.1"])
    assert {c.index for c in pinned.cuts} < {c.index for c in wider.cuts}
    assert len(wider.segments) == 5
    batch = make(3)
    assert_same(run_segments(model, wider, batch), run_plain(model, batch, loss))


def test_repeated_blocks_share_one_code() -> None:
    model, make, loss = zoo("gpt")
    partition = ph.partition(ph.capture(model, make(4), loss))
    assert len(partition.segments) == 5  # embedding, three blocks, head
    assert len(partition.codes) == 3
    first, second, third = partition.segments[1:4]
    assert first.code is second.code is third.code
    assert [p.replace("blocks.0", "blocks.1") for p in first.parameters] == list(second.parameters)


def test_small_neighbours_become_one_but_for_users_of_one_parameter() -> None:
    model, make, loss = zoo("gpt")
    blocks = ph.partition(ph.capture(model, make(4), loss))
    joined = join_small(blocks)
    assert {cut.index for cut in joined.cuts} < {cut.index for cut in blocks.cuts}
    assert len(joined.segments) < len(join_small(blocks, least=16).segments) <= len(blocks.segments)
    for segment in joined.segments:  # the embedding is the head's, too
        inside = [s for s in blocks.segments if segment.start <= s.start < segment.stop]
        assert len(set().union(*(s.parameters for s in inside))) == sum(len(s.parameters) for s in inside)


def test_what_has_no_parameters_goes_with_what_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["packhorse.partition.partition"]  # by its name it is the function
    monkeypatch.setattr(module, "SMALL_FLOPS", 1000)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2), nn.ReLU())
    finest = ph.partition(ph.capture(model, torch.ones(4, 16), lambda y, _: y.mean()), "finest")
    joined = join_small(finest)
    assert [segment.parameters for segment in joined.segments] == [
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
        ("4.weight", "4.bias"),
    ]


def test_a_plan_without_a_budget_joins_what_is_small() -> None:
    model, make, loss = zoo("mlp")
    graph = ph.capture(model, make(4), loss)
    assert ph.make_plan(graph, strategy="resident").num_segments == 1
    assert ph.make_plan(graph, strategy="relay").num_segments > 1
    assert ph.make_plan(graph, memory="4GiB", strategy="resident").num_segments > 1


class Repeats(nn.Module):
    """One layer several times, a view of a weight twice, a recurrent layer, a value that only parameters make."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.recurrent, self.shift = nn.LayerNorm(6), nn.GRU(6, 6), nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.kind == "layer":
            for _ in range(3):
                x = self.norm(x + torch.tanh(self.again(x)))
        if self.kind == "view":
            turned = self.again.weight.t()
            x = torch.tanh(x @ turned) @ turned
        if self.kind == "recurrent":
            x = x + self.recurrent(x.unsqueeze(0).expand(3, -1, -1))[0].sum(0)
        if self.kind == "shift":
            x = x * torch.sigmoid(self.shift) + self.shift.exp().sum()
        return self.last(self.norm(x)).square().mean()


@pytest.mark.parametrize("kind", ["layer", "view", "recurrent", "shift"])
def test_a_backward_in_halves_is_a_backward(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = Repeats(kind), torch.randn(4, 6)
    graph = ph.capture(model, batch)
    halved = ph.partition(graph, cuts=["first"])  # the rest is one segment, with an input
    assert_same(run_segments(model, halved, batch, halves=True), run_plain(model, batch), kind)

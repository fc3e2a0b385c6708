"""The rehearsal: a few segments of each kind run on this machine, in a process of their own, to see how long they take.

In: segments and the rows of a microbatch. Out: a `Price` for every kind of segment. Rates of families of kernels price any
machine, but no rate holds for all shapes; where the machine is here, running is better than reckoning.
"""

import itertools
import json
import logging
import pickle
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.device import find_device
from packhorse.gradient import Gradient
from packhorse.graph import Graph, Size
from packhorse.graph.graph import Type
from packhorse.memory import Heap, Ledger, PeakWatch, Pool, find_heap, settle, take_huge_pages
from packhorse.partition import Segment
from packhorse.price import Price
from packhorse.running import Running
from packhorse.store import MASTER
from packhorse.store.blocks import make_block

logger = logging.getLogger("packhorse")

TWINS = 2  # of each kind, at most, that take part: the second finds memory as the others will
MICROBATCHES = 2  # of a step, at most
ROUNDS = 4  # as many of them as begin within `PATIENCE`: the speed of a shared machine changes from second to second
PATIENCE = 8.0  # seconds
LET_KEEP = 0.85  # of what malloc keeps where graphs stay: what it keeps beyond that is given back (`trainer.DRIFT`)
LONGEST = 16.0  # seconds that running all segments may take; else a few of each kind stand for the others


@dataclass(frozen=True)
class Likely:
    """What is thought of a segment beforehand."""

    kind: Any
    segment: Segment
    price: Price
    graph: int  # bytes that stay between forward and backward
    backward: int  # bytes at most at a time, the graph included
    gradients: int  # bytes of the sums over microbatches
    crossing: int  # bytes of its inputs, and of the gradients of its outputs


@dataclass(frozen=True)
class Invitation:
    """To rehearse the same segments, of the same graph, at the same time."""

    places: list[tuple[int, int, int]]  # index, start, stop
    rows: int
    resident: bool

    def follow(self, graph: Graph, device: str) -> None:
        rehearse([Segment(graph, *place) for place in self.places], self.rows, self.resident, device, stays=True)


@dataclass
class Rehearsed:
    """What kinds of segments took, at so many rows, beside what rates had made likely.

    Where graphs are kept from forward to backward, forward finds no memory that it could use again and pays for new: times
    are kept apart.
    """

    found: dict[tuple[Any, int, bool], tuple[Price, Price]] = field(default_factory=dict)  # kind, rows, resident
    update: tuple[float, float] | None = None  # seconds for an element, and for a piece
    kept: dict[tuple[int, bool], int] = field(default_factory=dict)  # bytes that malloc and kernels kept for themselves
    tried: set[tuple[int, bool, frozenset[Any]]] = field(default_factory=set)
    tell: "Callable[[Invitation], object] | None" = (
        None  # others on this machine, who will compute at the same time too
    )

    def __len__(self) -> int:
        return len(self.found)

    def learn(self, likely: Sequence[Likely], rows: int, resident: bool, device: str, room: int) -> bool:
        """Runs segments, of which something is likely, in so many bytes. False: there was nothing to learn."""
        key = (rows, resident)
        new = frozenset(entry.kind for entry in likely if (entry.kind, *key) not in self.found)
        if not new or (*key, new) in self.tried:
            return False
        self.tried.add((*key, new))
        chosen = _choose(likely, resident, room)
        if self.tell is not None:
            self.tell(Invitation([(s.index, s.start, s.stop) for s in (e.segment for e in chosen)], rows, resident))
        prices, grown = rehearse(
            [entry.segment for entry in chosen], rows, resident, device, stays=self.tell is not None
        )
        ran = [(entry, price) for entry, price in zip(chosen, prices, strict=True) if price is not None]
        forward, backward = _average(ran), _average(ran[::-1])
        for entry, _ in ran:
            price, other, rated = forward[entry.kind], backward[entry.kind], entry.price
            if resident:
                building, rebuilding = price.building, price.building * rated.rebuilding / rated.building
            else:
                building, rebuilding = other.rebuilding * rated.building / rated.rebuilding, other.rebuilding
            measured = other._replace(forward=price.forward, building=building, rebuilding=rebuilding)
            self.found[entry.kind, rows, resident] = (measured, rated)
        if grown is not None and None not in prices:
            reckoned = _add_up(chosen, resident)
            # Where graphs stay, what is kept grows with them.
            scale = LET_KEEP * _add_up(likely, resident) / max(reckoned, 1) if resident else 1.0
            self.kept[key] = int(scale * max(grown - reckoned, 0))
        return any(price is not None for price in prices)

    def kept_bytes(self, rows: int, resident: bool) -> int | None:
        """Beyond what was reckoned; at other rows as much. None: nobody knows."""
        near = [n for (_, other), n in self.kept.items() if other == resident]
        return self.kept.get((rows, resident), max(near, default=None))

    def refine(self, kind: Any, rows: int, resident: bool, priced: Price) -> Price:
        """As it ran; at other rows, or for another kind, what rates make likely, corrected by how far off they were."""
        if (kind, rows, resident) in self.found:
            return self.found[kind, rows, resident][0]
        near = [pair for (other, _, _), pair in self.found.items() if other == kind] or list(self.found.values())
        if not near:
            return priced
        measured, likely = (Price(*map(sum, zip(*prices, strict=True))) for prices in zip(*near, strict=True))
        return Price(*(p * m / q if q else p for p, m, q in zip(priced, measured, likely, strict=True)))


def _average(ran: Sequence[tuple[Likely, Price]]) -> dict[Any, Price]:
    """Of each kind, in the order in which they ran: without the first, which finds no memory that a twin has left."""
    prices: defaultdict[Any, list[Price]] = defaultdict(list)
    for entry, price in ran:
        prices[entry.kind].append(price)
    return {kind: Price(*map(statistics.fmean, zip(*(some[1:] or some), strict=True))) for kind, some in prices.items()}


def _choose(likely: Sequence[Likely], resident: bool, room: int) -> Sequence[Likely]:
    """All, where what malloc keeps depends on all that stays, if there is time and room; else a few of each kind."""
    seconds = (1 + MICROBATCHES) * sum(entry.price.building + entry.price.backward for entry in likely)
    if resident and seconds <= LONGEST and _need(likely, resident) <= room:
        return likely
    return _choose_twins(likely)


def _choose_twins(likely: Sequence[Likely]) -> list[Likely]:
    """In order, no more than a few of each kind."""
    seen: Counter[Any] = Counter()
    chosen = []
    for entry in likely:
        seen[entry.kind] += 1
        if seen[entry.kind] <= TWINS:
            chosen.append(entry)
    return chosen


def reckon(likely: Sequence[Likely], resident: bool) -> int:
    """Bytes that a rehearsal needs at least."""
    return _need(_choose_twins(likely), resident)


def _need(chosen: Sequence[Likely], resident: bool) -> int:
    """All that take part have their parameters in memory."""
    return sum(entry.segment.parameter_nbytes for entry in chosen) + _add_up(chosen, resident)


def _add_up(chosen: Sequence[Likely], resident: bool) -> int:
    """Bytes that a rehearsal should take at its peak, beside parameters."""
    if not resident:
        return max(entry.backward + entry.gradients + entry.crossing for entry in chosen)
    graphs = [0, *itertools.accumulate(entry.graph for entry in chosen)]
    peak = max(before + entry.backward for before, entry in zip(graphs, chosen, strict=False))
    return peak + sum(entry.gradients for entry in chosen)


Outcome = tuple[list[Price | None], int | None]


def rehearse(segments: Sequence[Segment], rows: int, resident: bool, device: str, *, stays: bool = False) -> Outcome:
    """Runs segments of one graph, one after another: their prices, and the bytes by which the process grew.

    `stays`: freed memory is never given back, as by ranks without a budget.

    None for what does not run on made-up values, or cannot be told.
    """
    graph = segments[0].graph
    nothing: Outcome = ([None] * len(segments), None)
    if graph.blocks:
        return nothing  # modules of the user's, which only this process has
    task = (
        graph,
        [(s.index, s.start, s.stop) for s in segments],
        rows,
        resident,
        device,
        torch.get_num_threads(),
        stays,
    )
    command = [sys.executable, "-m", "packhorse.rehearse"]
    done = subprocess.run(command, input=pickle.dumps(task), capture_output=True)
    try:
        prices, grown = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):  # killed, for instance: rates will do
        logger.debug("the rehearsal ended with %d: %s", done.returncode, done.stderr.decode(errors="replace")[-500:])
        return nothing
    return [None if price is None else Price(*price) for price in prices], grown


# -- in the child


class _Play:
    """A segment on made-up values, and the seconds it took."""

    def __init__(
        self,
        segment: Segment,
        rows: int,
        device: torch.device,
        running: Running,
        pool: Pool,
        chained: dict[str, Tensor] | None,
    ):
        """`chained`: what others hand on, if they run one after another."""
        self.segment, self.rows, self.device, self.running, self.chained = segment, rows, device, running, chained
        self.pool, self.host = pool, find_device(device, pool)
        graph = segment.graph
        types = {graph.values[o].name: graph.values[o].type for node in segment.nodes for o in node.operands}
        self.parameters = {name: self._make(types[name], is_weight=True) for name in segment.parameters}
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(graph.parameters[name].trainable)
        self.buffers = {name: torch.ones_like(self._make(types[name])) for name in segment.buffers}
        self.inputs = {name: types[name] for name in segment.inputs}
        self.graphs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.sums: dict[str, Gradient] = {}
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def _make(self, like: Type, *, is_weight: bool = False) -> Tensor:
        """Unlike numbers: were all the same, kernels that branch, such as a maximum's, would foresee their way.

        Weights are such that what passes through layers neither vanishes nor grows. An index is one that is always there.
        """
        assert like.dtype is not None
        shape: Any = [size.at(self.rows) if isinstance(size, Size) else size for size in like.shape]
        made = torch.zeros(shape, dtype=like.dtype, device=self.device)
        if like.dtype.is_floating_point and made.numel():
            reach = made.numel() // made.shape[0] if is_weight and made.ndim > 1 else 2
            _repeat(_PATTERN.to(made) * (2 / reach) ** 0.5, made.view(-1))
        return made

    def forward(self, what: str) -> None:
        """`what` is it for: "forward", to be forgotten; "building" a graph; or "rebuilding" one, without results."""
        grad = what != "forward"
        differentiable = self.segment.differentiable_inputs
        known = self.chained or {}
        inputs = {n: known[n].detach() if n in known else self._make(like) for n, like in self.inputs.items()}
        leaves = {n: t.requires_grad_(grad and n in differentiable) for n, t in inputs.items()}
        del inputs
        with (
            self._timed(what),
            torch.set_grad_enabled(grad or self.segment.needs_grad_mode),
        ):
            self.running.turn_to(self.segment, self.rows / self.segment.graph.batch.rows, grad)
            run = partial(self.segment.rebuild, by_rows=True) if what == "rebuilding" else self.segment
            outputs = run(self.parameters, {**self.parameters, **self.buffers}, leaves, rows=self.rows)
        if grad:
            self.graphs.append((leaves, outputs))
            if self.chained is not None:
                self.chained.update({name: tensor.detach() for name, tensor in outputs.items()})

    def backward(self) -> None:
        leaves, outputs = self.graphs.pop(0)
        seeds = {name: torch.ones_like(t) for name, t in outputs.items() if t.requires_grad}
        with self._timed("backward"):
            found = self.segment.differentiate(self.parameters, leaves, outputs, seeds)
            del leaves, outputs
        with self._timed("adding" if self.sums else "first"):
            for name in found.keys() & self.parameters.keys():
                self._add_up(name, found.pop(name))

    def _add_up(self, name: str, gradient: Tensor) -> None:
        """As a step does, in the precision of masters."""
        if name not in self.sums:
            kinds = {MASTER: self.segment.graph.parameters[name].dtype}
            block = make_block(name, [(name, self.parameters[name])], kinds)
            self.sums[name] = Gradient(block, self.segment.index, self.host)
        total = self.sums[name]
        total.add(total.block.slots[0], gradient, alone=True)

    def forget_sums(self) -> None:
        for total in self.sums.values():
            total.let_go()
        self.sums.clear()
        self.pool.shrink(0)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[what].append(self._now() - started)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def price(self) -> Price:
        """Means. What never ran takes as long as what is most like it."""
        forward, building, rebuilding, *others = (self.seconds[what] for what in Price._fields)
        found = (forward or building, building or rebuilding, rebuilding or building, *others)
        return Price(*(statistics.fmean(times) if times else 0.0 for times in found))


_PATTERN = torch.randn(4093, generator=torch.Generator().manual_seed(0))


def _repeat(pattern: Tensor, flat: Tensor) -> None:
    """Fills a tensor as fast as a copy does."""
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def run(segments: Sequence[Segment], rows: int, resident: bool, device: torch.device, stays: bool = False) -> Outcome:
    """One microbatch to warm up, then rounds of as many as a step has, but of a few at most, in the order of a step."""
    heap = Heap(Ledger(), keeps=resident, ceiling=None if resident else 0)
    running, pool = Running(heap, lambda *_: None), Pool(Ledger())
    values: dict[str, Tensor] = {}
    chained = values if resident else None
    company = _Company([partial(_Play, segment, rows, device, running, pool, chained) for segment in segments])
    settle()
    watch = PeakWatch()

    def take(microbatches: int) -> None:
        if resident:
            for _ in range(microbatches):
                company.each(lambda play: play.forward("building"))
                values.clear()
                company.each(_Play.backward, backwards=True)
        else:
            company.each(partial(_evaluate, microbatches))
            company.each(partial(_train, microbatches), backwards=True)
        company.each(_Play.forget_sums)

    begun_at = find_heap()[1]
    take(1)
    if stays and resident:
        take_huge_pages(begun_at)
    company.each(lambda play: play.seconds.clear())
    started = time.perf_counter()
    microbatches = min(MICROBATCHES, -(-segments[0].graph.batch.rows // rows))
    for _ in range(ROUNDS):
        take(microbatches)
        if time.perf_counter() - started > PATIENCE:
            break
    grown = watch.read() if device.type == "cpu" else None
    if microbatches == 1:  # what adding up takes is asked at other rows
        take(MICROBATCHES)
    prices = [play.price() if play is not None else None for play in company.plays]
    return prices, grown


def _evaluate(microbatches: int, play: _Play) -> None:
    for _ in range(microbatches):
        play.forward("forward")


def _train(microbatches: int, play: _Play) -> None:
    for _ in range(microbatches):
        play.forward("rebuilding")
        play.backward()
    play.forget_sums()  # they go to the update


class _Company:
    """Those that play. Who fails has no part in what follows: values that depend on others, operators of the user's."""

    def __init__(self, makers: Sequence[Callable[[], _Play]]):
        self.plays: list[_Play | None] = [None] * len(makers)
        for i, make in enumerate(makers):
            with suppress(Exception):
                self.plays[i] = make()

    def each(self, act: Callable[[_Play], None], *, backwards: bool = False) -> None:
        order = range(len(self.plays))
        for i in reversed(order) if backwards else order:
            play, self.plays[i] = self.plays[i], None
            if play is not None:
                with suppress(Exception):
                    act(play)
                    self.plays[i] = play


def main() -> None:
    with suppress(OSError):  # where memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    graph, ranges, rows, resident, device, threads, stays = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    print(json.dumps(run([Segment(graph, *place) for place in ranges], rows, resident, torch.device(device), stays)))


if __name__ == "__main__":
    main()

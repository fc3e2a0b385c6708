"""Arrangements: how several ranks share the work, found before anything is made.

In: a graph, how many ranks, what the user fixed, a budget, a machine, and a way to make the `Case` of any rank. Out: a `Wish`
that leaves nothing open about ranks: replicas x stages, the order of a pipeline, how many microbatches are under way, the cuts
between stages, and whether ranks keep all of the model, stream it, or have a stage each. The fastest that fits every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from packhorse.case import Case
from packhorse.errors import BudgetError, MachineError, PackhorseError, RanksError
from packhorse.graph import Graph
from packhorse.machine import Machine
from packhorse.memory import Memory
from packhorse.partition import Partition, find_places, join_between, partition
from packhorse.plan import Plan
from packhorse.ranks.links import Links
from packhorse.ranks.shape import Order, Ranks
from packhorse.ranks.stages import assign, cut_into_stages
from packhorse.rehearse import Rehearsed
from packhorse.search import REHEARSALS, CaseOf, Wish, choose_with, make_cases, run_beforehand

MOST_AHEAD = 3  # microbatches that may hide the time of a message
MOST_STAGES = 32
GROUPS = (1, 2, 4, 8)  # microbatches that go through a stage at a time
WORTH = 0.99  # of the time, for an arrangement that is less simple, or takes more memory

# A case, and which segments it runs: of a rank at a place in the pipeline; its links, if it has others to talk to.
CaseAt = Callable[[Partition, Wish, Links | None], Case]


@dataclass(frozen=True)
class Arrangement:
    """What is wished, with ranks, strategy and cuts; and the stages' cuts among those."""

    wish: Wish
    stage_cuts: tuple[int, ...] = ()

    @property
    def ranks(self) -> Ranks:
        return self.wish.ranks

    def links_at(self, part: Partition, place: int, updated: frozenset[str]) -> Links:
        return Links(part, assign(part, self.stage_cuts, self.ranks.pipeline), place, updated)

    def case_of(self, case_at: CaseAt, place: int, updated: frozenset[str]) -> CaseOf:
        """What makes the case of the rank at a place; of others in the pipeline, whose links are the same but for that."""

        def make(part: Partition) -> Case:
            links = self.links_at(part, place, updated)
            at = None if self.ranks.pipeline == 1 else lambda other: case_at(part, self.wish, links.moved_to(other))
            return replace(case_at(part, self.wish, links), at=at)

        return make


def lay_out(graph: Graph, wish: Wish, ranks: Ranks, *, by_block: bool) -> Arrangement:
    """With cuts between the stages of a pipeline, and, `by_block`, those between blocks beside them.

    Without, those stay that part users of one parameter.
    """
    if ranks.pipeline == 1:
        return Arrangement(replace(wish, ranks=ranks))
    stage_cuts = cut_into_stages(graph, ranks)
    blocks = [place.index for place in partition(graph).cuts] if wish.cuts is None else wish.cuts
    cuts = tuple(sorted({*blocks, *stage_cuts}))
    if not by_block and wish.cuts is None:
        places = {place.index: place for place in find_places(graph)}
        joined = join_between(Partition(graph, tuple(places[cut] for cut in cuts)), stage_cuts)
        cuts = tuple(place.index for place in joined.cuts)
    return Arrangement(replace(wish, cuts=cuts, ranks=ranks, strategy="pipeline"), stage_cuts)


def arrange(
    graph: Graph,
    case_at: CaseAt,
    updated: frozenset[str],
    wish: Wish,
    memory: Memory,
    machine: Machine,
    size: int,
    ranks: Ranks | None = None,
    *,
    rehearsed: Rehearsed | None = None,
) -> tuple[Arrangement, Case, Plan]:
    """For `size` ranks, or for `ranks` as the user arranged them; and the first rank's case and plan.

    Segments are run beforehand where that is worth it, by whoever calls this, while the others wait; what they took goes to
    `rehearsed`.
    """
    if "network" not in machine.bandwidth:
        raise MachineError(
            f"it is not known how fast ranks on {machine} talk to each other; say it, such as network='1Gbit'"
        )
    way = _Way(graph, case_at, updated, memory, machine, Rehearsed() if rehearsed is None else rehearsed)
    best = way.find_best(wish, size, ranks)
    for _ in range(REHEARSALS):
        _, case, plan = best
        if not run_beforehand(case, plan, memory, machine):
            break
        best = way.find_best(wish, size, ranks)
    return best


@dataclass(frozen=True)
class _Way:
    """From a candidate to its plan."""

    graph: Graph
    case_at: CaseAt
    updated: frozenset[str]
    memory: Memory
    machine: Machine
    rehearsed: Rehearsed

    def find_best(self, wish: Wish, size: int, ranks: Ranks | None) -> tuple[Arrangement, Case, Plan]:
        best: tuple[Arrangement, Case, Plan] | None = None
        refusals: list[tuple[Wish, Ranks, PackhorseError]] = []
        counts: dict[tuple[int, int], int] = {}  # replicas, stages -> microbatches that the first way to run them takes
        for streamed in (False, True):  # what does not fit in any other way goes through memory layer to layer
            for strategy, candidate in _candidates(self.graph, wish, size, ranks, streamed=streamed):
                shape = candidate.data, candidate.pipeline
                count = counts.get(shape) if candidate.pipeline > 1 and not streamed else None
                wanted = replace(wish, strategy=strategy, microbatches=wish.microbatches or count)
                try:
                    arrangement, case, plan = self.plan(wanted, candidate, explain=False)
                except (BudgetError, RanksError) as error:
                    refusals.append((wanted, candidate, error))
                    continue
                counts.setdefault(shape, plan.microbatches)
                if best is None or plan.estimate.seconds < WORTH * best[2].estimate.seconds:
                    # as many microbatches as the rows make of those that were asked for
                    wished = replace(arrangement.wish, microbatches=plan.microbatches)
                    decided = replace(wished.pinned_to(plan), piece_bytes=plan.piece_bytes, pace=plan.pace)
                    best = replace(arrangement, wish=decided), case, plan
            if best is not None:
                return best
        raise self._refuse(refusals)

    def plan(self, wish: Wish, ranks: Ranks, *, explain: bool) -> tuple[Arrangement, Case, Plan]:
        """Of the first rank. Where nothing waits for a block by itself, a stage is one segment: less to begin and to end.

        It holds the gradients of all its blocks beside their sums, so where that is too much, blocks are segments again.
        """
        if ranks.pipeline > 1 and ranks.data == 1 and not ranks.group:
            try:
                return self._plan(wish, ranks, by_block=False, explain=False)
            except BudgetError:
                pass
        return self._plan(wish, ranks, by_block=True, explain=explain)

    def _plan(self, wish: Wish, ranks: Ranks, *, by_block: bool, explain: bool) -> tuple[Arrangement, Case, Plan]:
        found = lay_out(self.graph, wish, ranks, by_block=by_block)
        case_of = found.case_of(self.case_at, 0, self.updated)
        cases = make_cases(self.graph, case_of, found.wish, self.memory)
        return found, *choose_with(cases, found.wish, self.memory, self.machine, self.rehearsed, explain=explain)

    def _refuse(self, refusals: Sequence[tuple[Wish, Ranks, PackhorseError]]) -> PackhorseError:
        """Of several ways, what the one says that takes least memory; it is asked to explain itself."""
        too_large = [(wish, ranks) for wish, ranks, error in refusals if isinstance(error, BudgetError)]
        if not too_large:
            return refusals[0][2]
        try:
            self.plan(*too_large[-1], explain=True)
        except BudgetError as error:
            return error
        return refusals[-1][2]


def _candidates(
    graph: Graph, wish: Wish, size: int, ranks: Ranks | None, *, streamed: bool
) -> Iterator[tuple[str, Ranks]]:
    """(strategy, ranks): the simplest first; `streamed`, those that take less memory than any other."""
    if ranks is None and wish.strategy == "pipeline":
        ranks = Ranks(pipeline=size)
    shapes = [ranks] if ranks is not None else list(_shapes(graph, wish, size))
    for shape in shapes:
        if shape.pipeline > 1:
            yield from (("pipeline", way) for way in _ways(shape, streamed=streamed))
        elif not streamed and wish.strategy in ("auto", "resident"):
            yield "resident", shape
    for shape in shapes:
        if not streamed and shape.pipeline == 1 and wish.strategy in ("auto", "relay"):
            yield "relay", shape


def _shapes(graph: Graph, wish: Wish, size: int) -> Iterator[Ranks]:
    """Replicas only first; then stages, up to as many as the model has places for, and replicas of those."""
    for pipeline in range(1, min(size, MOST_STAGES) + 1):
        data = size // pipeline
        is_possible = data * pipeline == size and data <= graph.batch.rows
        if is_possible and (pipeline == 1 or wish.strategy == "auto"):
            yield Ranks(data=data, pipeline=pipeline)


def _ways(ranks: Ranks, *, streamed: bool) -> Iterator[Ranks]:
    """To run a pipeline: in which order, how many more microbatches are under way, or how many at a time go through a stage."""
    if streamed:
        if ranks.group is None and ranks.order in (None, "1f1b"):
            yield from (replace(ranks, order="1f1b", ahead=ranks.ahead or 0, group=group) for group in GROUPS)
        return
    orders: tuple[Order, ...] = (ranks.order,) if ranks.order else ("1f1b",) if ranks.group else ("1f1b", "zero-bubble")
    for order in orders:
        for ahead in range(MOST_AHEAD + 1) if ranks.ahead is None else (ranks.ahead,):
            yield replace(ranks, order=order, ahead=ahead, group=ranks.group or 0)

"""A case: what is to be trained and where it lives, whatever the plan; and what its parts take.

In: a partition, a layout, a precision, the process so far. Out: `Case`: bytes and seconds of each segment, worked out once for
all twins. `estimate` walks lists of actions with it, `search` compares them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from packhorse.gradient import FEW, find_runs
from packhorse.graph import Size
from packhorse.layout import Layout
from packhorse.machine import Machine
from packhorse.memory import LEEWAY
from packhorse.optimizer import Stepper
from packhorse.partition import Footprint, Partition, Segment, find_footprint
from packhorse.precision import Cast, Precision
from packhorse.price import PASSES, PIECE, Price, price_node, price_update
from packhorse.ranks.links import Links
from packhorse.ranks.shape import ALONE, Ranks
from packhorse.rehearse import Likely, Rehearsed, reckon
from packhorse.store import MASTER, Block
from packhorse.store.places import make_places

RUNTIME = 12 << 20  # records of the graph, threads, what kernels keep for themselves
LEAST_KEPT = RUNTIME + LEEWAY  # that is planned with, however little a rehearsal showed


@dataclass(frozen=True)
class Case:
    partition: Partition
    layout: Layout
    batch_rows: int
    precision: Precision
    update: str
    on_disk: bool
    base_bytes: int  # of the process before training, without the model's own tensors
    model_bytes: int = 0  # those, given back when the store is filled
    versions: int = 1  # of each block on disk
    rolls: bool = False  # one version and a spare: an interrupted step is finished
    may_roll: bool = False  # if there is no room for two
    is_slowed: bool = False  # a store in RAM that is slowed down as if it were behind a link
    casts: tuple[Cast, ...] = ()
    stepper: Stepper | None = None
    ranks: Ranks = ALONE
    links: Links | None = None  # to other ranks
    at: "Callable[[int], Case] | None" = None  # the same for another place in the pipeline
    rehearsed: Rehearsed = field(default_factory=Rehearsed)

    # -- parameters

    @cached_property
    def weights(self) -> dict[int, int]:
        """Bytes a segment's FETCH brings, in working precision."""
        return {s.index: self.fetch_bytes(s) for s in self.partition.segments}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Of those, what takes host memory beside the store's own: all from disk, from RAM what is cast."""
        return {
            s: sum(b.working_nbytes for b in blocks if self.on_disk or b.is_cast or self.layout.shards)
            for s, blocks in enumerate(self.blocks)
        }

    def fetch_bytes(self, segment: Segment) -> int:
        return sum(block.working_nbytes for block in self.layout.blocks_of(segment))

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """What each segment reads."""
        return [self.layout.blocks_of(s) for s in self.partition.segments]

    @cached_property
    def homes(self) -> dict[int, list[Block]]:
        """Segment -> the blocks that are updated after its backward."""
        homes: dict[int, list[Block]] = defaultdict(list)
        for block in self.layout.blocks:
            home = self.layout.home(block)
            if home is not None:
                homes[home].append(block)
        return homes

    def gradient_bytes(self, s: int, *, rebuilt: bool) -> int:
        """What the sums of a segment's gradients take; `rebuilt`, after its graph was built again."""
        return sum(self.gradient_of(b, s, rebuilt=rebuilt) for b in self.blocks[s] if self.layout.home(b) is not None)

    def gradient_of(self, block: Block, s: int, *, rebuilt: bool) -> int:
        """What the sum of a block's gradient from one segment takes: of a table that is looked up, only rows."""
        full = master_bytes(block)
        if not rebuilt or self.update != "eager":  # what waits is whole
            return full
        spared = self._spared[s]
        return full - sum(spared.get(slot.name, 0) for slot in block.slots)

    @cached_property
    def _spared(self) -> list[dict[str, int]]:
        """For each segment, by parameter: bytes of its gradient that are not there if only looked-up rows are kept."""
        graph = self.partition.graph
        found: list[dict[str, int]] = []
        for segment in self.partition.segments:
            spared = {}
            for name, i in segment.looked_up.items():
                full, width = graph.parameters[name].nbytes, graph.parameters[name].shape[1]
                result = graph.values[graph.nodes[i].results[0]]
                numbers = result.nbytes // result.type.dtype.itemsize // width  # type: ignore[union-attr]  # a tensor
                numbers = numbers * self.batch_rows // graph.batch.rows
                if numbers <= FEW * graph.parameters[name].shape[0]:
                    spared[name] = full - numbers * full // graph.parameters[name].shape[0]
            found.append(spared)
        return found

    def find_pieces(self, nbytes: int) -> tuple[tuple[float, ...], ...]:
        """Into what pieces of so many bytes the gradients of each segment can be cut, at most, as parts of a whole one.

        0: what is sent in one go is one piece.
        """

        def cut(block: Block) -> Iterator[float]:
            if self.layout.shards or not nbytes:
                yield from [1.0] * (1 if self.layout.shards else len(find_runs(block)))
                return
            for run in find_runs(block):
                whole, rest = divmod(sum(slot.numel for slot in run) * block.kinds[MASTER].itemsize, nbytes)
                yield from [1.0] * whole + [round(rest / nbytes, 3)] * (rest > 0)

        return tuple(tuple(p for b in self.summed_at(s) for p in cut(b)) for s in range(len(self.blocks)))

    def summed_at(self, s: int) -> list[Block]:
        """The blocks whose gradients are summed over replicas when those of a segment are complete.

        Of a parameter that several segments use that is all of it, after the first of them; kept in parts, each by itself.
        """
        homes = self.layout.home
        return [b for b in self.blocks[s] if homes(b) == s or (self.layout.shards and homes(b) is not None)]

    @property
    def state_bytes(self) -> int:
        """Masters and optimizer states."""
        return sum(block.all_nbytes for block in self.layout.blocks)

    @property
    def disk_bytes(self) -> int:
        """What a store on disk takes, with all versions."""
        return sum(make_places(self.layout.blocks, self.versions, rolls=self.rolls).sizes.values())

    def rolling(self) -> "Case":
        """The same with one version."""
        return replace(self, versions=1, rolls=True, may_roll=False)

    # -- values that cross cuts

    @cached_property
    def value_bytes(self) -> dict[str, tuple[int, bool]]:
        """Bytes of each value that crosses a cut, at the example's rows, and whether they grow with the rows."""
        crossing = {name for s in self.partition.segments for name in s.outputs}
        return {
            v.name: (v.nbytes, any(isinstance(size, Size) for size in v.type.shape))
            for v in self.partition.graph.values
            if v.name in crossing and v.kind == "node"
        }

    @cached_property
    def crossing(self) -> list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
        """For each segment the values it stashes, those it restores, and those it makes gradients of."""
        segments = self.partition.segments
        used = {name for s in segments for name in s.inputs}
        found = []
        for s in segments:
            inputs = tuple(n for n in s.inputs if n in self.value_bytes)
            gradients = tuple(n for n in inputs if n in s.differentiable_inputs)
            found.append((tuple(n for n in s.outputs if n in used), inputs, gradients))
        return found

    def bytes_of(self, name: str, rows: int) -> int:
        nbytes, grows = self.value_bytes[name]
        return nbytes * rows // self.partition.graph.batch.rows if grows else nbytes

    # -- running a segment

    @cached_property
    def _kinds(self) -> list[Any]:
        """Of each segment, the same for those that take the same."""
        return [_find_kind(segment) for segment in self.partition.segments]

    @cached_property
    def _footprints(self) -> dict[tuple[Any, int], Footprint]:
        return {}

    def footprint(self, s: int, rows: int) -> Footprint:
        segment = self.partition.segments[s]
        key = (self._kinds[s], rows)
        if key not in self._footprints:
            self._footprints[key] = find_footprint(segment, rows)
        return self._footprints[key]

    def working_bytes(self, segment: Segment, building: bool, *, rows: int, reuses: bool) -> int | None:
        """What running a segment of this partition takes at most, the sums of its gradients included; of others None.

        Nothing, if it `reuses` what the microbatch before has left there.
        """
        if segment.index >= len(self.partition.segments) or self.partition.segments[segment.index] is not segment:
            return None
        if reuses:
            return 0
        footprint = self.footprint(segment.index, rows)
        if not building:
            return footprint.forward
        return max(footprint.building, footprint.backward) + self.gradient_bytes(segment.index, rebuilt=False)

    @cached_property
    def _prices(self) -> dict[Any, Price]:
        return {}

    def price(self, s: int, rows: int, machine: Machine, *, resident: bool) -> Price:
        """Forward and backward of a segment, in seconds."""
        segment, kind = self.partition.segments[s], self._kinds[s]
        key = (kind, rows, resident, machine.name)
        if key not in self._prices:
            priced = self._price_by_rates(segment, rows, machine, resident)
            self._prices[key] = self.rehearsed.refine(kind, rows, resident, priced) if machine.is_here else priced
        return self._prices[key]

    def rehearse(self, rows: int, machine: Machine, *, resident: bool, room: int) -> bool:
        """Runs segments of every kind for so many rows, in so many bytes. False: all that could be learned is known."""
        if self.stepper is not None and self.rehearsed.update is None:
            self.rehearsed.update = self.stepper.measure()
        likely = self._think_of_all(rows, machine, resident)
        own = room // self.ranks.size if self.ranks.pipeline == 1 else 0  # a stage is not all of them
        return self.rehearsed.learn(likely, rows, resident, machine.device, own)

    def rehearsal_bytes(self, rows: int, machine: Machine, *, resident: bool) -> int:
        """What that takes, in a process of its own, beside the process itself."""
        return reckon(self._think_of_all(rows, machine, resident), resident)

    def _think_of_all(self, rows: int, machine: Machine, resident: bool) -> list[Likely]:
        return [self._think_of(s, rows, machine, resident) for s in self.partition.segments]

    def _think_of(self, segment: Segment, rows: int, machine: Machine, resident: bool) -> Likely:
        s, priced = segment.index, self._price_by_rates(segment, rows, machine, resident)
        footprint, (stashed, restored, _) = self.footprint(s, rows), self.crossing[s]
        crossing = sum(self.bytes_of(name, rows) for name in (*stashed, *restored))
        backward = footprint.backward if resident else footprint.rebuilt
        gradients = self.gradient_bytes(s, rebuilt=not resident)
        return Likely(self._kinds[s], segment, priced, footprint.graph, backward, gradients, crossing)

    def _price_by_rates(self, segment: Segment, rows: int, machine: Machine, resident: bool) -> Price:
        share, hollow = rows / segment.graph.batch.rows, segment.hollow
        prices = [
            price_node(segment.graph, node, machine, share, is_hollow=i in hollow)
            for i, node in enumerate(segment.nodes, segment.start)
        ]
        whole = Price(*(sum(column) for column in zip(*prices, strict=True)))
        summed, rate = self.gradient_bytes(segment.index, rebuilt=not resident), machine.rate("elementwise")
        cast = sum(master_bytes(b) + b.working_nbytes for b in self.blocks[segment.index] if b.is_cast and b.users)
        return whole._replace(first=cast / rate, adding=3 * summed / rate)

    def price_update(self, block: Block, machine: Machine) -> float:
        """Seconds of a core of the host."""
        if self.rehearsed.update is None or not machine.is_here:
            return price_update(block, machine)
        element, piece = self.rehearsed.update
        checked = summed_bytes(block) / machine.bandwidth["host"]  # whether its gradient is finite
        return PASSES[block.whole] * block.numel * element + self._count_pieces(block) * (piece + PIECE) + checked

    def _count_pieces(self, block: Block) -> int:
        """Tensors, or tiles of those that may be cut, that are stepped by themselves."""
        assert self.stepper is not None, "who knows how long a step takes has tried it"
        stepped = [slot for slot in block.slots if slot.name in self.stepper.groups]
        if block.whole:
            return len(stepped)
        return sum(-(-slot.numel // self.stepper.tile(slot.name)) for slot in stepped)

    def kept_bytes(self, rows: int, *, resident: bool) -> int:
        """What malloc keeps of what is freed, and kernels and threads for themselves: as a rehearsal showed, or a guess."""
        kept = self.rehearsed.kept_bytes(rows, resident)
        return max(RUNTIME + (kept or 0), LEAST_KEPT)


def _find_kind(segment: Segment) -> Any:
    """The same for segments that take the same.

    One code may run on other sizes, as the stages of a convolutional net do, and with or without gradients.
    """
    trainable = tuple(segment.graph.parameters[name].trainable for name in segment.parameters)
    sizes = (segment.flops, segment.nbytes, segment.parameter_nbytes)
    return id(segment.code), sizes, trainable, len(segment.differentiable_inputs)


def master_bytes(block: Block) -> int:
    return block.numel * block.kinds[MASTER].itemsize


def summed_bytes(block: Block) -> int:
    """Without what lies between tensors."""
    return sum(slot.numel for slot in block.slots) * block.kinds[MASTER].itemsize


def count_uses(segments: Mapping[int, int], crossing: Sequence[tuple[tuple[str, ...], ...]]) -> dict[str, int]:
    """How often each value is read, given how often each segment runs forward."""
    uses: dict[str, int] = defaultdict(int)
    for s, times in segments.items():
        for name in crossing[s][1]:
            uses[name] += times
    return uses

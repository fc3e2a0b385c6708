"""The world: the processes that torchrun started, and the bytes that go between them. Only here is torch.distributed used.

In: an arrangement of the ranks. Out: `World`: sends and receives along a pipeline, sums over replicas, agreement among all.
Everything returns something to wait for; nothing here waits by itself but what says so.
"""

import atexit
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from packhorse.errors import RanksError
from packhorse.ranks.shape import Ranks

PROBE = 2 << 20  # bytes, to see how fast ranks talk
PINGS = 5
TOIL = 0.5  # seconds of sums beside compute, to see how much they keep it from
MOST_TOILS = 9
TOILED = 4 << 20  # elements that compute goes through: more than a cache holds
PATIENCE = "PACKHORSE_PATIENCE"  # in the environment: seconds that a rank waits for another

# torch 2.13 renames them, and warns of the old names, which are all that 2.9 has
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work:
    """Something under way between ranks, once `begin` has begun it. `what` says it, should it fail."""

    def __init__(self, begin: Callable[[], Any], what: str, *kept: Tensor):
        self._what, self._kept = what, kept  # the buffers, which must live until it is over
        with self._told():
            self._work = begin()

    def wait(self) -> None:
        work = self._work  # another thread may wait for it too
        if work is None:
            return
        with self._told():
            work.wait()
        self._work, self._kept = None, ()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RanksError(
                f"{self._what} did not happen: another rank has ended or is stuck, or has not made the same call "
                f"({_reason(error)}); all ranks end. Start them again with resume=True to go on from the last step that all of "
                "them finished"
            ) from None


@dataclass(frozen=True)
class _Announced:
    """What a rank is about to do, as a number, and the sum of all ranks' numbers, which is there when the work is over."""

    facts: Mapping[str, Any]
    number: int
    total: Tensor
    work: Work


class World:
    """This rank among the others."""

    def __init__(self, patience: float):
        self.rank, self.size, self.patience = dist.get_rank(), dist.get_world_size(), patience
        self.ranks = Ranks(data=self.size)
        self._control, self._commits, self._calls = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=patience)) for _ in range(3)
        )
        self._sums: Any = None
        self._gathers: Any = None
        self._facts: Any = None  # among replicas too, but not behind their sums
        self._ways: dict[bool, Any] = {}
        self._announced: _Announced | None = None
        self._alike: Any = None  # what was announced last, and what its batch looked like
        self.sent_bytes = 0  # by this rank, for training: messages, and its part in sums and gathers
        self._meet()

    def arrange(self, ranks: Ranks) -> None:
        """From now on ranks have places. All must call it."""
        ranks.check_size(self.size)
        self.ranks = ranks
        mesh = dist.init_device_mesh(
            _find_device_type(),
            (ranks.data, ranks.pipeline),
            mesh_dim_names=("data", "pipeline"),
        )
        self._sums = mesh.get_group("data")
        self._ways = {False: mesh.get_group("pipeline")}
        # Every rank has to make every group. One without others is left out: its thread would wake up a hundred times a second.
        for replica in range(ranks.data if ranks.pipeline > 1 else 0):
            members = list(range(replica * ranks.pipeline, (replica + 1) * ranks.pipeline))
            group = dist.new_group(members, timeout=timedelta(seconds=self.patience))
            if replica == self.replica:
                self._ways[True] = group  # messages that go back have a way of their own
        for place in range(ranks.pipeline if ranks.data > 1 else 0):
            members = list(range(place, ranks.size, ranks.pipeline))
            wait = timedelta(seconds=self.patience)
            groups = dist.new_group(members, timeout=wait), dist.new_group(members, backend="gloo", timeout=wait)
            if place == self.place:
                self._gathers, self._facts = groups
        self._meet()

    def _meet(self) -> None:
        """Until all are connected: a rank that is refused something and ends would else look like a broken network."""
        self.gather_objects(None)

    @property
    def replica(self) -> int:
        return self.ranks.place(self.rank)[0]

    @property
    def place(self) -> int:
        return self.ranks.place(self.rank)[1]

    @property
    def is_first_here(self) -> bool:
        """On its machine."""
        return os.environ.get("LOCAL_RANK", str(self.rank)) == "0"

    def measure(self) -> tuple[float, float, float]:
        """Between ranks, as a ring of all of them sees it: bytes a second, seconds of latency, bytes for a second of compute.

        All must call it.
        """
        steps = 2 * (self.size - 1)
        empty, filled = self._time_sum(1, PINGS), self._time_sum(PROBE, 3)
        slowest = max(self.gather_objects(filled))
        lost = self._time_lost(slowest, min(max(round(TOIL / slowest), 1), MOST_TOILS))
        passed = PROBE * steps / self.size
        found = self.gather_objects((passed / max(filled - empty, 1e-6), empty / steps, passed / max(lost, 1e-6)))
        rates, latencies, works = zip(*found, strict=True)
        return min(rates), max(latencies), statistics.median(works)

    def _time_sum(self, nbytes: int, times: int) -> float:
        """The shortest of a few, after one that does not count."""
        tensor, seconds = torch.zeros(-(-nbytes // 4), device=_find_device_type()), []
        for _ in range(1 + times):
            started = time.perf_counter()
            with self._told():
                dist.all_reduce(tensor)
                float(tensor[0])  # devices work ahead
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    def _time_lost(self, seconds: float, times: int) -> float:
        """By how much a core that computes is late while a sum passes, which takes so long: what the system does for a
        network no process is charged with. What goes through memory, as most of a step does, is late most."""
        tensor, values, lost = torch.zeros(PROBE // 4, device=_find_device_type()), torch.zeros(TOILED), []

        def toil(goes_on: Callable[[float], bool]) -> tuple[int, float]:
            started, turns = time.perf_counter(), 0
            while goes_on(time.perf_counter() - started):
                values.add_(1.0)
                turns += 1
            return turns, time.perf_counter() - started

        for _ in range(times):
            alone, taken = toil(lambda passed: passed < seconds)
            with self._told():
                work = dist.all_reduce(tensor, async_op=True)
                turns, passed = toil(lambda _, work=work: not work.is_completed())  # type: ignore[misc]
                work.wait()
            lost.append(passed - turns * taken / max(alone, 1))
        return statistics.median(lost)

    # -- along the pipeline

    def send(self, buffer: Tensor, place: int, tag: int, *, backward: bool) -> Work:
        self.sent_bytes += buffer.nbytes
        begin = partial(dist.isend, buffer, group=self._ways[backward], group_dst=place, tag=tag)
        return Work(begin, f"rank {self.rank}: a message to stage {place}", buffer)

    def receive(self, buffer: Tensor, place: int, tag: int, *, backward: bool) -> Work:
        begin = partial(dist.irecv, buffer, group=self._ways[backward], group_src=place, tag=tag)
        return Work(begin, f"rank {self.rank}: a message from stage {place}", buffer)

    # -- over replicas

    def sum(self, flat: Tensor) -> Work:
        """Over all replicas of this stage, in place. All must ask in the same order."""
        self._count_ring(flat, rounds=2)
        begin = partial(dist.all_reduce, flat, group=self._sums, async_op=True)
        return Work(begin, f"rank {self.rank}: a sum of gradients", flat)

    def sum_parts(self, part: Tensor, whole: Tensor) -> Work:
        """This replica's part of the sum over all; parts are equal. All must ask in the same order."""
        self._count_ring(whole)
        begin = partial(_reduce_scatter, part, whole, group=self._sums, async_op=True)
        return Work(begin, f"rank {self.rank}: a sum of gradients", part, whole)

    def gather_parts(self, whole: Tensor, part: Tensor) -> Work:
        """All replicas' parts, one behind another. All must ask in the same order."""
        self._count_ring(whole)
        begin = partial(_all_gather, whole, part, group=self._gathers, async_op=True)
        return Work(begin, f"rank {self.rank}: parts of parameters", whole, part)

    def _count_ring(self, whole: Tensor, rounds: int = 1) -> None:
        self.sent_bytes += rounds * whole.nbytes * (self.ranks.data - 1) // self.ranks.data

    def gather(self, tensor: Tensor) -> tuple[Work, list[Tensor]]:
        """That of every replica, in order, once the work is over."""
        found = [torch.empty_like(tensor) for _ in range(self.ranks.data)]
        begin = partial(dist.all_gather, found, tensor, group=self._facts, async_op=True)
        return Work(begin, f"rank {self.rank}: running statistics of all ranks", tensor, *found), found

    # -- among all

    def sum_over_all(self, tensor: Tensor, what: str) -> Work:
        """In place, over all ranks: of what only one has, the others have zeros."""
        begin = partial(dist.all_reduce, tensor, group=self._control, async_op=True)
        return Work(begin, f"rank {self.rank}: {what}", tensor)

    def tell_commit(self) -> Work:
        """Over when all ranks have called it, each after its own commit."""
        token = torch.zeros(1)
        begin = partial(dist.all_reduce, token, group=self._commits, async_op=True)
        return Work(begin, f"rank {self.rank}: a commit of all ranks", token)

    def gather_objects(self, value: Any) -> list[Any]:
        """A small value of every rank. Waits."""
        return self._gather_objects(value, self._control)

    def _gather_objects(self, value: Any, group: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._told():
            dist.all_gather_object(found, value, group=group)
        return found

    def share(self, value: Any, root: int) -> Any:
        """What rank `root` has, for all. Waits."""
        holder = [value]
        with self._told(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, on unpickling a TreeSpec
            dist.broadcast_object_list(holder, src=root, group=self._control)
        return holder[0]

    def share_tensor(self, tensor: Tensor, root: int) -> Tensor:
        """Likewise, in place."""
        with self._told():
            dist.broadcast(tensor, src=root, group=self._control)
        return tensor

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RanksError(
                f"rank {self.rank} could not reach the others: one has ended, or is stuck (after {self.patience:.0f} s), "
                f"or they do not run the same script with the same batches ({_reason(error)})"
            ) from None

    def announce(self, facts: Mapping[str, Any]) -> None:
        """What this rank is about to do, of which all have to do the same. `settle` tells whether they are.

        Nobody waits for that, unless it is another call than the one before, or the batch looks unlike its: whoever captures
        another graph waits for all, and messages of other sizes end processes.
        """
        self.settle()
        number = xxhash.xxh3_64_intdigest(repr(sorted(facts.items())).encode()) & 0xFFFF_FFFF
        total = torch.tensor(number)
        begin = partial(dist.all_reduce, total, group=self._calls, async_op=True)
        work = Work(begin, f"rank {self.rank}: comparing what ranks are about to do", total)
        self._announced = _Announced(facts, number, total, work)
        before, self._alike = self._alike, (facts["call"], facts["batch"])
        if self._alike != before:
            self.settle()

    def settle(self) -> None:
        """Before anything that comes of the others' batches is waited for. Raises on all ranks if they differ."""
        if self._announced is None:
            return
        announced, self._announced = self._announced, None
        announced.work.wait()
        if int(announced.total) != self.size * announced.number:  # then all of them find that
            self._agree(announced.facts, self._calls)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises on all ranks if they do not have the same, with what differs."""
        self._agree(facts, self._control)

    def _agree(self, facts: Mapping[str, Any], group: Any) -> None:
        found = self._gather_objects({name: str(value) for name, value in facts.items()}, group)
        for name, value in found[0].items():
            for rank, others in enumerate(found):
                if others.get(name) != value:
                    raise RanksError(
                        f"rank {rank} has another {name} than rank 0: {_shorten(others.get(name))}, there {_shorten(value)}; "
                        "all ranks must run the same script with the same batches"
                    )


def _reason(error: RuntimeError) -> str:
    """The first sentence of what gloo says, without the line of its source."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^\[[^]]*\]\s*", "", text).partition(". ")[0]


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


_world: World | None = None
_is_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """What trains here takes no notice of other ranks, which do something else."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def find_world() -> World | None:
    """This rank's world, if torchrun started several processes; else None."""
    global _world
    if _is_alone:
        return None
    if _world is not None:
        return _world
    if not dist.is_available() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    patience = float(os.environ.get(PATIENCE, "300"))
    if not dist.is_initialized():
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is not None:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        backend = dist.get_default_backend_for_device(accelerator) if accelerator else "gloo"
        wait = timedelta(seconds=patience)
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=wait)))
        # The store outlives a restart, and with it the addresses of those who died: each attempt has keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"packhorse/attempt_{attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
        atexit.register(_leave)
    _world = World(patience)
    return _world


def _find_device_type() -> str:
    """Of what the ranks exchange."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type


def _leave() -> None:
    """At the end of the program."""
    if dist.is_initialized():
        dist.destroy_process_group()

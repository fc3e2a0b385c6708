"""The trainer: the public face. A model, an optimizer, an example and a budget in; steps out.

It captures, partitions, plans and lays out once; each step then splits a batch and hands a list of actions to the executor.
"""

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from packhorse.arrange import Arrangement, arrange
from packhorse.case import Case
from packhorse.device import find_device
from packhorse.errors import GradientError, NumericsError, PackhorseError, RanksError, StoreError
from packhorse.estimate import KEPT
from packhorse.exchange import Exchange
from packhorse.execute import Executor
from packhorse.graph import Graph
from packhorse.layout import make_layout
from packhorse.lowering import finish
from packhorse.machine import Machine
from packhorse.memory import (
    Heap,
    Ledger,
    Memory,
    Pool,
    peak_resident_bytes,
    read_budget,
    release,
    resident_bytes,
    settle,
)
from packhorse.optimizer import Stepper, refuse_sparse
from packhorse.partition import Partition
from packhorse.plan import Measured, Plan, Strategy, find_fingerprint, read_plan
from packhorse.precision import LossScale, Precision, check_precision, list_casts
from packhorse.program import Microbatch, Program, Record, Task
from packhorse.ranks.identity import (
    describe_batch,
    describe_function,
    describe_model,
    describe_rows,
    describe_values,
)
from packhorse.ranks.links import Links
from packhorse.ranks.shape import Ranks
from packhorse.ranks.world import World, find_world
from packhorse.rehearse import Invitation, Rehearsed
from packhorse.run import Home, Run, open_run
from packhorse.running import Running
from packhorse.schedule import check
from packhorse.search import Wish, choose
from packhorse.state import ModelState, StateDict
from packhorse.store import DiskStore, Journal, RamStore, Stash, Store
from packhorse.store.disk import Durability, check_durability
from packhorse.store.encode import decode
from packhorse.store.runs import name_of
from packhorse.tasks import Loss, Tasks, mean_loss
from packhorse.update import Updater
from packhorse.weights import refill

logger = logging.getLogger("packhorse")

DRIFT = 1.02  # from step to step, where freed memory stays
_open: "weakref.WeakSet[Trainer]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing its trainers loses no step for it."""
    for trainer in list(_open):
        try:
            trainer.close()
        except Exception as error:
            logger.error("a trainer could not be closed at the end of the program: %s", error)


class Trainer:
    """Trains a model that may be larger than memory, with the numbers plain PyTorch would give."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        example: Any,
        *,
        loss: Loss | None = None,
        weight: Callable[[Any], float] | None = None,
        strategy: Strategy = "auto",
        microbatches: int | None = None,
        precision: Precision = "fp32",
        memory: int | str | Memory | None = None,
        store: str | Path | Store | None = None,
        resume: bool = False,
        durability: Durability = "process",
        update: Literal["eager", "deferred"] = "eager",
        clip_norm: float | None = None,
        scheduler: Any = None,
        data: Any = None,
        device: str | torch.device | None = None,
        overlap: bool = True,
        seed: int = 0,
        weights: str | Path | None = None,
        plan: Plan | str | Path | None = None,
        ranks: Ranks | None = None,
    ):
        _check_choices(precision, update, clip_norm)
        refuse_sparse(model)
        wish = Wish(strategy, microbatches, overlap=overlap)
        self._world = find_world()
        self.model, self.loss, self.weight = model, loss, weight
        self.precision, self.clip_norm = precision, clip_norm
        self.deferred = update == "deferred" or clip_norm is not None or precision == "fp16"
        self._seconds = 0.0  # of the last step
        self.last: Task | None = None
        self._closed = self._broken = False
        self._ledger = Ledger()
        self._pool = Pool(self._ledger)
        self._device = find_device(device, self._pool)
        self._stepper = Stepper(optimizer, model)
        self._run = Run(self._stepper, seed, LossScale() if precision == "fp16" else None, scheduler, data)
        self._tasks = Tasks(model, loss, weight, self._device.name.partition(":")[0], precision, self._world)
        if self._world is None and ranks is not None and ranks.size > 1:
            ranks.check_size(1)
        if self._world is None and strategy == "pipeline":
            raise RanksError(
                "strategy='pipeline' needs several processes: start the script with torchrun --nproc-per-node=2 or more"
            )
        self._store: Store = _choose_store(store, durability)
        self._home = Home(self._store.path if isinstance(self._store, DiskStore) else None, world=self._world)
        if self._world is not None and self._store.rolls:
            raise RanksError(
                "the store keeps one version of every block, but several ranks need two, to go back to the last step that all "
                "of them have; leave versions=1 out"
            )
        try:
            self._prepare(example, wish, plan, memory, resume, weights, overlap, ranks)
        except BaseException:
            self._store.close()  # nobody else will
            raise

    def _prepare(
        self,
        example: Any,
        wish: Wish,
        plan: Plan | str | Path | None,
        memory: int | str | Memory | None,
        resume: bool,
        weights: str | Path | None,
        overlap: bool,
        ranks: Ranks | None,
    ) -> None:
        """Captures, cuts, plans, fills the store; what a run left unfinished is finished first, the way it was begun."""
        budget = read_budget(memory, self._device.name)
        settle()
        base = resident_bytes()
        if self._world is not None:
            self._agree(self._world, example, wish, ranks)
        graph = self._tasks.capture("train", example)
        if plan is not None:
            wish = wish.pinned_to(read_plan(plan, graph))
        machine = self._measure_machine()
        machine = machine.slowed(self._store.link.bytes_per_second).without_disk()  # the store sees to that itself
        means = _Means(graph, budget, machine, max(base - _own_bytes(self.model), 0), overlap)
        self._arrangement = Arrangement(wish)
        if self._world is not None:
            self._arrangement = self._arrange(self._world, means, wish, ranks)
        if self._store.holds_run:
            self._store.claim()
        versions = self._store.find_versions()
        journal = self._store.find_unfinished() if resume else None
        if journal is not None:
            self._finish(journal, means)
        self._build(means, self._arrangement.wish, versions, resume, weights)
        self._state.hand_over(self.model)
        release()  # what lay there before the store had it
        _open.add(self)

    def _measure_machine(self) -> Machine:
        """Of ranks on one machine the first, the others after it: at once they would measure each other."""
        world = self._world
        if world is not None and not world.is_first_here:
            world.gather_objects(None)
        place = self._store.path if isinstance(self._store, DiskStore) else None
        machine = Machine.probe(place, device=self._device.name.partition(":")[0])
        if world is not None:
            if world.is_first_here:
                world.gather_objects(None)
            machine = machine.linked(*world.measure())
        return machine

    def _agree(self, world: World, example: Any, wish: Wish, ranks: Ranks | None) -> None:
        """Before anything is made: ranks that differ would wait for each other, or train another model each."""
        world.agree(
            {
                "model": describe_model(self.model),
                "loss": describe_function(self.loss),
                "batch": describe_batch(example),
                "values of the model (seed torch alike before you build it)": describe_values(self.model),
                "optimizer": (type(self.optimizer).__name__, self._stepper.read_groups()),
                "choice": (ranks, wish, self.precision, self.clip_norm, self.deferred, self.seed, self._store.on_disk),
            }
        )

    def _arrange(self, world: World, means: "_Means", wish: Wish, ranks: Ranks | None) -> Arrangement:
        """One rank decides for all; then every rank has its place, and a store of its own."""
        found: Arrangement | PackhorseError | Invitation | None = None
        if world.rank == 0:
            means.rehearsed.tell = partial(world.share, root=0)
            case_at = partial(self._make_case, means, None)
            updated = frozenset(self._stepper.groups)
            try:
                found, _, _ = arrange(
                    means.graph,
                    case_at,
                    updated,
                    wish,
                    means.budget,
                    means.machine,
                    world.size,
                    ranks,
                    rehearsed=means.rehearsed,
                )
            except PackhorseError as error:
                found = error
            means.rehearsed.tell = None
        found = world.share(found, 0)
        while isinstance(found, Invitation):  # for the first to see how long segments take when all compute
            found.follow(means.graph, means.machine.device)
            found = world.share(None, 0)
        if isinstance(found, PackhorseError):
            raise found
        assert found is not None
        means.rehearsed.kept = world.share(means.rehearsed.kept, 0)
        world.arrange(found.ranks)
        name = name_of(found.ranks.data, found.ranks.pipeline, in_parts=found.wish.strategy == "relay")
        self._home = replace(self._home, name=name)
        if self._home.directory is not None:
            assert isinstance(self._store, DiskStore)
            self._store = self._store.moved_to(self._home.directory / name / f"rank{world.rank}")
        return found

    def _build(
        self, means: "_Means", wish: Wish, versions: int | None, resume: bool, weights: str | Path | None = None
    ) -> None:
        """From a graph to all that runs it."""
        graph = means.graph
        case_at = partial(self._make_case, means, versions)
        place, updated = 0 if self._world is None else self._world.place, frozenset(self._stepper.groups)

        def case_of(part: Partition) -> Case:
            if self._world is None:
                case = case_at(part, wish, None)
            else:
                case = self._arrangement.case_of(case_at, place, updated)(part)
            is_tight = isinstance(self._store, DiskStore) and not self._store.has_room(case.disk_bytes)
            return case.rolling() if case.may_roll and is_tight else case

        self._case, self.plan = choose(graph, case_of, wish, means.budget, means.machine, means.rehearsed)
        if self._world is not None:  # all ranks as many microbatches as the one that needs most
            most = max(self._world.gather_objects(self.plan.microbatches))
            wish = replace(wish, microbatches=most, strategy=self.plan.strategy)
            self._case, self.plan = choose(graph, case_of, wish, means.budget, means.machine, means.rehearsed)
        self._store.versions = self._case.versions
        self._partition, self._layout = self._case.partition, self._case.layout
        self._tasks.follow(self._case, self.plan)

        heap = self._make_heap(means.budget.limit("host"))
        self._state = ModelState(graph, self._layout, self._store, self._ledger, self._world, self._case.links)
        self._updater = Updater(self._store, self._stepper, self._state.small)
        open_run(self._run, self._home, self._state, self._pool, self.model, resume=resume, weights=weights)
        stash = Stash(self._ledger, self._store, self.plan.stash_bytes)
        reuses = self.plan.is_resident and means.budget.limit("host") is None  # with a budget nothing is left to luck
        find_need = partial(self._case.working_bytes, rows=self.plan.rows, reuses=reuses)
        self._executor = Executor(
            self._state,
            self._device,
            self._updater,
            stash,
            Running(heap, find_need, self._pool),
            seed=self.seed,
            overlap=means.overlap,
            updates_ahead=self.plan.updates_ahead,
        )
        if self._world is not None and self._case.links is not None:
            self._executor.connect(Exchange(self._executor, self._world, self._case.links, self._pool))
        heap.leave()

    def _make_heap(self, limit: int | None) -> Heap:
        """Freed memory goes back where more than planned would be taken, or, where there is plenty, than there is.

        Of ranks that have plenty, none does: sums that are under way lie between what the next forward takes, which would be
        given back and taken again at every step.
        """
        planned, spare = self.plan.estimate.peak["host"], self.plan.estimate.kinds["host"].get(KEPT, 0)
        keeps = self.plan.is_resident
        ceiling: int | None = planned - spare // 2  # half is enough: the rest is given back before it counts
        if keeps:
            ceiling = limit or (int(DRIFT * planned) if self._world is None else None)
        elif limit is not None and limit > 2 * planned:
            keeps, ceiling = True, limit
        return Heap(self._ledger, keeps=keeps, ceiling=ceiling, going=_own_bytes(self.model), strict=limit is not None)

    def _make_case(
        self, means: "_Means", versions: int | None, part: Partition, wish: Wish, links: Links | None
    ) -> Case:
        """Of this process; with `links` of the rank that has them, with its part of each block where ranks share them."""
        on_disk = self._store.on_disk
        durable = isinstance(self._store, DiskStore) and self._store.durability != "none"
        in_parts = links is not None and wish.strategy == "relay"
        replica = 0 if self._world is None else self._world.replica
        layout = make_layout(
            self.model,
            part,
            self._stepper,
            on_disk=on_disk,
            deferred=self.deferred,
            local=None if links is None else links.local,
            part=(replica, wish.ranks.data) if in_parts else (0, 1),
        )
        return Case(
            part,
            layout,
            means.graph.batch.rows,
            self.precision,
            "deferred" if self.deferred else "eager",
            on_disk,
            means.base_bytes,
            _own_bytes(self.model),
            versions or 2,
            versions == 1 and durable,
            versions is None and self._world is None,
            self._store.link.bytes_per_second is not None,
            list_casts(self.model, self.precision),
            self._stepper,
            wish.ranks,
            links,
        )

    def _finish(self, journal: Journal, means: "_Means") -> None:
        """Finishes a step that was interrupted, with its own batch, cuts and microbatches; nothing of that stays."""
        intent, records, tensors = journal.intent, list(journal.records), journal.read_tensors()
        assert intent is not None
        if intent["fingerprint"] != find_fingerprint(means.graph):
            raise StoreError(
                f"step {intent['facts']['step'] + 1} was interrupted and has to be finished first, but it was begun with "
                "another model, precision, or rows of the example; resume once with those"
            )
        deferred, self.deferred = self.deferred, intent["deferred"]
        wish = Wish("relay", intent["microbatches"], cuts=tuple(intent["cuts"]))
        self._build(means, wish, 1, resume=True)
        try:
            self._state.take_up(records)
            self._run.load(intent["facts"])
            self._updater.take_up(records[-1]["parked"], self._layout.blocks, self._device)
            self._executor.stash.adopt(records[-1]["gradients"])
            task = self._rest_of_step(intent, tensors, {record["segment"] for record in records})
            with self._undone_if_it_fails():
                self._executor.run(task)
                self._state.buffers.update(
                    {name.removeprefix("buffer:"): t for name, t in tensors.items() if name.startswith("buffer:")}
                )
                self._end_step(task, intent["facts"]["data"])
            self._settle()
            logger.info("step %d, which was interrupted, is finished", self.steps)
        finally:
            self.deferred = deferred
            self._executor.close()
            self._executor.stash.close()

    def _rest_of_step(self, intent: Mapping[str, Any], tensors: Mapping[str, Tensor], updated: set[int]) -> Task:
        """What is left to do, as the same list without what is done."""
        graph, num_microbatches = self._partition.graph, len(intent["shares"])
        actions = finish(self.plan.actions(num_microbatches, self._case.weights), updated)
        backward = self.plan.backward
        microbatches: list[Microbatch] = []
        if self.deferred:
            everything = range(self.plan.num_segments)
            check(actions, len(everything), num_microbatches, backward - updated, parked=everything)
        else:
            first = min(updated)
            check(actions, first, num_microbatches, backward & set(range(first)))
            batch = graph.batch.unflatten([tensors[f"batch:{i}"] for i in range(len(graph.batch.leaves))])
            graph = self._tasks.find_graph("train", batch)
            microbatches = self._tasks.split(graph, batch, intent["rows"], intent["shares"])
        task = Task(
            Program(self._tasks.partition_of(graph), actions),
            microbatches,
            self.steps,
            training=True,
            deferred=self.deferred,
            groups=self._stepper.read_groups(),
        )
        task.scale = decode(intent["scale"])
        return task

    # -- the loop's verbs

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        self._check_open()
        started = time.perf_counter()
        self._announce("step", batch)
        self._updater.num_threads = torch.get_num_threads()
        groups = self._stepper.read_groups()
        position = (
            self._run.read_position()
        )  # on entry: a loader that reads ahead may have moved on when the step is done
        task = self._tasks.make("train", batch, self.steps, training=True)
        task.groups, task.clip_norm = groups, self.clip_norm
        task.deferred = self.deferred
        task.loss_scale = self.scaler.scale if self.scaler else 1.0
        if self._store.rolls:
            task.intent, task.batch = self._intent(task, position), task.program.partition.graph.batch.flatten(batch)
        with self._undone_if_it_fails():
            self._executor.run(task)
            self.last = task
            self._end_step(task, position)
        loss, is_first = mean_loss(task), self._seconds == 0.0
        self._seconds = time.perf_counter() - started
        if is_first:
            logger.info("planned and measured: %s", self.compare())
        return loss

    def _announce(self, call: str, batch: Any) -> None:
        """To other ranks, which must be about to do the same with the same batch."""
        if self._world is not None:
            with self._undone_if_it_fails():
                self._world.announce(
                    {
                        "call": call,
                        "batch": describe_batch(batch),
                        "choice of samples": describe_rows(batch),
                        "step": self.steps,
                    }
                )

    def _end_step(self, task: Task, position: Any) -> None:
        if (
            not self._store.on_disk and self._world is None
        ):  # nothing to wait for but compute, and the user may see them
            self._executor.drain()
        if task.overflowed:
            self._updater.forget_parked()
        self._run.advance(overflowed=task.overflowed)
        self._commit(position)

    def _intent(self, task: Task, position: Any) -> dict[str, Any]:
        """What finishing this step would take to know, should it be interrupted."""
        return {
            "facts": self._run.facts(position),
            "fingerprint": self.plan.fingerprint,
            "cuts": list(self.plan.cuts),
            "microbatches": self.plan.microbatches,
            "rows": max(microbatch.rows for microbatch in task.microbatches),
            "deferred": self.deferred,
        }

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._roll_back(error)
            raise

    def _settle(self) -> None:
        """Waits for updates and commits that are under way; if one fails, the step it belongs to is undone."""
        with self._undone_if_it_fails():
            self._executor.drain()

    def _settle_if_open(self) -> None:
        """A closed trainer has nothing under way."""
        if not (self._closed or self._broken):
            self._settle()

    def _roll_back(self, error: BaseException) -> None:
        """After a failure: with versions, all is as the last commit left it, but the position of the data, which moves on.

        Of several ranks, only what all of them find can be undone. Else this one ends as if it had been killed, at once, since
        others find out by that; what is committed is safe.
        """
        all_know = isinstance(error, NumericsError) and not isinstance(error, GradientError)
        if self._world is not None and not all_know:
            self._executor.is_lost = self._broken = True
            self._executor.abandon()
            if not isinstance(error, RanksError):
                error.add_note("other ranks cannot go on without this one; start all of them again, with resume=True")
            return
        self._executor.abandon()
        try:
            facts = self._store.roll_back()
            if facts is not None:
                self._state.load_small(self._store.read_small())
                self._run.load({**facts, "data": None})
                error.add_note(f"the store is as it was after step {self.steps}; training may go on from there")
        except StoreError as second:
            self._broken = True
            error.add_note(
                f"the store could not be rolled back ({second}); close this trainer and make a new one with resume=True"
            )

    def evaluate(self, batch: Any) -> float:
        """The mean loss in evaluation mode; nothing is updated."""
        self._check_open()
        self._announce("evaluate", batch)
        self._settle()
        return mean_loss(self._executor.run(self._tasks.make("eval", batch, self.steps)))

    def predict(self, batch: Any) -> Any:
        """The model's output in evaluation mode, for the whole batch."""
        self._check_open()
        self._announce("predict", batch)
        self._settle()
        task = self._executor.run(self._tasks.make("predict", batch, self.steps))
        return self._tasks.join(task, batch, self._state)

    # -- what it holds

    def report(self) -> str:
        """The plan, and, after the first step, what was planned beside what was measured."""
        return "\n".join([str(self.plan), *([f"planned and measured: {self.compare()}"] if self.last else [])])

    def compare(self) -> str:
        """What was planned beside what was measured: the time of the last step, the memory of all."""
        assert self.last is not None
        records = self.last.records()
        compute = sum(r.end - r.start for r in records if r.action.kind in ("F", "R", "B"))
        on_cpu = self._device.name == "cpu"
        peak = {"host": peak_resident_bytes()} if on_cpu else {"device": self._device.memory_peak()}
        kinds = {tier: self._ledger.at_peak.get(tier, {}) for tier in peak}
        return self.plan.compare(Measured(self._seconds, compute, peak, kinds))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._run.optimizer

    @property
    def steps(self) -> int:
        """Steps that are done, those before a resume included."""
        return self._run.steps

    @property
    def seed(self) -> int:
        return self._run.seed

    @property
    def scaler(self) -> LossScale | None:
        """The loss scale of fp16."""
        return self._run.scaler

    @property
    def data(self) -> Any:
        """The loader whose position is committed with each step."""
        return self._run.data

    @property
    def memory(self) -> dict[str, int]:
        """Live bytes of each tier that packhorse holds."""
        totals = {tier: self._ledger.total(tier) for tier in ("device", "host", "disk")}
        totals["device"] += self._device.memory_allocated()
        return totals

    @property
    def records(self) -> list[Record]:
        """The actions of the last step as they ran."""
        return self.last.records() if self.last is not None else []

    def state_dict(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by name, both names of ties; a value is a copy, read when it is asked for."""
        self._check_open()
        self._settle()
        return StateDict(self._state, self._settle_if_open)

    def load_into(self, model: nn.Module) -> None:
        """Copies all parameters and buffers into a model with memory of its own."""
        self._check_open()
        self._settle()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                value = self._state.read(name)
                if tensor.is_meta:
                    raise PackhorseError(
                        f"{name} is on the meta device; load_into needs a model with memory, such as .to_empty()"
                    )
                refill(tensor, value)

    def save(self, directory: str | Path) -> list[Path]:
        """Writes the model as safetensors under its own names, ties once, with its config if it has one; for others to load."""
        self._check_open()
        self._settle()
        return self._state.save(directory, self.model)

    def close(self) -> None:
        """Finishes what is under way and lets go of memory, files and threads."""
        if self._closed:
            return
        try:
            if not self._broken:
                self._settle()
        finally:
            self._closed = True
            self._executor.close()
            for name, buffer in self.model.named_buffers():
                if not buffer.is_meta and name in self._state.buffers:
                    buffer.copy_(self._state.buffers[name])
            try:
                self._store.close()
            finally:
                self._executor.stash.close()  # when nothing is written to it any more

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, position: Any) -> None:
        """After the updates of this step, which a deferred one may still have under way."""
        facts = self._run.facts(position)
        if self._store.on_disk and self.steps:
            self._executor.submit_commit(lambda: self._store.commit(facts, self._state.small_tensors()))
        else:
            self._store.commit(facts, self._state.small_tensors())

    def _check_open(self) -> None:
        if self._broken:
            raise PackhorseError(
                "a step failed and could not be undone; close this trainer and make one with resume=True"
            )
        if self._closed:
            raise PackhorseError("the trainer is closed; make a new one (with resume=True to continue from its store)")


@dataclass(frozen=True)
class _Means:
    """What a plan is made with, whatever is wished."""

    graph: Graph
    budget: Memory
    machine: Machine
    base_bytes: int  # of the process before, without the model's own tensors
    overlap: bool
    rehearsed: Rehearsed = field(default_factory=Rehearsed)


def _choose_store(store: str | Path | Store | None, durability: Durability) -> Store:
    check_durability(durability)
    if store is None:
        return RamStore()
    if isinstance(store, (str, Path)):
        return DiskStore(store, durability=durability)
    if isinstance(store, DiskStore) and durability not in ("process", store.durability):
        raise PackhorseError(
            f"durability is {durability!r}, but the store given has {store.durability!r}; say it there"
        )
    return store


def _own_bytes(model: nn.Module) -> int:
    """Memory of the model's own parameters, each storage once."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta
    }
    return sum(storages.values())


def _check_choices(precision: str, update: str, clip_norm: float | None) -> None:
    check_precision(precision)
    if update not in ("eager", "deferred"):
        raise PackhorseError(f"update is {update!r}, expected one of eager, deferred")
    if clip_norm is not None and not clip_norm > 0:
        raise PackhorseError(f"clip_norm is {clip_norm}, expected a norm above 0, or None not to clip")

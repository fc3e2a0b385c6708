"""The executor: walks a list of actions for real.

In: a `Program` (a partition and its list), microbatches, a store, a device. Out: losses or outputs, and the next version of the
store. One loop, one table from kind to handler; what is asynchronous returns a handle, and use goes through its wait.
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.device import Arrival, Device
from packhorse.errors import NumericsError
from packhorse.fetched import Fetched
from packhorse.gradient import Gradient
from packhorse.keys import key_generator
from packhorse.partition import Rest, Segment
from packhorse.program import Task, snapshot_name
from packhorse.ranks.shards import Gathering
from packhorse.running import Running
from packhorse.schedule import Action, show
from packhorse.state import ModelState
from packhorse.store import Block, Stash
from packhorse.store.encode import encode
from packhorse.store.lane import ORDINARY, URGENT, Lane, gather, pass_on
from packhorse.update import Boundary, Updater

COMMIT = "commit"  # beside the names of blocks


class Others(Protocol):
    """What an executor asks of other ranks, beside the actions of its list."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Task, Action], None]]: ...

    @property
    def gathering(self) -> Gathering | None: ...

    @property
    def losses(self) -> "Future[None] | None":
        """Done when the loss of the task is that of all ranks, and finite; else it fails."""
        ...

    def join_norms(self, task: Task) -> None: ...

    def begin(self, task: Task) -> None:
        """Buffers that all ranks advance, each on its samples, begin from nothing."""
        ...

    def end(self, task: Task) -> "Future[None] | None":
        """Such buffers leave the task; when all ranks have told theirs they are the state's, which is what is returned.

        Raises if another rank did something else, or had a loss that is not finite.
        """
        ...

    def finish(self) -> None:
        """Until all that was sent has been received."""
        ...

    def tell_commit(self) -> None:
        """This rank has committed a step."""
        ...

    def await_commits(self) -> None:
        """Until all have."""
        ...

    def close(self, *, waits: bool) -> None:
        """Without waiting for what other ranks will not send any more."""
        ...


class Executor:
    """Runs tasks. Between two of them only updates may still be under way."""

    def __init__(
        self,
        state: ModelState,
        device: Device,
        updater: Updater,
        stash: Stash,
        running: Running,
        *,
        seed: int,
        overlap: bool,
        updates_ahead: int = 1,
    ):
        self.state, self.store, self.layout = state, state.store, state.layout
        self.device, self.updater, self.stash = device, updater, stash
        self.seed, self.overlap = seed, overlap
        self.updates_ahead = updates_ahead if overlap else 0
        self.worker = Lane("packhorse-update", 1)
        self.pending: dict[str, Future[Any]] = {}  # block -> its update
        self.fetched: dict[int, Fetched] = {}
        self._order = itertools.count(URGENT + 1)  # of fetches
        self.in_flight: set[Future[Any]] = set()  # updates, as far as they hold on to gradients
        self.running = running
        self.handlers = {
            "F": self._forward,
            "R": self._recompute,
            "B": self._backward,
            "W": self._rest,
            "FETCH": self._fetch,
            "EVICT": self._evict,
            "STASH": self._stash,
            "RESTORE": self._restore,
            "STASHG": self._stash_gradients,
            "RESTOREG": self._restore_gradients,
            "PARK": self._park,
            "NORM": self._norm,
            "INTENT": self._intent,
            "UPDATE": self._update,
            "COMMIT": self._commit,
        }
        self.others: Others | None = None
        self.is_lost = False  # of several ranks one has failed, and nobody will send what is waited for

    def connect(self, others: "Others") -> None:
        """With other ranks: whoever knows them brings the handlers of what is done with them."""
        self.others = others
        self.handlers.update(others.handlers)

    def run(self, task: Task) -> Task:
        """The one loop."""
        program = task.program
        self.running.heap.enter()
        task.values = [dict(m.inputs) for m in task.microbatches]
        task.gradients = [{} for _ in task.microbatches]
        task.results = [{} for _ in task.microbatches]
        task.remaining = [Counter(program.uses[k]) for k in range(len(task.microbatches))]
        written = [name for name, b in program.partition.graph.buffers.items() if b.written] if task.training else []
        task.constants = {name: self._bring(buffer) for name, buffer in self.state.buffers.items()}
        task.buffers = {name: task.constants[name].clone() for name in written if name in task.constants}
        if self.others is not None:
            self.others.begin(task)
        generator_state = self.device.generator.get_state()
        try:
            for i, action in enumerate(program.actions):
                task.times.append(time.perf_counter())
                try:
                    self.handlers[action.kind](task, action)
                except BaseException as error:
                    error.add_note(f"at {action} of the schedule: {show(program.actions, i)}")
                    raise
                task.times.append(time.perf_counter())
        except BaseException:
            self._abandon(task)
            raise
        finally:
            self.device.generator.set_state(generator_state)
        assert not self.stash, "what is stashed is used"
        if self.others is not None:
            statistics = self.others.end(task)
            if statistics is not None:
                self.in_flight.add(statistics)
        self.state.buffers.update({name: self._bring_home(buffer) for name, buffer in task.buffers.items()})
        for results in task.results:
            results.update({name: self._bring_home(result) for name, result in results.items()})
        self.running.heap.leave()
        return task

    def drain(self) -> None:
        """Waits until all updates are done, and what was sent has been received."""
        futures = self._under_way()
        failures = [error for error in (future.exception() for future in futures) if error is not None]
        self.pending.clear()
        self.in_flight.clear()
        if failures:
            raise failures[0]
        if self.others is not None:
            self.others.finish()
        self.running.heap.leave()

    def submit_commit(self, commit: Callable[[], None]) -> None:
        """Runs when the updates that are under way are written; the next step's wait for it, but not what that reads.

        In the thread of updates: those who wait for the last write would else wait for the commit too.
        """
        self._await_commit()

        def commit_and_tell() -> None:
            commit()
            if self.others is not None:
                self.others.tell_commit()

        self.pending[COMMIT] = self._work_after(self._under_way(), commit_and_tell)

    def _work_after(self, futures: "Sequence[Future[Any]]", job: Callable[[], Any]) -> "Future[Any]":
        """An urgent job for the update thread, begun when all these are done; fails if one of them does."""
        done: Future[Any] = Future()

        def begin(awaited: "Future[Any]") -> None:
            if awaited.exception() is not None:
                done.set_exception(awaited.exception())
            else:
                self.worker.submit(job, priority=URGENT).add_done_callback(partial(pass_on, done))

        gather(futures, lambda: None).add_done_callback(begin)
        return done

    def _under_way(self) -> "list[Future[Any]]":
        """All that is; a block may wait for its gradient to be parked before its update."""
        return list({*self.pending.values(), *self.in_flight})

    def _await_commit(self) -> None:
        """Before anything of the next version is written: it takes the place of the version before the last.

        Other ranks must have committed too: until then that version may be the last that all of them have.
        """
        commit = self.pending.get(COMMIT)
        if commit is not None:
            commit.result()
            if self.others is not None:
                self.others.await_commits()
            del self.pending[COMMIT]  # not before: an interrupt while waiting must not make anybody forget it

    def close(self) -> None:
        self.worker.close()
        if self.others is not None:
            self.others.close(waits=not self.is_lost)
        self.running.close()
        self.handlers.clear()  # they hold this executor, so that it would stay until cycles are looked for
        self.others = None

    def _abandon(self, task: Task) -> None:
        """After a failure: nothing of the step stays behind, but what was already updated."""
        task.graphs.clear()
        task.rests.clear()
        for gradient in task.sums.values():
            gradient.let_go()
        task.sums.clear()
        self.abandon()

    def abandon(self) -> None:
        """Waits for all that is under way, whatever came of it, and lets go of what it held.

        If other ranks are lost, with what they would send, nothing is waited for, and all ends with this process.
        """
        if self.is_lost:
            self.pending.clear()
            self.in_flight.clear()
            return
        _wait_for_all(self._under_way())
        for fetched in self.fetched.values():
            fetched.release()
        self.fetched.clear()
        self.pending.clear()
        self.in_flight.clear()
        self.updater.forget_parked()
        self.updater.forget_previous()
        self.stash.clear()

    # -- compute

    def _segment(self, task: Task, action: Action) -> tuple[Segment, int]:
        assert action.segment is not None and action.microbatch is not None
        return task.program.partition.segments[action.segment], action.microbatch

    def _take_inputs(self, task: Task, segment: Segment, k: int) -> dict[str, Tensor]:
        """What the segment reads, waited for; counted down, and let go where this was the last use."""
        values, remaining = task.values[k], task.remaining[k]
        inputs = {}
        for name in segment.inputs:
            remaining[name] -= 1
            if name in task.microbatches[k].inputs:
                inputs[name] = self._bring(values[name])
                continue
            inputs[name] = values[name] = self._wait(values[name])
            self._let_go(task, name, k)
        return inputs

    def _let_go(self, task: Task, name: str, k: int) -> None:
        """Of a value that has just been read: what is stashed stays as long as it came back for others, too."""
        is_last, key = task.remaining[k][name] == 0, (name, k)
        if key in self.stash:
            task.restored[key] -= 1
            if is_last:
                self.stash.drop(key)
        if is_last or (key in self.stash and not task.restored[key]):
            task.values[k].pop(name)

    def _wait(self, value: Any) -> Any:
        """A tensor, or what brings it; a gradient that comes from another rank may turn out not to be there."""
        return value if isinstance(value, Tensor) else value.wait()

    def _bring(self, tensor: Tensor) -> Tensor:
        return self.device.wait(self.device.upload(tensor))

    def _bring_home(self, tensor: Tensor) -> Tensor:
        return self.device.wait_on_host(self.device.download(tensor))

    def _run(
        self, task: Task, segment: Segment, k: int, buffers: Mapping[str, Tensor], grad: bool, again: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The segment on fresh leaves; `again`, it is only its graph that is wanted."""
        microbatch = task.microbatches[k]
        self.running.turn_to(segment, microbatch.rows / task.program.partition.graph.batch.rows, grad)
        inputs = self._take_inputs(task, segment, k)
        rng = key_generator(self.device.generator, self.seed, task.step, microbatch.number)
        leaves = {
            name: tensor.detach().requires_grad_(grad and name in segment.differentiable_inputs)
            for name, tensor in inputs.items()
        }
        fetched = self.fetched[segment.index].wait()
        run = partial(segment.rebuild, by_rows=True) if again else segment
        with torch.set_grad_enabled(grad):
            outputs = run(fetched, {**fetched, **task.constants, **buffers}, leaves, rng, rows=microbatch.rows)
        return leaves, outputs

    def _forward(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        s = segment.index
        kept = (s, k) in task.program.kept
        for name in task.program.written(s):
            if task.remaining[k][snapshot_name(s, name)]:  # a recomputation needs it as it was
                task.values[k][snapshot_name(s, name)] = task.buffers[name].clone()
        leaves, outputs = self._run(task, segment, k, task.buffers, kept or (task.training and segment.needs_grad_mode))
        if kept:
            task.graphs[s, k] = (leaves, outputs)
        wanted = task.remaining[k]
        # Parameters and buffers go when the segment is evicted; what is a view of them must not go with them.
        detached = {n: t.detach().clone() if n in segment.borrowed_outputs else t.detach() for n, t in outputs.items()}
        task.values[k].update({name: tensor for name, tensor in detached.items() if wanted[name]})
        task.results[k].update({name: tensor for name, tensor in detached.items() if name in task.program.results})

    def _recompute(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        snapshots = {}
        for name in task.program.written(segment.index):
            key = snapshot_name(segment.index, name)
            snapshots[name] = self._wait(task.values[k][key])
            task.remaining[k][key] -= 1
            self._let_go(task, key, k)
        task.graphs[segment.index, k] = self._run(task, segment, k, snapshots, True, again=True)

    def _backward(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        leaves, outputs = task.graphs.pop((segment.index, k))
        fetched = self.fetched[segment.index].wait()
        gradients = task.gradients[k]
        gradients.update(task.letters.pop((segment.index, k), {}))
        seeds = {name: self._wait(gradients.pop(name)) for name in segment.outputs if name in gradients}
        seeds |= {name: self._wait(gradients.pop(name)) for name in segment.inputs if name in gradients}
        for key in [("gradient", name, k) for name in seeds]:
            if key in self.stash:
                self.stash.drop(key)
        seeds = {name: seed for name, seed in seeds.items() if seed is not None}
        for name in segment.outputs:
            if name in task.program.results and name not in seeds and outputs[name].requires_grad:
                seeds[name] = self._seed(task, k, outputs[name])
        if segment.index in task.program.split:
            rest = task.rests[segment.index, k] = Rest(segment, fetched, leaves, outputs, seeds)
            gradients.update(rest.begin())
            return
        found = segment.differentiate(fetched, leaves, outputs, seeds)
        alone = _find_alone(found, (*leaves.values(), *outputs.values(), *seeds.values()))
        del leaves, outputs, seeds
        gradients.update(self._add_up(task, segment, found, alone))

    def _rest(self, task: Task, action: Action) -> None:
        """The gradients of parameters, which backward left for later."""
        segment, k = self._segment(task, action)
        found = task.rests.pop((segment.index, k)).finish()
        self._add_up(task, segment, found, _find_alone(found, ()))

    def _add_up(self, task: Task, segment: Segment, found: dict[str, Tensor], alone: set[str]) -> dict[str, Tensor]:
        """Gradients of parameters go to their sums; the others are left."""
        for name in segment.parameters:
            gradient = found.pop(name, None)
            if gradient is not None:
                self._accumulate(task, segment.index, name, gradient, name in alone)
        return found

    def _seed(self, task: Task, k: int, loss: Tensor) -> Tensor:
        """Where backward starts: the loss's share in the mean over the whole batch, times the loss scale."""
        share = torch.tensor(task.microbatches[k].share, dtype=torch.float32) * task.loss_scale
        return share.to(loss.dtype).to(loss.device)

    def _accumulate(self, task: Task, s: int, name: str, gradient: Tensor, alone: bool) -> None:
        block, slot = self.layout.places[name]
        if name not in self.layout.states and block.name not in self.layout.followed:
            return  # trainable, but none of the optimizer's
        key = (block.name, s)
        if key not in task.sums:
            task.sums[key] = Gradient(block, s, self.device)
        task.sums[key].add(slot, gradient, alone)

    # -- movement

    def _fetch(self, task: Task, action: Action) -> None:
        assert action.segment is not None
        segment = task.program.partition.segments[action.segment]
        graph = task.program.partition.graph
        trainable = {n for n in segment.parameters if task.training and graph.parameters[n].trainable}
        blocks, shards = self.layout.blocks_of(segment), self.layout.shards
        gathering = self.others.gathering if self.others is not None else None
        fetched = Fetched(
            self.store, self.device, blocks, segment, trainable, self.pending, shards, gathering, next(self._order)
        )
        self.fetched[action.segment] = fetched
        if not self.overlap:
            fetched.wait()

    def _evict(self, task: Task, action: Action) -> None:
        assert action.segment is not None
        self.fetched.pop(action.segment).release()

    def _stash(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        values, s = task.values[k], segment.index
        names = [*segment.outputs, *(snapshot_name(s, name) for name in task.program.written(s))]
        for name in names:
            if name in values:
                self._put((name, k), values.pop(name))

    def _put(self, key: Hashable, tensor: Tensor, *, lasting: bool = False) -> None:
        transfer = self.device.download(tensor)
        self.stash.put(key, transfer.tensor, partial(self.device.wait_on_host, transfer), lasting=lasting)

    def _restore(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        snapshots = [snapshot_name(segment.index, name) for name in task.program.written(segment.index)]
        for name in [*segment.inputs, *snapshots]:
            if (name, k) in self.stash:
                task.restored[name, k] += 1
                if name not in task.values[k]:
                    task.values[k][name] = self._start(self.stash.get((name, k)))

    def _start(self, host: "Future[Tensor]") -> Arrival:
        arrival = Arrival(self.device, host)
        if not self.overlap:
            arrival.wait()
        return arrival

    def _stash_gradients(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        gradients = task.gradients[k]
        for name in segment.inputs:
            if name in gradients:
                self._put(("gradient", name, k), gradients.pop(name), lasting=self._outlasts(task))

    def _restore_gradients(self, task: Task, action: Action) -> None:
        segment, k = self._segment(task, action)
        for name in (*segment.outputs, *segment.inputs):
            key = ("gradient", name, k)
            if key in self.stash:
                task.gradients[k][name] = self._start(self.stash.get(key))
                if not self._outlasts(task):  # else it stays, for a resume, until it is used
                    self.stash.drop(key)

    def _outlasts(self, task: Task) -> bool:
        """Whether gradients at boundaries must outlast the process."""
        return self.store.rolls and not task.deferred

    # -- gradients, update, commit

    def hand_over(self, task: Task, s: int, block: Block) -> Gradient | None:
        """A complete gradient, on its way to the host."""
        gradient = task.sums.get((block.name, s))
        if gradient is not None:
            gradient.bring_home()
            if gradient.is_home and not task.deferred and self.others is None:  # else the update asks, when it is
                gradient.refuse_non_finite()
            del task.sums[block.name, s]
        return gradient

    def _park(self, task: Task, action: Action) -> None:
        """Gradients wait: all of them if the update is deferred, else those of blocks that an earlier segment uses too."""
        self._check_losses(task)
        self._await_commit()
        s = action.segment
        assert s is not None
        for name, segment in list(task.sums):
            block = task.sums[name, segment].block
            home = self.layout.home(block)
            if segment == s and (task.deferred or home != s):
                gradient = self.hand_over(task, s, block)
                assert gradient is not None
                norms = task.norms if task.deferred else None  # of a tied one the last, of all its uses, is what counts
                job = partial(self.updater.park, gradient, norms, check=not task.deferred)
                self.submit([block.name], [gradient], job, URGENT)

    def _norm(self, task: Task, action: Action) -> None:
        """The norm of all gradients, as `clip_grad_norm_` takes it: of each tensor first, in the order of the model."""
        self.drain()
        if self.others is not None:
            self.others.join_norms(task)
        order = [name for name in task.program.partition.graph.parameters if name in task.norms]
        norms = [task.norms[name] / task.loss_scale for name in order]
        if not norms:
            return
        total = torch.linalg.vector_norm(torch.stack(norms))
        task.norm = float(total)
        if not math.isfinite(task.norm):
            bad = next((n for n, norm in zip(order, norms, strict=True) if not torch.isfinite(norm)), order[0])
            if task.loss_scale != 1.0:
                task.overflowed = True
                return
            s = next((s.index for s in task.program.partition.segments if bad in s.parameters), 0)
            raise NumericsError(
                f"step {task.step}: the gradient of {bad} (segment {s}) is not finite; nothing was updated. Lower the "
                "learning rate, or look at the batch"
            )
        if task.clip_norm is not None:
            task.scale = torch.clamp(task.clip_norm / (total + 1e-6), max=1.0)
        if task.loss_scale != 1.0:
            task.scale = (1.0 if task.scale is None else task.scale) * torch.tensor(1.0 / task.loss_scale)

    def _update(self, task: Task, action: Action) -> None:
        self._check_losses(task)
        self._await_commit()
        s = action.segment
        assert s is not None
        if task.overflowed:
            return
        blocks = [block for block in self.layout.blocks if self.layout.home(block) == s]
        for together in [blocks] if self.store.rolls and blocks else [[block] for block in blocks]:
            members = [(block, self.hand_over(task, s, block)) for block in together]
            boundary = self._note_boundary(s) if self.store.rolls else None
            priority = (
                ORDINARY + s if s else URGENT
            )  # the next step begins with the first, and reads ahead what follows
            job = partial(self.updater.update, members, task.groups, task.scale, boundary, priority=priority)
            gradients = [g for _, g in members if g is not None]
            losses = None if self.others is None else self.others.losses
            self.submit([b.name for b in together], gradients, job, s + 1, after=losses)

    def _note_boundary(self, s: int) -> Boundary:
        """What finishing the step takes once this segment is updated."""
        passed = partial(self.stash.release, self.stash.take_held())
        return Boundary(s, self.stash.describe_lasting(), self.stash.lasting_writes(), passed)

    def _intent(self, task: Task, action: Action) -> None:
        """Nothing is updated yet: forward is over, and, deferred, all gradients are parked."""
        self._check_losses(task)
        self._await_commit()
        if task.overflowed:
            return
        tensors = {f"buffer:{name}": self._bring_home(buffer) for name, buffer in task.buffers.items()}
        intent = {**task.intent, "shares": [m.share for m in task.microbatches], "scale": encode(task.scale, "scale")}
        if task.deferred:
            intent["parked"] = self.updater.describe_parked()
        else:
            tensors |= {f"batch:{i}": tensor.cpu() for i, tensor in enumerate(task.batch)}
        self.store.begin_step(intent, tensors)

    def submit(
        self,
        blocks: Sequence[str],
        gradients: Sequence[Gradient],
        job: Callable[[], Future[Any] | None],
        priority: int,
        after: "Future[Any] | None" = None,
    ) -> None:
        """Work for the update thread, the first segment first: it is needed first in the next step.

        With one version all goes in the order of the list. As many updates as planned may wait while another is worked on:
        more would pile up gradients. What is done with a block is done in order; nothing is begun before other ranks have
        sent what it needs, so that the thread never waits for them.
        """
        finished: Future[Any] = Future()
        owner = self.running.segment
        priority = ORDINARY if self.store.rolls else priority

        def work() -> None:
            try:
                for gradient in gradients:
                    gradient.wait()
                writes = job()
            except BaseException:
                for gradient in gradients:
                    gradient.let_go()
                raise
            tidy = partial(self.running.tidy_after, owner)
            gather([] if writes is None else [writes], tidy).add_done_callback(partial(pass_on, finished))

        def failed(worked: "Future[Any]") -> None:
            if worked.exception() is not None:
                finished.set_exception(worked.exception())

        def begin(awaited: "Future[Any]") -> None:
            if awaited.exception() is None:
                self.worker.submit(work, priority=priority).add_done_callback(failed)
            else:
                finished.set_exception(awaited.exception())

        before = [self.pending.get(block) for block in blocks]
        sums = [gradient.summed for gradient in gradients]
        awaited = [future for future in (*sums, *before, after) if future is not None]
        gather(awaited, lambda: None).add_done_callback(begin)
        self.pending.update(dict.fromkeys(blocks, finished))
        self.in_flight.add(finished)
        while len(self.in_flight) > self.updates_ahead:
            done, self.in_flight = wait(self.in_flight, return_when=FIRST_COMPLETED)
            for update in done:
                update.result()
        self._forget_done()

    def _forget_done(self) -> None:
        """Nobody waits for those; left alone they would be as many as the model has segments."""
        for name, future in list(self.pending.items()):
            if name != COMMIT and future.done() and future.exception() is None:
                del self.pending[name]

    def add_parked(self, gradient: Gradient) -> None:
        """What of a gradient waits, from segments behind, becomes part of it."""
        name = gradient.block.name
        if name in self.pending:
            self.pending[name].result()
        self.updater.add_parked(gradient)

    def submit_after(self, block: str, job: Callable[[], None]) -> None:
        """When a block's update is done; if there is none under way, at once."""
        update = self.pending.get(block)
        self.in_flight.add(self._work_after([] if update is None else [update], job))

    def _check_losses(self, task: Task) -> None:
        """Before anything is made of them; the first time they are asked for, they are all there.

        With others, all go on to the end, so that nobody waits for what does not come, and the updates wait for the losses.
        """
        if self.others is None and not task.losses_are_finite:
            task.refuse_non_finite_losses()
            task.losses_are_finite = True

    def _commit(self, task: Task, action: Action) -> None:
        """What is under way is part of the step; the trainer writes it down when it is done."""


def _wait_for_all(futures: "Sequence[Future[Any]]") -> None:
    """Until all are done. Interrupts do not help: what they work on is not consistent before."""
    while not all(future.done() for future in futures):
        with contextlib.suppress(KeyboardInterrupt):
            wait(futures)


def _find_alone(found: Mapping[str, Tensor | None], others: Sequence[Tensor]) -> set[str]:
    """The gradients that are nothing else too: autograd may hand out one tensor twice, or hand on what it was given."""
    holders = Counter(id(t) for t in (*found.values(), *others))

    def is_alone(tensor: Tensor) -> bool:
        return (
            holders[id(tensor)] == 1
            and not tensor.is_sparse
            and (tensor._base is None or not holders[id(tensor._base)])
        )

    return {name for name, tensor in found.items() if tensor is not None and is_alone(tensor)}

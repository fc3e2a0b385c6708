"""What an executor does with other ranks: the handlers of the actions that send, receive, sum and share.

In: an executor, the world, this rank's links. Out: handlers by kind of action, beside the executor's own.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import NumericsError
from packhorse.execute import Executor
from packhorse.gradient import Gradient
from packhorse.memory import Pool
from packhorse.program import Task
from packhorse.ranks.links import Links, Tie
from packhorse.ranks.post import Post
from packhorse.ranks.shards import Gathering, take_own
from packhorse.ranks.statistics import add_up, find_momenta
from packhorse.ranks.traffic import Traffic
from packhorse.ranks.world import Work, World
from packhorse.schedule import Action
from packhorse.store import MASTER, Block
from packhorse.store.lane import URGENT, Lane, pass_on


class Exchange:
    """Of one executor. What it starts is waited for where it is used."""

    def __init__(self, executor: Executor, world: World, links: Links, pool: Pool):
        self.executor, self.world, self.links = executor, world, links
        self.post = Post(
            world, executor.device, sum(len(ties) for ties in (*links.passes.values(), *links.tells.values()))
        )
        self.gathering = Gathering(world, executor.store, pool) if executor.layout.shards else None
        self._waiting = Lane("packhorse-post", 1)  # for what no future tells of: it comes in the order of the lists
        self._summing = Lane("packhorse-sums", 1)  # in order, as they are made
        self._pieces: dict[int, deque[Callable[[], None]]] = {}  # segment -> what begins the next piece of its sums
        self.losses: Future[None] | None = None
        self._commits: Work | None = None
        self._momenta = find_momenta(links.partition.graph) if world.ranks.data > 1 else {}
        self.handlers: dict[str, Any] = {
            "RECV": partial(self._receive, False),
            "SEND": self._send,
            "RECVG": partial(self._receive, True),
            "SENDG": self._send_gradients,
            "LOSS": self._tell_losses,
            "REDUCE": self._reduce,
            "SUM": self._sum,
            "PASS": self._pass,
            "TAKE": self._take,
            "TELL": self._tell,
            "HEAR": self._hear,
        }

    def finish(self) -> None:
        self.post.finish()

    def tell_commit(self) -> None:
        self._commits = self.world.tell_commit()

    def await_commits(self) -> None:
        if self._commits is not None:
            self._commits.wait()
            self._commits = None

    def close(self, *, waits: bool) -> None:
        self._waiting.close(waits=waits)
        self._summing.close(waits=waits)
        if self.gathering is not None:
            self.gathering.close(waits=waits)

    # -- values and their gradients

    def _traffic(self, task: Task, action: Action, sends: bool, backward: bool) -> tuple[Traffic, list[int], int]:
        traffic, s = task.program.traffic, action.segment
        assert traffic is not None and s is not None and action.microbatch is not None
        find = traffic.sent_by if sends else traffic.received_by
        return traffic, find(s, backward=backward), action.microbatch

    def _receive(self, backward: bool, task: Task, action: Action) -> None:
        """Gradients wait for the segment they are for: one behind it, on this rank too, may have the same values."""
        traffic, numbers, k = self._traffic(task, action, sends=False, backward=backward)
        place = task.letters.setdefault((_segment(action), k), {}) if backward else task.values[k]
        for number in numbers:
            incoming = self.post.receive(traffic, number, k, task.microbatches[k].rows)
            place.update(incoming.letters())
            if not self.executor.overlap:
                incoming.open()

    def _send(self, task: Task, action: Action) -> None:
        traffic, numbers, k = self._traffic(task, action, sends=True, backward=False)
        values, remaining = task.values[k], task.remaining[k]
        for number in numbers:
            names = traffic.messages[number].names
            self.post.send(traffic, number, k, task.microbatches[k].rows, {name: values[name] for name in names})
            for name in names:
                remaining[name] -= 1
                if remaining[name] == 0:
                    values.pop(name)

    def _send_gradients(self, task: Task, action: Action) -> None:
        traffic, numbers, k = self._traffic(task, action, sends=True, backward=True)
        for number in numbers:
            names = traffic.messages[number].names
            found = {name: task.gradients[k].pop(name) for name in names if name in task.gradients[k]}
            self.post.send(traffic, number, k, task.microbatches[k].rows, found)

    # -- losses

    def _tell_losses(self, task: Task, action: Action) -> None:
        """Of what only the last stage knows, the others have zeros."""
        if self.world.ranks.pipeline == 1:  # else messages are waited for, and this may come first
            self.world.settle()
        total = torch.zeros(())
        for microbatch, results in zip(task.microbatches, task.results, strict=True):
            for loss in results.values():
                total = total + loss.float().cpu() * microbatch.share
        task.loss = total
        work = self.world.sum_over_all(total, "telling all ranks the loss")
        self.losses = self._waiting.submit(partial(self._hear_losses, task, total, work))

    def _hear_losses(self, task: Task, total: Tensor, work: Work) -> None:
        work.wait()
        if not task.training or bool(torch.isfinite(total)):
            return
        task.refuse_non_finite_losses()
        raise NumericsError(
            f"step {task.step}: a loss on another rank is not finite, which tells of it; nothing was updated"
        )

    def _await_losses(self) -> None:
        """Before anything is told, or waited for, that comes of an update: without one it would never come."""
        if self.losses is not None:
            self.losses.result()

    # -- gradients over replicas

    def _reduce(self, task: Task, action: Action) -> None:
        """Cuts what is to be summed into pieces; the list says when each is begun."""
        s = _segment(action)
        pieces = self._pieces[s] = deque()
        layout = self.executor.layout
        for block in layout.blocks:
            gradient = task.sums.get((block.name, s))
            if gradient is None:
                continue
            if layout.home(block) != s and not layout.shards:
                continue  # it waits for that of an earlier segment, and both are summed at once
            if not layout.shards:
                self.executor.add_parked(gradient)
            if block.name in layout.shards:
                pieces.append(partial(self._sum_part, task, s, block.name))
            else:
                size = task.program.piece_bytes // block.kinds[MASTER].itemsize
                parts = [part for flat in gradient.join() for part in flat.split(size or flat.numel())]
                gradient.summing = summing = Sums(len(parts))
                if self.executor.device.name == "cpu":  # elsewhere streams wait
                    gradient.summed = summing.done
                pieces.extend(partial(self._sum_piece, summing, part) for part in parts)

    def _sum(self, task: Task, action: Action) -> None:
        pieces = self._pieces[_segment(action)]
        if pieces:  # fewer than planned, where a parameter has no gradient
            pieces.popleft()()

    def _sum_part(self, task: Task, s: int, name: str) -> None:
        """Of what each rank keeps a part of."""
        own = task.sums[name, s] = take_own(self.executor.layout.shards[name], self.world, task.sums[name, s])
        if self.executor.device.name == "cpu":
            own.summed = self._summing.submit(own.summing.wait)
        if not self.executor.overlap:
            own.wait()

    def _sum_piece(self, summing: "Sums", part: Tensor) -> None:
        work = self.world.sum(part)
        summing.works.append(work)
        if self.executor.device.name == "cpu" and len(summing.works) == summing.pieces:
            # once for all: each time that a thread wakes up it takes the core from compute
            self._summing.submit(summing.wait).add_done_callback(partial(pass_on, summing.done))
        if not self.executor.overlap:
            work.wait()

    def join_norms(self, task: Task) -> None:
        """The norms of all ranks' gradients, for all: of replicas, which have the same, the first tells, or each its part's."""
        names = list(task.program.partition.graph.parameters)
        in_parts = bool(self.executor.layout.shards)
        own = task.norms if in_parts or self.world.replica == 0 else {}
        found = torch.zeros(2, len(names))
        for i, name in enumerate(names):
            if name in own:
                found[0, i], found[1, i] = own[name].square() if in_parts else own[name], 1.0
        self.world.sum_over_all(found, "finding the norm of all gradients").wait()
        norms = found[0].sqrt() if in_parts else found[0]
        task.norms = {name: norms[i] for i, name in enumerate(names) if found[1, i]}

    def begin(self, task: Task) -> None:
        """Where parts of parameters are gathered, that is the first thing to be waited for.

        Running statistics from nothing: what this rank adds is then independent of what others did before."""
        self.losses = None
        self.post.begin(len(task.microbatches))
        if self.executor.layout.shards:
            self.world.settle()
        task.buffers.update({n: torch.zeros_like(b) for n, b in task.buffers.items() if n in self._momenta})

    def end(self, task: Task) -> "Future[None] | None":
        """All are heard; then running statistics as if all microbatches of all replicas had passed here, in order."""
        self.world.settle()
        self._await_losses()
        own = {name: task.buffers.pop(name) for name in self._momenta if name in task.buffers}
        if not own:
            return None
        count = torch.tensor([len(task.microbatches)], dtype=torch.double)
        work, found = self.world.gather(torch.cat([*(b.flatten().double().cpu() for b in own.values()), count]))

        def join() -> None:
            work.wait()
            sizes = [buffer.numel() for buffer in own.values()]
            kept = torch.tensor([1.0 - self._momenta[name] for name in own], dtype=torch.double)
            buffers = self.executor.state.buffers
            before = torch.cat([buffers[name].flatten().double() for name in own])
            counts = [int(other[-1]) for other in found]
            joined = add_up(before, [o[:-1] for o in found], counts, kept.repeat_interleave(torch.tensor(sizes)))
            for name, part in zip(own, joined.split(sizes), strict=True):
                buffers[name] = part.view(buffers[name].shape).to(buffers[name])

        return self._waiting.submit(join)

    # -- parameters that several ranks use

    def _block(self, tie: Tie) -> Block:
        return self.executor.layout.places[tie.parameter][0]

    def _pass(self, task: Task, action: Action) -> None:
        for tie in self.links.passes[_segment(action)]:
            block = self._block(tie)
            gradient = self.executor.hand_over(task, _segment(action), block)
            if gradient is None:
                gradient = Gradient(block, _segment(action), self.executor.device)
                for slot in block.slots:
                    gradient.make(slot).zero_()
            job = partial(self._send_gradient, gradient, tie, check=not task.deferred)
            self.executor.submit([block.name], [gradient], job, URGENT)

    def _send_gradient(self, gradient: Gradient, tie: Tie, *, check: bool) -> None:
        """With what waits of it, from segments behind."""
        updater = self.executor.updater
        updater.park(gradient, None, check=check)
        total = updater.parked.pop(gradient.block.name)
        (flat,) = total.join()  # what is shared has a block of its own
        self.post.send_flat(flat.clone(), tie.place, 2 * tie.number, backward=True)
        total.let_go()

    def _take(self, task: Task, action: Action) -> None:
        for tie in self.links.takes[_segment(action)]:
            block = self._block(tie)
            gradient = Gradient(block, _segment(action), self.executor.device)
            (slot,) = block.slots  # what is shared has a block of its own
            work = self.post.receive_flat(gradient.make(slot), tie.place, 2 * tie.number, backward=True)
            park = partial(self.executor.updater.park, gradient, None, check=False)
            self.executor.submit([block.name], [], park, URGENT, after=self._waiting.submit(work.wait))

    def _tell(self, task: Task, action: Action) -> None:
        self._await_losses()
        for tie in self.links.tells[_segment(action)]:
            block = self._block(tie)
            self.executor.submit_after(block.name, partial(self._send_block, block, tie))

    def _send_block(self, block: Block, tie: Tie) -> None:
        loan = self.executor.store.borrow(block, MASTER)
        flat = loan.ready.result().clone()
        loan.give_back()
        self.post.send_flat(flat, tie.place, 2 * tie.number + 1, backward=False)

    def _hear(self, task: Task, action: Action) -> None:
        self._await_losses()
        for tie in self.links.hears[_segment(action)]:
            block = self._block(tie)
            flat = torch.empty(block.numel, dtype=block.kinds[MASTER])
            work = self.post.receive_flat(flat, tie.place, 2 * tie.number + 1, backward=False)
            keep = partial(self._keep_block, block, flat)
            self.executor.submit([block.name], [], keep, URGENT, after=self._waiting.submit(work.wait))

    def _keep_block(self, block: Block, flat: Tensor) -> None:
        store = self.executor.store
        for start, stop in block.units:
            loan = store.borrow(block, MASTER, start, stop, read=False)
            loan.ready.result().copy_(flat[start:stop])
            written = loan.give_back(dirty=True)
            if written is not None:
                written.result()
        store.publish(block)


def _segment(action: Action) -> int:
    assert action.segment is not None
    return action.segment


class Sums:
    """Of a gradient, piece by piece: over when all of them are."""

    def __init__(self, pieces: int):
        self.pieces = pieces
        self.works: list[Work] = []  # those that are begun
        self.done: Future[None] = Future()  # on machines without accelerator; elsewhere streams wait

    def wait(self) -> None:
        for work in self.works:
            work.wait()

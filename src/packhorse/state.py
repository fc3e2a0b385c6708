"""The model's state as a whole: how it enters a store, is read from it, and is committed.

In: first values, an optimizer's states, a store. Out: `ModelState`: every parameter, buffer and optimizer state by name,
wherever it lies. Large ones are in blocks of the store; written buffers and scalar states, a few bytes a layer, stay in memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.checkpoint import Entry, write_checkpoint
from packhorse.errors import PackhorseError
from packhorse.graph import Graph
from packhorse.layout import Layout
from packhorse.memory import Ledger
from packhorse.ranks.links import Links
from packhorse.ranks.shards import Shard
from packhorse.ranks.world import World
from packhorse.store import MASTER, Block, Slot, Store
from packhorse.store.encode import DTYPE_NAMES, decode
from packhorse.update import Small, share_scalar
from packhorse.weights import FileTensor


class ModelState:
    """Parameters, buffers and optimizer states of one model in one store."""

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        store: Store,
        ledger: Ledger,
        world: World | None = None,
        links: Links | None = None,
    ):
        self.graph, self.layout, self.store, self.ledger = graph, layout, store, ledger
        self.world, self._links = world, links
        self.small = Small(layout.states)
        self.buffers: dict[str, Tensor] = {}  # those that live in memory: written ones, and what no block holds

    def describe(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What the header of a store says of this model: enough to know it again, and to export it without it."""
        buffers = self.graph.buffers
        stored = [*self.graph.parameters.items(), *buffers.items()]
        return {
            "model": type(model).__name__,
            "optimizer": type(optimizer).__name__,
            "tensors": [
                {
                    "name": name,
                    "names": t.names,
                    "shape": t.shape,
                    "dtype": DTYPE_NAMES[t.dtype],
                    "saved": name not in buffers or buffers[name].persistent,
                }
                for name, t in stored
            ],
            "config": find_config(model),
        }

    def fill(self, source: Iterable[tuple[str, Tensor | FileTensor]]) -> None:
        """Takes first values, block by block: a block is written, unit by unit, when its last tensor is known."""
        waiting: dict[str, dict[str, Tensor | FileTensor]] = {}
        for name, value in source:
            if name in self.layout.elsewhere:
                continue
            if name not in self.layout.places:
                loaded = value.load() if isinstance(value, FileTensor) else value.detach().clone()
                self.buffers[name] = loaded.to(self.graph.buffers[name].dtype) if name in self.graph.buffers else loaded
                self.ledger.add("host", "buffers", self.buffers[name].nbytes)
                continue
            block, _ = self.layout.places[name]
            values = waiting.setdefault(block.name, {})
            values[name] = value
            if len(values) == len(block.slots):
                self._fill_block(block, waiting.pop(block.name))
        assert not waiting, f"no values for {list(waiting)}"

    def _fill_block(self, block: Block, values: Mapping[str, Tensor | FileTensor]) -> None:
        ready = {slot.name: _in_order(values[slot.name], slot) for slot in block.slots}
        if block.name in self.layout.shards:
            block = self.layout.shards[block.name].own
        for start, stop in block.units:
            loan = self.store.borrow(block, MASTER, start, stop, read=False)
            flat = loan.ready.result().zero_()
            for slot in block.slots:
                a, b = max(slot.start, start), min(slot.stop, stop)
                if a < b:
                    target, value = flat[a - start : b - start], ready[slot.name]
                    first = a - slot.start + slot.offset
                    if isinstance(value, FileTensor):
                        value.read_into(target, first)
                    else:
                        target.copy_(value[first : first + b - a])
            _wait(loan.give_back(dirty=True))
        self.store.publish(block)

    def take_optimizer_state(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """States the optimizer already has, from training before or from its constructor, move to the store."""
        parameters = dict(model.named_parameters())
        for block in self.layout.blocks:
            names = [slot.name for slot in block.slots if slot.name in self.layout.states]
            given = {name: optimizer.state.get(parameters[name], {}) for name in names}
            if any(given.values()):
                self._take(block, given)
        optimizer.state.clear()

    def _take(self, block: Block, given: Mapping[str, Mapping[str, Any]]) -> None:
        """States on the meta device have no values; the first step makes them anew."""
        started = set()
        for name, state in given.items():
            values = [state.get(kind.name) for kind in self.small.kinds[name]]
            if values and all(isinstance(v, Tensor) and not v.is_meta for v in values):
                started.add(name)
        if not started:
            return
        for kind in block.states:
            loan = self.store.borrow(block, kind, read=False)
            for slot in block.slots:
                if slot.name in started:
                    slot.view(loan.ready.result()).copy_(given[slot.name][kind])
            _wait(loan.give_back(dirty=True))
        for name in started:
            for kind in self.small.kinds_of(name):
                self.small.put(name, kind, given[name][kind].clone())
        self.small.started |= started
        self.store.carry_over(block, MASTER)
        self.store.publish(block)

    def small_tensors(self) -> dict[str, Tensor]:
        """All that is committed beside the blocks."""
        tensors = {f"buffer:{name}": buffer for name, buffer in self.buffers.items()}
        scalars: dict[str, dict[str, Tensor]] = {}
        for kind, values in self.small.values.items():
            for name, value in values.items():
                if value.ndim == 0:
                    scalars.setdefault(kind, {})[name] = value
                else:
                    tensors[f"state:{name}:{kind}"] = value
        started = [name in self.small.started for name in self.graph.parameters]
        tensors["started"] = torch.tensor(started, dtype=torch.uint8)
        for kind, values in scalars.items():  # one vector for thousands of them, 0 where a parameter has none
            nothing = torch.zeros_like(next(iter(values.values())))
            tensors[f"scalars:{kind}"] = torch.stack([values.get(name, nothing) for name in self.graph.parameters])
        return tensors

    def load_small(self, tensors: Mapping[str, Tensor]) -> None:
        small = self.small
        small.started.clear()
        small.values.clear()
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            if kind == "buffer":
                self.buffers[name] = tensor
            elif kind == "state":
                name, _, state = name.rpartition(":")
                if name in small.kinds:
                    small.put(name, state, tensor)
        for i, name in enumerate(self.graph.parameters):
            if tensors["started"][i] and name in small.kinds:  # others are not updated any more, or elsewhere
                small.started.add(name)
                for state in small.kinds_of(name):
                    if name not in small.values.get(state, {}):
                        small.put(name, state, share_scalar(tensors[f"scalars:{state}"][i].clone()))

    def take_up(self, records: Iterable[Mapping[str, Any]]) -> None:
        """What an interrupted step had advanced, as its journal says."""
        for described in (entry for record in records for entry in record["small"]):
            self.small.started.update(described["started"])
            for name, kind, value in described["values"]:
                self.small.put(name, kind, decode(value))

    def read(self, name: str) -> Tensor:
        """A copy of a parameter or buffer, by any of its names, as the last update left it. All ranks must ask for it."""
        first = self._first_name(name)
        if self.world is None or self._links is None:
            return self._read_here(first)
        if self.layout.shards:
            return self._read_here(first)
        owner = self._links.owner_of(first)
        stored = {**self.graph.parameters, **self.graph.buffers}[first]
        is_here = owner == self.world.rank
        value = self._read_here(first) if is_here else torch.empty(stored.shape, dtype=stored.dtype)
        return self.world.share_tensor(value.contiguous(), owner)

    def _read_here(self, first: str) -> Tensor:
        if first in self.buffers:
            return self.buffers[first].clone()
        block, slot = self.layout.places[first]
        if block.name in self.layout.shards:
            return slot.view(self._gather(self.layout.shards[block.name])).clone()
        start, stop = block.around(slot)
        loan = self.store.borrow(block, MASTER, start, stop)
        value = slot.view(loan.ready.result(), start).clone()
        loan.give_back()
        return value

    def _gather(self, shard: Shard) -> Tensor:
        """All of a block that ranks have parts of."""
        assert self.world is not None
        loan = self.store.borrow(shard.own, MASTER)
        whole = torch.empty(shard.whole.numel, dtype=shard.whole.kinds[MASTER])
        self.world.gather_parts(whole, loan.ready.result()).wait()
        loan.give_back()
        return whole

    def read_pieces(self, name: str) -> Iterator[Tensor]:
        """The elements of a parameter or buffer in the order of its dimensions, flat, a unit at a time."""
        first = self._first_name(name)
        block, slot = self.layout.places.get(first, (None, None))
        if block is None or slot is None or not slot.is_contiguous or self.world is not None:
            yield self.read(first).contiguous().view(-1)
            return
        for _, start, stop in block.units_between(*block.around(slot)):
            loan = self.store.borrow(block, MASTER, start, stop)
            yield loan.ready.result()[max(slot.start - start, 0) : slot.stop - start]
            loan.give_back()

    def save(self, directory: str | Path, model: nn.Module) -> list[Path]:
        """Everything a state dict has, each tensor once, as safetensors."""
        stored = [*self.graph.parameters.values(), *(b for b in self.graph.buffers.values() if b.persistent)]
        entries = [Entry(t.name, tuple(t.shape), t.dtype) for t in stored]
        if self.world is not None and self.world.rank:  # the first rank writes; the others let it have what they hold
            for entry in entries:
                self.read(entry.name)
            return []
        return write_checkpoint(directory, entries, self.read_pieces, find_config(model))

    def _first_name(self, name: str) -> str:
        stored = [*self.graph.parameters.values(), *self.graph.buffers.values()]
        found = next((entry.name for entry in stored if name in entry.names), None)
        if found is None:
            raise PackhorseError(f"the run has no parameter or buffer {name!r}; it was made for another model")
        return found

    def hand_over(self, model: nn.Module) -> None:
        """The module's parameters become views of a store in RAM, or, with a store on disk, give their memory back.

        They stay the same objects, so the optimizer stays valid. Given back, they keep their shape and read as NaN.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            flat = None
            if name not in self.layout.elsewhere and not self.layout.shards:
                block, slot = self.layout.places[name]
                flat = self.store.view(block, MASTER)
            if flat is not None and parameter.dtype == flat.dtype:
                parameter.data = slot.view(flat)
            else:
                nothing = torch.full((), torch.nan if parameter.is_floating_point() else 0, dtype=parameter.dtype)
                parameter.data = nothing.expand(parameter.shape)


class StateDict(Mapping[str, Tensor]):
    """A lazy state dict: names at once, values, as copies, when asked for; `settle` ends what is under way before."""

    def __init__(self, state: ModelState, settle: Callable[[], None]):
        self._state, self._settle = state, settle
        persistent = [buffer for buffer in state.graph.buffers.values() if buffer.persistent]
        stored = [*state.graph.parameters.values(), *persistent]
        self._names = dict.fromkeys(name for entry in stored for name in entry.names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        self._settle()
        return self._state.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _in_order(value: Tensor | FileTensor, slot: Slot) -> Tensor | FileTensor:
    """A tensor's elements, flat, in the order in which its slot keeps them."""
    if isinstance(value, FileTensor):
        if slot.is_contiguous:
            return value
        value = value.load()
    value = value.detach()
    if tuple(value.stride()) != slot.stride:
        value = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value)
    return value.as_strided((slot.numel,), (1,))


def find_config(model: nn.Module) -> str | None:
    """The text of a Hugging Face config, as its own save_pretrained would write it."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return None
    fields = json.loads(config.to_json_string())
    fields.setdefault("architectures", None)
    fields["architectures"] = fields["architectures"] or [type(model).__name__]
    return json.dumps(fields, indent=2)


def _wait(write: "Future[Any] | None") -> None:
    if write is not None:
        write.result()

"""The model's state as a whole: how it enters a store, is read from it, and is committed.

In: first values, an optimizer's states, a store. Out: `ModelState`: every parameter, buffer and optimizer state by name,
wherever it lies. Large ones are in blocks of the store; written buffers and scalar states, a few bytes a layer, stay in memory.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.graph import Graph
from packhorse.layout import Layout
from packhorse.memory import Ledger
from packhorse.store import MASTER, Block, Loan, Store
from packhorse.store.blocks import align
from packhorse.update import Small


class ModelState:
    """Parameters, buffers and optimizer states of one model in one store."""

    def __init__(self, graph: Graph, layout: Layout, store: Store, ledger: Ledger):
        self.graph, self.layout, self.store, self.ledger = graph, layout, store, ledger
        self.small = {name: Small(dict(kinds)) for name, kinds in layout.states.items()}
        self.buffers: dict[str, Tensor] = {}  # those that live in memory: written ones, and what no block holds

    def describe(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What a store must agree on to hold this model."""
        stored = [*self.graph.parameters.items(), *self.graph.buffers.items()]
        return {
            "model": type(model).__name__,
            "tensors": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in stored},
            "optimizer": type(optimizer).__name__,
            "precision": self.graph.precision,
        }

    def fill(self, source: Iterator[tuple[str, Tensor]]) -> None:
        """Takes first values, block by block: a block is in memory from its first tensor to its last."""
        loans: dict[str, tuple[Loan, set[str]]] = {}
        for name, tensor in source:
            if name not in self.layout.places:
                self.buffers[name] = tensor.detach().clone()
                self.ledger.add("host", "buffers", tensor.nbytes)
                continue
            block, slot = self.layout.places[name]
            if block.name not in loans:
                loans[block.name] = (self.store.borrow(block, MASTER, read=False), {s.name for s in block.slots})
            loan, missing = loans[block.name]
            with torch.no_grad():
                slot.view(loan.ready.result()).copy_(tensor)
            missing.discard(name)
            if not missing:
                self._finish(block, loan)
                del loans[block.name]
        assert not loans, f"no values for {[missing for _, missing in loans.values()]}"

    def _finish(self, block: Block, master: Loan) -> None:
        _wait(master.give_back(dirty=True))
        self.store.publish(block)

    def take_optimizer_state(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """States the optimizer already has, from training before or from its constructor, move to the store."""
        parameters = dict(model.named_parameters())
        for block in self.layout.blocks:
            given = {n: optimizer.state.get(parameters[n], {}) for n in self.layout.states.get(block.name, ())}
            if any(given.values()):
                self._take(block, given)
        optimizer.state.clear()

    def _take(self, block: Block, given: Mapping[str, Mapping[str, Any]]) -> None:
        """States on the meta device have no values; the first step makes them anew."""
        small = self.small[block.name]
        for name, state in given.items():
            values = [state.get(kind.name) for kind in small.kinds[name]]
            if values and all(isinstance(v, Tensor) and not v.is_meta for v in values):
                small.started.add(name)
        if not small.started:
            return
        for kind in small.large:
            loan = self.store.borrow(block, kind, read=False)
            for slot in block.slots:
                if slot.name in small.started:
                    slot.view(loan.ready.result()).copy_(given[slot.name][kind])
            _wait(loan.give_back(dirty=True))
        for name in small.started:
            kept = [kind.name for kind in small.kinds[name] if not kind.large]
            small.values.update({(name, kind): given[name][kind].clone() for kind in kept})
        self.store.carry_over(block, MASTER)
        self.store.publish(block)

    def small_tensors(self) -> dict[str, Tensor]:
        """All that is committed beside the blocks."""
        tensors = {f"buffer:{name}": buffer for name, buffer in self.buffers.items()}
        for small in self.small.values():
            tensors.update({f"state:{name}:{kind}": value for (name, kind), value in small.values.items()})
            tensors.update({f"started:{name}": torch.ones(()) for name in small.started})
        return tensors

    def load_small(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            if kind == "buffer":
                self.buffers[name] = tensor
            elif kind == "started":
                self.small[self.layout.places[name][0].name].started.add(name)
            else:
                name, _, state = name.rpartition(":")
                self.small[self.layout.places[name][0].name].values[name, state] = tensor

    def read(self, name: str) -> Tensor:
        """A copy of a parameter or buffer, by any of its names, as the last update left it."""
        stored = [*self.graph.parameters.values(), *self.graph.buffers.values()]
        first = next(entry.name for entry in stored if name in entry.names)
        if first in self.buffers:
            return self.buffers[first].clone()
        block, slot = self.layout.places[first]
        loan = self.store.borrow(block, MASTER, slot.start, align(slot.stop))
        value = slot.view(loan.ready.result(), slot.start).clone()
        loan.give_back()
        return value

    def hand_over(self, model: nn.Module) -> None:
        """The module's parameters become views of a store in RAM, or, with a store on disk, give their memory back.

        They stay the same objects, so the optimizer stays valid. Given back, they keep their shape and read as NaN.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            block, slot = self.layout.places[name]
            flat = self.store.view(block, MASTER)
            if flat is not None and parameter.dtype == flat.dtype:
                parameter.data = slot.view(flat)
            else:
                nothing = torch.full((), torch.nan if parameter.is_floating_point() else 0, dtype=parameter.dtype)
                parameter.data = nothing.expand(parameter.shape)


class StateDict(Mapping[str, Tensor]):
    """A lazy state dict: names at once, values, as copies, when asked for."""

    def __init__(self, state: ModelState):
        self._state = state
        persistent = [buffer for buffer in state.graph.buffers.values() if buffer.persistent]
        stored = [*state.graph.parameters.values(), *persistent]
        self._names = dict.fromkeys(name for entry in stored for name in entry.names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._state.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _wait(write: "Future[Any] | None") -> None:
    if write is not None:
        write.result()

"""A run: where it stands, beside the model's tensors, and how it is begun or taken up again.

In: an optimizer, a schedule, a loader's position, and a store that may hold a run already. Out: `Run`, whose facts every commit
tells; the store made and filled, or opened and read.
"""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packhorse.errors import PackhorseError, StoreError
from packhorse.memory import Pool
from packhorse.optimizer import Stepper
from packhorse.precision import LossScale
from packhorse.ranks.world import World
from packhorse.state import ModelState
from packhorse.store import DiskStore
from packhorse.store.encode import decode, encode
from packhorse.store.runs import Earlier, find_earlier
from packhorse.weights import read_files, read_model

logger = logging.getLogger("packhorse")

BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass
class Run:
    """Step, seed, hyper-parameters, loss scale, schedule, and where the data stands."""

    stepper: Stepper
    seed: int
    scaler: LossScale | None
    scheduler: Any
    data: Any
    steps: int = 0

    def __post_init__(self) -> None:
        if self.scheduler is not None:
            _check_scheduler(self.scheduler)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.stepper.optimizer

    def advance(self, *, overflowed: bool) -> None:
        """A step is done; one whose gradients overflowed changed nothing but the loss scale."""
        if self.scaler:
            self.scaler.update(overflowed)
        self.steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers ask, to warn about their order
        if self.scheduler is not None and not overflowed:
            self.scheduler.step()

    def read_position(self) -> Any:
        """Where the data stands, if it can tell."""
        return encode(self.data.state_dict(), "data.state_dict()") if hasattr(self.data, "state_dict") else None

    def facts(self, position: Any) -> dict[str, Any]:
        """What a commit says beside the model itself."""
        facts: dict[str, Any] = {"step": self.steps, "seed": self.seed, "data": position}
        facts["groups"] = encode(self.stepper.read_groups(), "optimizer.param_groups")
        if self.scaler:
            facts["loss_scale"] = [self.scaler.scale, self.scaler.good_steps]
        if hasattr(self.scheduler, "state_dict"):
            facts["scheduler"] = encode(self.scheduler.state_dict(), "scheduler.state_dict()")
        return facts

    def load(self, facts: Mapping[str, Any]) -> None:
        """As a commit left it."""
        self.steps, self.seed = int(facts["step"]), int(facts["seed"])
        if self.scaler and facts.get("loss_scale") is not None:
            self.scaler.scale, self.scaler.good_steps = facts["loss_scale"]
        groups = decode(facts["groups"])
        if len(groups) != len(self.optimizer.param_groups):
            raise StoreError(
                f"the stored run has {len(groups)} parameter groups, this optimizer {len(self.optimizer.param_groups)}"
            )
        for group, stored in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(stored)
        for owner, key in ((self.scheduler, "scheduler"), (self.data, "data")):
            if owner is not None and facts.get(key) is not None:
                owner.load_state_dict(decode(facts[key]))


@dataclass(frozen=True)
class Home:
    """Where runs are kept: a directory, the name of this one in it, and the ranks that share it."""

    directory: Path | None = None
    name: str = ""
    world: World | None = None


def open_run(
    run: Run, home: Home, state: ModelState, pool: Pool, model: nn.Module, *, resume: bool, weights: str | Path | None
) -> None:
    """Makes the store and fills it with the model's first values, or opens one that holds a run."""
    store = state.store
    store.claim()
    if home.world is not None and isinstance(store, DiskStore):
        store.keeps_previous = True
        if resume:
            _go_back_to_common(home.world, store)
    manifest = store.read_manifest()
    header = state.describe(model, run.optimizer)
    if isinstance(store, DiskStore) and home.directory is not None:
        earlier = find_earlier(home.directory, home.name)
        if earlier is not None and not resume:
            raise StoreError(
                f"{earlier.directory} holds a run of {len(earlier.ranks)} ranks at step {earlier.step}; pass resume=True "
                "to continue it, or choose another directory"
            )
        if earlier is not None and _is_farther(earlier, manifest, home.world):
            _continue(run, earlier, home, state, pool, header)
            return
    if manifest is not None and not resume:
        raise StoreError(
            f"the store holds a run at step {manifest['facts']['step']}; pass resume=True to continue it, or choose "
            "another directory"
        )
    if manifest is None:
        source = read_files(model, weights) if weights is not None else read_model(model)
        store.create(state.layout.blocks, pool, header)
        del header  # of a deep model it is large
        state.fill(source)
        state.take_optimizer_state(run.optimizer, model)
        store.commit(run.facts(run.read_position()), state.small_tensors())
        return
    store.open(state.layout.blocks, pool, header)
    state.load_small(store.read_small())
    run.load(manifest["facts"])
    run.optimizer.state.clear()
    if store.is_laid_out_anew:  # states of what is not updated any more are gone: so say the small tensors now
        store.commit(manifest["facts"], state.small_tensors())


def _is_farther(earlier: Earlier, manifest: Mapping[str, Any] | None, world: World | None) -> bool:
    """The run of another number of ranks, than these have come."""
    own = -1 if manifest is None else manifest["facts"]["step"]
    if world is not None:  # all, or none
        own = max(world.gather_objects(own))
    return earlier.step > own


def _continue(run: Run, earlier: Earlier, home: Home, state: ModelState, pool: Pool, header: Mapping[str, Any]) -> None:
    """Takes over the run of another number of ranks."""
    store, world = state.store, home.world
    assert isinstance(store, DiskStore)
    state.load_small(store.continue_from(earlier, state.layout.blocks, pool, header))
    run.load(earlier.facts)
    run.optimizer.state.clear()
    store.commit(earlier.facts, state.small_tensors())
    if world is not None:
        world.gather_objects(None)  # all have what they need
    if world is None or world.rank == 0:
        earlier.remove()
    logger.info("step %d of a run of %d ranks is continued", run.steps, len(earlier.ranks))


def _go_back_to_common(world: World, store: DiskStore) -> None:
    """Ranks may have died between two commits; the last step that all of them have is where they go on."""
    own = store.find_steps()
    found = world.gather_objects(own or [0])  # what is not there yet begins at the first step
    common = set(found[0]).intersection(*found[1:])
    if not common:
        raise StoreError(
            f"the ranks' stores beside {store.path} have no step in common: {found}; bring them back from one copy"
        )
    if own and own[0] != max(common):
        store.go_back()


def _check_scheduler(scheduler: Any) -> None:
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise PackhorseError(f"scheduler is a {type(scheduler).__name__}, expected an LR scheduler, which has step()")
    needed = [
        p.name for p in inspect.signature(step).parameters.values() if p.default is p.empty and p.kind in BY_PLACE
    ]
    if needed:
        raise PackhorseError(
            f"{type(scheduler).__name__}.step() wants {', '.join(needed)}, which the trainer has not; leave scheduler away "
            "and step it yourself, after trainer.step()"
        )

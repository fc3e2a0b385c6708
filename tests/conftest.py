"""Tests trace a model here first, so that captures, which fork, do not each load the tracer and fill its caches again."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crash
import packhorse.sil.divide
import packhorse.tasks
from packhorse.partition import hollow

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)


def _warm_up() -> None:
    module = importlib.import_module("packhorse.graph.capture")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_in_child", lambda make: make())
        module.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(2, 2), lambda output, _: output.mean())


_warm_up()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _blank_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hollow operations leave unwritten would spoil whatever reads it."""
    make_blank = hollow.make_blank

    def make_nan(like: Tensor, device: torch.device | str) -> Tensor:
        return make_blank(like, device).fill_(torch.nan)

    monkeypatch.setattr(hollow, "make_blank", make_nan)


@pytest.fixture(scope="module")
def graphs_are_shared() -> Iterator[None]:
    """Tests of the same model share its graph: capture is tested elsewhere, and takes most of the time."""
    with captures_are_shared(packhorse.tasks):
        yield


@pytest.fixture(scope="module")
def divided_graphs_are_shared() -> Iterator[None]:
    """The same for models that are trained in parts, but not for the parts, whose labels differ."""
    with captures_are_shared(packhorse.sil.divide):
        yield


@contextmanager
def captures_are_shared(module: Any) -> Iterator[None]:
    known: dict[Any, Any] = {}
    original = module.capture

    def capture(model: nn.Module, example: Any, loss: Any = None, **options: Any) -> Any:
        shapes = tuple((n, tuple(p.shape), p.requires_grad, p.is_meta) for n, p in model.named_parameters())
        sizes = tuple((t.shape, t.dtype) for t in torch.utils._pytree.tree_leaves(example))
        key = (type(model), shapes, sizes, repr(model), tuple(sorted(options.items())))
        if key not in known:
            known[key] = original(model, example, loss, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "capture", capture)
        yield


# -- the small run that dies and goes on (crash.py)


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    original = packhorse.tasks.capture
    crash.capture_once()
    yield
    packhorse.tasks.capture = original  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def expected(captured_once: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """All values after every step of an undisturbed run."""
    return crash.reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def trained(captured_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("trained") / "s"
    with crash.make_trainer(store) as trainer:
        crash.train(trainer, 3)
    return store

"""Tests import the tracer once, so that captures, which fork, do not each import it again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import crash
import packhorse.trainer
from packhorse.partition import hollow

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)


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


# -- the small run that dies and goes on (crash.py)


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    original = packhorse.trainer.capture
    crash.capture_once()
    yield
    packhorse.trainer.capture = original  # type: ignore[attr-defined]


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

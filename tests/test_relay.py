"""Relay against the plain loop: same losses, same parameters, bit for bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
import packhorse.trainer
from reference import assert_same_run, train_by_segment_sums, train_plain
from toys import ZOO, zoo

STEPS = 5


pytestmark = pytest.mark.usefixtures("graphs_are_shared")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=1e-2),
}


def train(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[Any],
    loss: Any,
    store: Path | None = None,
    make_scheduler: Any = None,
    **options: Any,
) -> tuple[ph.Trainer, list[float]]:
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    if make_scheduler:
        options["scheduler"] = make_scheduler(optimizer)
    options.setdefault("strategy", "relay")
    trainer = ph.Trainer(model, optimizer, batches[0], loss=loss, store=store, **options)
    return trainer, [trainer.step(batch) for batch in batches]


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, where: str, microbatches: int, tmp_path: Path) -> None:
    model, make, loss = zoo(name)
    batches = [make(16 if name == "resnet50" else 8) for _ in range(STEPS)]
    trainer, losses = train(
        model, adamw, batches, loss, tmp_path / "store" if where == "disk" else None, microbatches=microbatches
    )
    if name in ("gpt", "bert"):  # tied
        expected = train_by_segment_sums(model, trainer._partition, adamw, batches, microbatches=microbatches)
    else:
        expected = train_plain(model, adamw, batches, loss, microbatches=microbatches, keyed=True)
    assert_same_run(trainer, losses, expected, f"{name}, {where}, {microbatches}")
    trainer.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_optimizers(optimizer: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles and chunks so small that every matrix is cut."""
    monkeypatch.setattr("packhorse.store.blocks.UNIT", 4096)
    monkeypatch.setattr("packhorse.update.TILE", 1024)
    monkeypatch.setattr("packhorse.optimizer.TILE", 1024)
    model = nn.Sequential(nn.Linear(49, 130), nn.ReLU(), nn.Linear(130, 80), nn.ReLU(), nn.Linear(80, 5))
    batches = [(torch.randn(8, 49), torch.randint(5, (8,))) for _ in range(STEPS)]
    loss = lambda output, batch: nn.functional.cross_entropy(output, batch[1])  # noqa: E731
    make = OPTIMIZERS[optimizer]
    trainer, losses = train(model, make, batches, loss, tmp_path if where == "disk" else None, microbatches=3)
    assert_same_run(trainer, losses, train_plain(model, make, batches, loss, microbatches=3), optimizer)
    trainer.close()


def make_mlp(dropout: float = 0.0) -> tuple[nn.Module, Callable[[int], Any], Any]:
    layers: list[nn.Module] = []
    for width in (12, 24, 24, 16):
        layers += [nn.Sequential(nn.LazyLinear(width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout))]
    model = nn.Sequential(*layers, nn.LazyLinear(5))
    model(torch.randn(2, 12))
    return model, lambda rows: (torch.randn(rows, 12), torch.randint(5, (rows,))), classify


def classify(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize(
    "options", [{"strategy": "resident"}, {"memory": "4GiB"}, {"overlap": False}, {"update": "deferred"}]
)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_every_way_gives_the_same(options: dict[str, Any], where: str, tmp_path: Path) -> None:
    """Resident, graphs kept, serial, deferred: the list differs, the numbers do not."""
    model, make, loss = make_mlp(dropout=0.2)
    batches = [make(10) for _ in range(STEPS)]
    trainer, losses = train(
        model, adamw, batches, loss, tmp_path if where == "disk" else None, microbatches=4, **options
    )
    expected = train_plain(model, adamw, batches, loss, microbatches=4, keyed=True)
    assert_same_run(trainer, losses, expected)
    if "memory" in options:
        assert len(trainer.plan.kept) == len(trainer.plan.backward) - 1
    trainer.close()


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "unet"])
def test_clipping(name: str, where: str, tmp_path: Path) -> None:
    model, make, loss = zoo(name)
    batches = [make(8) for _ in range(STEPS)]
    store = tmp_path if where == "disk" else None
    trainer, losses = train(model, adamw, batches, loss, store, microbatches=3, clip_norm=0.05)
    if name == "gpt":
        expected = train_by_segment_sums(model, trainer._partition, adamw, batches, microbatches=3, clip_norm=0.05)
    else:
        expected = train_plain(model, adamw, batches, loss, microbatches=3, clip_norm=0.05, keyed=True)
    assert_same_run(trainer, losses, expected)
    trainer.close()


def test_groups_and_schedule() -> None:
    """The user's optimizer object is the source of rates: groups and LR schedulers act through it."""
    model, make, loss = make_mlp()
    batches = [make(6) for _ in range(STEPS)]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        matrices = [p for p in listed if p.ndim > 1]
        vectors = [p for p in listed if p.ndim == 1]
        return torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=STEPS + 1)

    trainer, losses = train(model, optimizer, batches, loss, make_scheduler=schedule, microbatches=2)
    expected = train_plain(model, optimizer, batches, loss, microbatches=2, make_scheduler=schedule)
    assert_same_run(trainer, losses, expected)


def test_weight_counts_tokens() -> None:
    """A mean over tokens, not over rows: microbatches count by how many targets they have."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (6, 5))
    targets = torch.where(torch.rand(6, 5) < 0.4, -100, tokens)
    batch = (tokens, targets)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    def count(batch: Any) -> float:
        return float((batch[1] != -100).sum())

    trainer, losses = train(model, adamw, [batch] * 2, loss, microbatches=4, weight=count)
    assert_same_run(trainer, losses, train_plain(model, adamw, [batch] * 2, loss, microbatches=4, weight=count))
    assert abs(losses[0] - loss(model(tokens), batch).item()) < 1e-6


def test_dropout_does_not_depend_on_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make, loss = zoo("unet")
    model = nn.Sequential(model, nn.Dropout(0.3))
    batches = [make(4) for _ in range(2)]
    expected = train_plain(model, adamw, batches, loss, microbatches=2, keyed=True)
    for count in (1, 2, 7, "finest"):
        monkeypatch.setattr("packhorse.search.partition", lambda graph, n=count: ph.partition(graph, n))
        trainer, losses = train(model, adamw, batches, loss, microbatches=2)
        assert_same_run(trainer, losses, expected, f"{count} segments")


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_frozen_parameters(where: str, tmp_path: Path) -> None:
    """No gradient, no state; backward stops at the first segment that trains."""
    model, make, loss = make_mlp()
    for parameter in [*model[0].parameters(), *model[1].parameters(), model[3][0].weight]:
        parameter.requires_grad_(False)
    batches = [make(6) for _ in range(3)]
    trainer, losses = train(model, adamw, batches, loss, tmp_path if where == "disk" else None, microbatches=2)
    assert_same_run(trainer, losses, train_plain(model, adamw, batches, loss, microbatches=2))
    first = min(trainer.plan.backward)
    assert first > 0
    assert all(n.startswith(("0.", "1.")) for s in trainer._partition.segments[:first] for n in s.parameters)
    assert not any(name.startswith(("0.", "1.")) for name in trainer._layout.states)
    trainer.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet50"])
def test_precision(name: str, precision: str, tmp_path: Path) -> None:
    """Identical to the plain loop with the same casts; fp16 under the same dynamic loss scale."""
    model, make, loss = zoo(name)
    if name == "gpt":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # untied: the plain loop is the oracle
    batches = [make(8) for _ in range(3)]
    trainer, losses = train(model, adamw, batches, loss, tmp_path, microbatches=2, precision=precision)
    expected = train_plain(model, adamw, batches, loss, microbatches=2, keyed=True, precision=precision)
    assert_same_run(trainer, losses, expected)
    assert trainer.plan.update == ("deferred" if precision == "fp16" else "eager")
    trainer.close()


def test_overflow_changes_nothing() -> None:
    model, make, loss = make_mlp()
    trainer, _ = train(model, adamw, [make(4)], loss, precision="fp16", microbatches=2)
    before = dict(trainer.state_dict())
    assert trainer.scaler is not None
    trainer.scaler.scale = 1e30
    trainer.step(make(4))
    assert all(torch.equal(trainer.state_dict()[name], tensor) for name, tensor in before.items())
    assert trainer.scaler.scale == 5e29
    trainer.scaler.scale = 1024.0
    trainer.step(make(4))
    assert not all(torch.equal(trainer.state_dict()[name], tensor) for name, tensor in before.items())


class Recurrent(nn.Module):
    def __init__(self, kind: Any):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.first, self.second = kind(8, 8, batch_first=True), kind(8, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.embed(x))[0])[0][:, -1])


class Biased(nn.Module):
    """Attention with a trained bias, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(2, 5, 5))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in block(x).chunk(3, dim=-1))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, self.bias[None]).transpose(1, 2).flatten(2)
        return self.out(x[:, -1])


class Shared(nn.Module):
    """Blocks that all read views, made once, of a buffer and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 1024)
        self.register_buffer("mask", torch.rand(1024, 1024))
        self.bias = nn.Parameter(torch.randn(2048))
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))
        self.head = nn.Linear(1024, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask, bias = self.mask[:1024, :1024], self.bias[None, :1024]
        x = self.embedding(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x) @ mask / 1024 + bias)
        return self.head(x)


@pytest.mark.parametrize("options", [{}, {"memory": "4GiB"}], ids=str)
def test_views_of_parameters_and_buffers_outlive_them(options: dict[str, Any], tmp_path: Path) -> None:
    """A view that crosses a cut must not show what its memory is used for next."""
    model = Shared()
    batches = [(torch.randn(6, 16), torch.randint(4, (6,))) for _ in range(2)]
    expected = train_plain(model, adamw, batches, classify, microbatches=3)
    trainer, losses = train(model, adamw, batches, classify, store=tmp_path, microbatches=3, **options)
    assert_same_run(trainer, losses, expected, str(options))
    trainer.close()


class Detached(nn.Module):
    """A tied embedding that is looked up without a gradient: only the head teaches it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8) if before else None
        self.embedding = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x)
        x = x + self.embedding.detach().sum(0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.embedding.t()


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_use_without_gradient_comes_first(where: str, before: bool, clip_norm: float | None, tmp_path: Path) -> None:
    model = Detached(before)
    batches = [(torch.randn(6, 8), torch.randint(5, (6,))) for _ in range(3)]
    options: dict[str, Any] = {"microbatches": 2, "clip_norm": clip_norm}
    expected = train_plain(model, adamw, batches, classify, **options)
    trainer, losses = train(model, adamw, batches, classify, store=tmp_path if where == "disk" else None, **options)
    assert_same_run(trainer, losses, expected, f"{where}, {before}")
    trainer.close()


def survey() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    images = (3, 12, 12)
    return {
        "lstm": (Recurrent(nn.LSTM), (5, 6)),
        "gru": (Recurrent(nn.GRU), (5, 6)),
        "rnn": (Recurrent(nn.RNN), (5, 6)),
        "biased attention": (Biased(), (5, 8)),
        "encoder": (nn.Sequential(nn.TransformerEncoder(encoder, 2), nn.Flatten(), nn.Linear(40, 3)), (5, 8)),
        "conv1d": (nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(64, 3)), (4, 10)),
        "conv2d": (
            nn.Sequential(
                nn.Conv2d(3, 8, 3, groups=1),
                nn.InstanceNorm2d(8, affine=True),
                nn.SiLU(),
                nn.ConvTranspose2d(8, 4, 3, stride=2),
                nn.BatchNorm2d(4),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            images,
        ),
        "depthwise": (
            nn.Sequential(
                nn.Conv2d(3, 6, 3, groups=3, dilation=2), nn.Mish(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 3)
            ),
            images,
        ),
        "conv3d": (
            nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(4 * 27, 3)),
            (1, 4, 4, 4),
        ),
        "norms": (
            nn.Sequential(
                nn.Linear(8, 8),
                nn.RMSNorm(8),
                nn.Linear(8, 8),
                nn.LayerNorm(8),
                nn.BatchNorm1d(8),
                nn.PReLU(),
                nn.Linear(8, 3),
            ),
            (8,),
        ),
        "channels last": (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(800, 3)).to(
                memory_format=torch.channels_last
            ),
            images,
        ),
    }


@pytest.mark.parametrize("name", survey())
def test_survey_of_layers(name: str) -> None:
    """Some kernels give other bits where nothing needs a gradient: the forward that is forgotten must use the same."""
    model, shape = survey()[name]
    batches = [(torch.randn(6, *shape), torch.randint(3, (6,))) for _ in range(2)]
    trainer, losses = train(model, adamw, batches, classify, microbatches=2)
    expected = train_plain(model, adamw, batches, classify, microbatches=2, keyed=True)
    if name == "biased attention":  # the bias is used in two segments
        expected = train_by_segment_sums(model, trainer._partition, adamw, batches, microbatches=2)
    assert_same_run(trainer, losses, expected, name)

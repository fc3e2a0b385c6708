"""Evaluation and prediction have graphs of their own, which share parameters and cuts with the training graph."""

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
from packhorse.models.zoo import classify
from packhorse.partition import partition_like
from toys import hugging_face, zoo


class Moody(nn.Module):
    """Dropout, batch norm, and Python that asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) for _ in range(4)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x + 0.1 * x.square()
        return self.head(x)


def moody_batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randint(3, (rows,))


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(model.named_parameters()), dict(model.named_buffers())


def test_the_evaluation_graph_is_the_model_in_eval_mode() -> None:
    model = Moody()
    for _ in range(3):
        model(torch.randn(16, 8))  # so that running statistics differ from their start
    model.train()
    train = ph.capture(model, moody_batch(4), classify)
    evaluate = ph.capture(model, moody_batch(4), classify, mode="eval")
    assert model.training, "capture leaves the model's mode alone"
    batch = moody_batch(5)
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = classify(model(batch[0]), batch)
    for count in (1, 2, 5):
        partition = partition_like(evaluate, ph.partition(train, count))
        assert torch.equal(partition.compose(*state(model), batch), expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_prediction_needs_no_labels() -> None:
    model = Moody().eval()
    predict = ph.capture(model, torch.randn(4, 8), mode="predict")
    x = torch.randn(3, 8)
    assert torch.equal(ph.partition(predict, 3).compose(*state(model), x), model(x))


def test_prediction_returns_the_model_s_own_output_type() -> None:
    pytest.importorskip("transformers", reason="transformers is an extra and not installed")
    model, make, _ = hugging_face("gpt2")
    batch = {"input_ids": make(3)["input_ids"]}
    graph = ph.capture(model, {"input_ids": make(4)["input_ids"]}, mode="predict")
    output = ph.partition(graph, 3).compose(*state(model), batch)
    model.eval()
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert torch.equal(output.logits, model(**batch).logits)


@pytest.mark.parametrize("name", ["gpt", "resnet50", "unet"])
def test_cuts_are_mapped_by_parameters(name: str) -> None:
    model, make, loss = zoo(name)
    train = ph.partition(ph.capture(model, make(4), loss), 4)
    evaluate = partition_like(ph.capture(model, make(4), loss, mode="eval"), train)
    assert len(evaluate.segments) == len(train.segments)
    for a, b in zip(train.segments, evaluate.segments, strict=True):
        assert set(a.parameters) == set(b.parameters)

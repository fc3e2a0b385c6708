"""Every model the issue names, at toy width: name -> (model, batch maker, loss)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from packhorse import models
from packhorse.models.zoo import classify, predict_tokens

Toy = tuple[nn.Module, Callable[[int], Any], Callable[[Any, Any], Tensor] | None]


def _images(size: int, classes: int, dense: bool = False) -> Callable[[int], Any]:
    def make(rows: int) -> Any:
        labels = (rows, size, size) if dense else (rows,)
        return torch.randn(rows, 3, size, size), torch.randint(classes, labels)

    return make


def _text(rows: int) -> Any:
    tokens = torch.randint(64, (rows, 9))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


def zoo(name: str) -> Toy:
    """Our own models."""
    if name == "mlp":
        model: nn.Module = models.MLP((49, 32, 32, 16, 16, 8, 5))
        return model, lambda rows: (torch.randn(rows, 7, 7), torch.randint(5, (rows,))), classify
    if name == "gpt":
        config = models.GPTConfig(layers=3, heads=2, width=16, context=8, vocabulary=64, dropout=0.1)
        return models.GPT(config), _text, predict_tokens
    if name == "bert":
        bert = models.BertConfig(layers=2, heads=2, width=16, context=8, vocabulary=64)
        return models.Bert(bert), _text, predict_tokens
    if name == "alexnet":
        return models.AlexNet(5, width=0.05), _images(64, 5), classify
    if name == "vgg16":
        return models.VGG16(5, width=0.05), _images(32, 5), classify
    if name == "resnet50":
        return models.ResNet50(5, width=0.08), _images(32, 5), classify
    return models.UNet(5, width=0.06, levels=3), _images(16, 5, dense=True), classify


ZOO = ("mlp", "gpt", "bert", "alexnet", "vgg16", "resnet50", "unet")

HUGGING_FACE = ("gpt2", "bert", "llama", "qwen3", "mixtral", "t5", "vit", "resnet")


def hugging_face(name: str, dtype: torch.dtype = torch.float32) -> Toy:
    """transformers' models, from configs, with the dropout they come with."""
    import transformers as hf

    sizes: Any = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    ids: Any = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    builders: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, **ids)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **ids, num_key_value_heads=2)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, **ids, num_key_value_heads=2, head_dim=8)),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**sizes, **ids, num_key_value_heads=2, num_local_experts=4)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=5,
            )
        ),
        "resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=5)
        ),
    }
    model = builders[name]().to(dtype).train()

    def make(rows: int) -> Any:
        if name in ("vit", "resnet"):
            return {"pixel_values": torch.randn(rows, 3, 16, 16, dtype=dtype), "labels": torch.randint(5, (rows,))}
        return {"input_ids": torch.randint(1, 64, (rows, 10)), "labels": torch.randint(1, 64, (rows, 10))}

    return model, make, None

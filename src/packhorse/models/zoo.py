"""Tasks by name: a model, an example batch for it and its loss.

In: a MODEL as written on the command line: a built-in name, `file.py:function`, or a directory with a Hugging Face
`config.json`. Out: a `Task`. Built on the meta device unless asked otherwise: looking at a model needs none of its memory.
"""

import difflib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.errors import ModelError
from packhorse.models.bert import Bert, BertConfig
from packhorse.models.gpt import GPT, GPTConfig
from packhorse.models.mlp import MLP
from packhorse.models.vision import VGG16, AlexNet, ResNet50, UNet


@dataclass(frozen=True)
class Task:
    """What capture needs: a model, an example, and a loss (None: the model returns it)."""

    name: str
    model: nn.Module
    example: Any
    loss: Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True)
class _Recipe:
    build: Callable[[], nn.Module]
    example: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    deeper: "Callable[[int], _Recipe] | None" = None  # the same with another number of layers


def classify(output: Tensor, batch: Any) -> Tensor:
    """Cross entropy of logits [rows, classes, ...] with the batch's second element."""
    return F.cross_entropy(output, batch[1])


def predict_tokens(output: Tensor, batch: Any) -> Tensor:
    """Cross entropy of logits [rows, length, vocabulary] with batch["targets"]."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def _images(size: int, classes: int, dense: bool = False) -> Callable[[int], Any]:
    def example(rows: int) -> Any:
        labels = (rows, size, size) if dense else (rows,)
        return torch.randn(rows, 3, size, size), torch.randint(classes, labels)

    return example


def _letters(rows: int) -> Any:
    return torch.randn(rows, 1, 28, 28), torch.randint(26, (rows,))


def _text(length: int, vocabulary: int) -> Callable[[int], Any]:
    def example(rows: int) -> Any:
        tokens = torch.randint(vocabulary, (rows, length + 1))
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}

    return example


def _gpt(**sizes: Any) -> _Recipe:
    config = replace(GPTConfig(), **sizes)
    deeper = lambda layers: _gpt(**{**sizes, "layers": layers})  # noqa: E731
    return _Recipe(lambda: GPT(config), _text(config.context, config.vocabulary), predict_tokens, deeper)


def _bert(**sizes: Any) -> _Recipe:
    config = replace(BertConfig(), **sizes)
    deeper = lambda layers: _bert(**{**sizes, "layers": layers})  # noqa: E731
    return _Recipe(lambda: Bert(config), _text(config.context, config.vocabulary), predict_tokens, deeper)


_RECIPES: dict[str, _Recipe] = {
    "mlp": _Recipe(MLP, _letters, classify),
    "alexnet": _Recipe(AlexNet, _images(224, 1000), classify),
    "vgg16": _Recipe(VGG16, _images(224, 1000), classify),
    "resnet50": _Recipe(ResNet50, _images(224, 1000), classify),
    "unet": _Recipe(UNet, _images(256, 21, dense=True), classify),
    "gpt-tiny": _gpt(layers=4, heads=4, width=64, context=32, vocabulary=256),
    "gpt-bytes": _gpt(layers=24, heads=12, width=768, context=128, vocabulary=256),
    "gpt2": _gpt(),
    "gpt2-medium": _gpt(layers=24, heads=16, width=1024),
    "gpt2-large": _gpt(layers=36, heads=20, width=1280),
    "gpt2-xl": _gpt(layers=48, heads=25, width=1600),
    "gpt-50b": _gpt(layers=62, heads=64, width=8192, context=1024, vocabulary=50257),
    "bert-tiny": _bert(layers=2, heads=2, width=64, context=32, vocabulary=256),
    "bert-base": _bert(),
    "bert-large": _bert(layers=24, heads=16, width=1024),
}


def task_names() -> tuple[str, ...]:
    return tuple(_RECIPES)


def load_task(name: str, *, rows: int = 1, device: str = "meta", layers: int | None = None) -> Task:
    """The task a MODEL stands for, with an example of `rows` rows where the example is ours to make.

    `layers` makes a built-in transformer deeper or shallower.
    """
    if layers is not None and (name not in _RECIPES or _RECIPES[name].deeper is None):
        known = ", ".join(n for n, recipe in _RECIPES.items() if recipe.deeper is not None)
        raise ModelError(f"the number of layers can be chosen for {known}, not for {name!r}")
    if name in _RECIPES:
        deeper = _RECIPES[name].deeper
        recipe = deeper(layers) if layers is not None and deeper is not None else _RECIPES[name]
        with torch.device(device):
            model = recipe.build()
        return Task(name, model, recipe.example(rows), recipe.loss)
    if ".py:" in name:
        return _from_function(name, device)
    if Path(name).is_dir():
        return _from_config(Path(name), rows, device)
    near = difflib.get_close_matches(name, _RECIPES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ModelError(
        f"unknown MODEL {name!r}: {hint}expected a built-in name ({', '.join(_RECIPES)}), file.py:function, or a directory "
        "with a Hugging Face config.json"
    )


def _from_function(name: str, device: str) -> Task:
    """`file.py:function`; the function takes nothing and returns (model, example) or (model, example, loss)."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"unknown MODEL {name!r}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
        build = getattr(module, function, None)
        if not callable(build):
            raise ModelError(f"unknown MODEL {name!r}: {file} has no function {function}")
        with torch.device(device):
            made = build()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} failed, called without arguments: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise ModelError(f"{name} returned {type(made).__name__}, expected (model, example) or (model, example, loss)")
    model, example, *loss = made
    example = torch.utils._pytree.tree_map_only(Tensor, _real, example)
    return Task(function, model, example, loss[0] if loss else None)


def _real(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _from_config(directory: Path, rows: int, device: str) -> Task:
    """A Hugging Face model from its config alone, with an example that its kind of model takes."""
    file = directory / "config.json"
    if not file.is_file():
        raise ModelError(f"unknown MODEL {str(directory)!r}: the directory has no config.json")
    try:
        import transformers
    except ImportError:
        raise ModelError("a Hugging Face config needs transformers: pip install 'packhorse[transformers]'") from None
    try:
        architectures = dict(json.loads(file.read_text())).get("architectures")
        config = transformers.AutoConfig.from_pretrained(directory)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file} is no config that transformers reads: {str(error).splitlines()[0]}") from None
    architecture = getattr(transformers, architectures[0], None) if architectures else None
    if architecture is None:
        raise ModelError(
            f'{file} names no architecture that transformers {transformers.__version__} has; add "architectures"'
        )
    with torch.device(device):
        model = architecture(config)
    return Task(directory.name, model, _config_example(config, architecture.__name__, rows), None)


def _config_example(config: Any, architecture: str, rows: int) -> dict[str, Tensor]:
    if hasattr(config, "image_size") or hasattr(config, "num_channels"):
        size = getattr(config, "image_size", 224)
        images = torch.randn(rows, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": images, "labels": torch.randint(getattr(config, "num_labels", 2), (rows,))}
    length = min(getattr(config, "max_position_embeddings", None) or 512, 512)
    tokens = torch.randint(config.vocab_size, (rows, length))
    if architecture.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": torch.randint(config.num_labels, (rows,))}
    return {"input_ids": tokens, "labels": tokens}

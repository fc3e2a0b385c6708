"""Models of our own for examples, benchmarks and the command line. None of them knows it will be cut."""

from packhorse.models.bert import Bert, BertConfig
from packhorse.models.gpt import GPT, GPTConfig
from packhorse.models.mlp import MLP
from packhorse.models.vision import VGG16, AlexNet, ResNet50, UNet
from packhorse.models.zoo import Task, load_task, task_names

__all__ = [
    "GPT",
    "MLP",
    "VGG16",
    "AlexNet",
    "Bert",
    "BertConfig",
    "GPTConfig",
    "ResNet50",
    "Task",
    "UNet",
    "load_task",
    "task_names",
]

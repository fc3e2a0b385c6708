"""A BERT: post-norm encoder blocks, word, position and segment embeddings, a masked-language head tied to the words."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.models.gpt import Embedding, Head


@dataclass(frozen=True)
class BertConfig:
    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 512
    vocabulary: int = 30522
    dropout: float = 0.1


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.words = Embedding(config.vocabulary, config.width)
        self.positions = Embedding(config.context, config.width)
        self.types = Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        types = torch.zeros_like(tokens) if types is None else types
        return self.dropout(self.norm(self.words(tokens) + self.positions(positions) + self.types(types)))


class Block(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.heads, self.rate = config.heads, config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm1 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        def split(projected: Tensor) -> Tensor:
            return projected.unflatten(2, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(hidden)),
            split(self.key(hidden)),
            split(self.value(hidden)),
            attn_mask=mask,
            dropout_p=self.rate if self.training else 0.0,
        )
        hidden = self.norm1(hidden + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return self.norm2(hidden + self.dropout(self.down(F.gelu(self.up(hidden)))))


class Bert(nn.Module):
    """tokens [rows, length], optionally segment types and a mask of real tokens -> logits [rows, length, vocabulary]."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.head = Head(self.embeddings.words)

    def forward(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        attended = None if mask is None else mask[:, None, None, :].bool()
        hidden = self.embeddings(tokens, types)
        for block in self.blocks:
            hidden = block(hidden, attended)
        return self.head(self.norm(F.gelu(self.transform(hidden))))

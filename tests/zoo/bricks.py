"""Blocks that the hand-written models are made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.entry import BATCH, CLASSES, HEADS, LENGTH, VOCAB, WIDTH, classes, tokens


class Mix(nn.Module):
    """A residual two-layer perceptron: (..., width) -> (..., width)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.silu(self.wide(self.norm(x))))


class Attend(nn.Module):
    """Residual self-attention and ``Mix`` on (batch, length, WIDTH); mask (batch, length) is nonzero where to look."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.feed = Mix()
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, -1)]
        keep = None if mask is None else mask.bool()[:, None, None]
        read = F.scaled_dot_product_attention(*heads, attn_mask=keep, is_causal=self.causal)
        return self.feed(x + self.back(read.transpose(1, 2).flatten(2)))


def next_token_loss(scores: Tensor, text: Tensor) -> Tensor:
    """Cross-entropy of scores (batch, length, VOCAB) against the text shifted by one."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), text[:, 1:].flatten())


class Reader(nn.Module):
    """Base of the language models here: embedding ``words``, a stack of ``blocks``, ``head``; loss inside forward."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(x), text)


class Sorter(nn.Module):
    """Base of the classifiers here: rows (batch, 6) into ``inlet``, ``blocks``, ``outlet``; loss inside forward."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        for index, block in enumerate(self.blocks):
            x = self.between(index, block(x))
        return F.cross_entropy(self.outlet(x), labels)

    def between(self, index: int, x: Tensor) -> Tensor:
        """Glue after block ``index``."""
        return x


def mixes(count: int) -> list[nn.Module]:
    return [Mix() for _ in range(count)]


def attends(count: int, causal: bool = True) -> list[nn.Module]:
    return [Attend(causal) for _ in range(count)]


def rows() -> Tensor:
    """(BATCH, 6) numbers."""
    return torch.randn(BATCH, 6)


def labelled_rows() -> dict[str, Any]:
    """Inputs of a ``Sorter``."""
    return {"rows": rows(), "labels": classes()}


def text_only() -> dict[str, Any]:
    """Inputs of a ``Reader``."""
    return {"text": tokens(BATCH, LENGTH)}

"""A small decoder-only transformer over bytes, plain torch: nothing in it knows about pipelines.

Pre-norm blocks as in Radford et al. 2019 (GPT-2), learned positions, GELU, no bias in the attention's projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stageflow.cli.demo import HEADS


@dataclass(frozen=True)
class GPTConfig:
    """Sizes. The default has 6.4 million parameters.

    length: longest sequence, in tokens.
    """

    vocabulary: int = 256
    length: int = 256
    layers: int = 8
    width: int = 256
    heads: int = HEADS


class Embedding(nn.Module):
    """Tokens (batch, length) of int64 to vectors (batch, length, width), with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward net of four times the width, each behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Head(nn.Module):
    """Vectors (batch, length, width) to logits (batch, length, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def build_gpt(config: GPTConfig, seed: int = 0) -> nn.Sequential:
    """The model with its starting weights, the same for the same seed; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [Block(config) for _ in range(config.layers)]
        model = nn.Sequential(Embedding(config), *blocks, Head(config))
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in blocks:
            # Each block adds to the residual stream twice; scaled down so that the sum starts at the same size.
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)
    return model


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats; logits (batch, length, vocabulary), target (batch, length) of int64."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())

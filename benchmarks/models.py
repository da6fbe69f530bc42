"""The models that are measured: plain modules, the same for every contestant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stageflow.testing.emulated import EmulatedStage


class Block(nn.Module):
    """A transformer layer with the norms before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def transformer(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, heads=max(1, width // 32)) for _ in range(layers)))


def tiny(stages: int) -> nn.Sequential:
    """Layers that take no time worth speaking of."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(stages)))


def sleepers(stages: int, forward_s: float, input_s: float, weight_s: float) -> nn.Sequential:
    """Layers that together sleep as long as told, whatever their number."""
    return nn.Sequential(*(EmulatedStage(forward_s, input_s, weight_s) for _ in range(stages)))


def wide(layers: int, width: int) -> nn.Sequential:
    """Mostly weights."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

"""What one zoo model is: how to make it, what it eats, and how its output becomes a loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BATCH = 8
LENGTH = 12
VOCAB = 96
WIDTH = 32
DEPTH = 4
HEADS = 4
CLASSES = 5

Made = tuple[nn.Module, dict[str, Any]]
Loss = Callable[..., Tensor]


class Built(NamedTuple):
    """A fresh model in train mode, keyword inputs of batch size ``BATCH``, and loss(output, target=None) -> scalar."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Loss


def own_loss(output: Any, target: None = None) -> Tensor:
    """The loss that the model computed itself."""
    return output["loss"] if isinstance(output, dict) else output.loss


def is_loss(output: Tensor, target: None = None) -> Tensor:
    """For a model whose whole output is its loss."""
    return output


def ramp_loss(output: Any, target: None = None) -> Tensor:
    """Distance of every float tensor in the output to a fixed ramp: a loss for models that have no target."""
    terms = [_ramp_distance(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum(term for term in terms if term is not None)


def _ramp_distance(leaf: Tensor) -> Tensor | None:
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    if not leaf.is_floating_point() or leaf.numel() == 0:
        return None
    columns = leaf.shape[-1] if leaf.dim() else 1
    return (leaf - torch.linspace(-0.8, 1.1, columns, dtype=leaf.dtype)).pow(2).mean()


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    make: builds (model, keyword inputs); random numbers are seeded by the entry's name before it runs.
    loss: output -> scalar; ``own_loss`` where the model computes it.
    random: forward draws random numbers in train mode, so a run without stageflow is no reference for it.
    lively: spread the parameters of the made model (see ``liven``); off where the values matter.
    lr: step size at which three SGD steps stay tame.
    """

    name: str
    family: str
    make: Callable[[], Made]
    loss: Loss = own_loss
    random: bool = False
    lively: bool = True
    lr: float = 0.02

    def build(self) -> Built:
        """The same model and inputs at every call; the caller's random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest()))
            model, inputs = self.make()
            model.train()
            if self.lively:
                liven(model)
        return Built(model, inputs, self.loss)


@torch.no_grad()
def liven(model: nn.Module) -> None:
    """Add noise to every parameter that starts flat.

    Libraries start weights near 0, biases at 0, norms at 1 and layer scales at 1e-5: at width 32 a block then hardly
    changes its input, and a gradient that went missing hides below the tolerance.
    """
    for parameter in model.parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        spread = 0.15 if parameter.dim() > 1 else 0.1
        if parameter.numel() == 1 or parameter.std() < 0.6 * spread:
            parameter.add_(torch.randn_like(parameter), alpha=spread)


def tokens(*shape: int, low: int = 4, high: int = VOCAB) -> Tensor:
    """Token numbers that are none of the special ones (0 pad, 1 start, 2 end, 3 mask)."""
    return torch.randint(low, high, shape)


def classes(*shape: int) -> Tensor:
    """Class numbers below ``CLASSES``."""
    return torch.randint(0, CLASSES, shape or (BATCH,))


def pixels(side: int = 32, channels: int = 3) -> Tensor:
    """A batch of square noise images, (BATCH, channels, side, side)."""
    return torch.randn(BATCH, channels, side, side)


def ragged(length: int = LENGTH) -> Tensor:
    """An attention mask, (BATCH, length) int64: rows of four different lengths, padded on the right."""
    rows = torch.arange(BATCH).remainder(4)
    return (torch.arange(length) < length - rows[:, None]).long()

"""Random draws are the same for any number of stages, and again under recomputation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replay_harness import Line, assert_close, cut
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class Drops(nn.Module):
    """Dropout in blocks and in glue, noise in glue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Noisy() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn(x.shape)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x).square().mean()

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(block(x), 0.1, self.training) + 0.01 * torch.rand_like(x)


class LayerDrop(Drops):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.4 else block(x)


class PythonLayerDrop(Drops):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if random.random() < 0.4 else block(x)


class Checkpoints(Drops):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class ReentrantCheckpoints(Drops):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class LongCheckpoints(Drops):
    """Two blocks and glue, all drawing, in one checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def two(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return second(F.dropout(first(x), 0.3))

        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(two, first, second, x, use_reentrant=False)
        return self.head(x).square().mean()


def train(
    model: nn.Module, stages: int, keys: range, before_running: Callable[[], None] = lambda: None
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH)
    line = Line(cut(copy.deepcopy(model), x, stages=stages))
    before_running()
    losses = []
    for key in keys:
        ran = line.forward(x, key=key)
        torch.manual_seed(99 + stages)  # what happens between forward and backward must not matter
        line.backward(ran, ran.output)
        losses.append(ran.output.item())
    return losses, line.gradients()


CHECKPOINTED = [Checkpoints, ReentrantCheckpoints, LongCheckpoints]


@pytest.mark.parametrize("kind", [Drops, LayerDrop, PythonLayerDrop, *CHECKPOINTED], ids=lambda k: k.__name__)
def test_any_number_of_stages_draws_the_same(kind: type[nn.Module]) -> None:
    model = kind()
    losses, gradients = train(model, 1, range(4))
    assert len(set(losses)) == 4, "nothing was drawn"
    for stages in (2, 3):
        other_losses, other = train(model, stages, range(4))
        assert other_losses == pytest.approx(losses, rel=1e-6)
        for name, gradient in gradients.items():
            assert_close(name, other[name], gradient)


@pytest.mark.parametrize("kind", CHECKPOINTED, ids=lambda k: k.__name__)
def test_a_checkpoint_draws_again_what_it_drew(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    _, gradients = train(model, 2, range(3))

    def off() -> None:
        monkeypatch.setitem(globals(), "checkpoint", lambda run, *args, use_reentrant: run(*args))

    _, expected = train(model, 2, range(3), off)
    for name, gradient in expected.items():
        assert_close(name, gradients[name], gradient)

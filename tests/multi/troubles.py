"""Models that do harm when a sample says so; imports little, because every worker imports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
IN_FORWARD, IN_BACKWARD = 1, 2
Trouble = Callable[[], Any]


def raises() -> None:
    raise ValueError("out of luck")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(30.0)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trouble: Trouble) -> Tensor:
        ctx.trouble = trouble
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trouble()
        return gradient, None


class Enter(nn.Module):
    """Takes samples whose last number is a mark: 0, IN_FORWARD or IN_BACKWARD."""

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        return samples[:, :-1], samples[:, -1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_forward: Trouble | None = None
        self.in_backward: Trouble | None = None

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, marks = value
        if self.in_forward is not None and (marks == IN_FORWARD).any():
            self.in_forward()
        if self.in_backward is not None and (marks == IN_BACKWARD).any():
            x = _InBackward.apply(x, self.in_backward)
        return torch.tanh(self.linear(x)), marks


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0])


BOUNDARIES = {1: [], 2: ["4"], 3: ["2", "5"], 4: ["2", "4", "6"]}


def build(
    stage: int | None = None, stages: int = 4, *, forward: Trouble | None = None, backward: Trouble | None = None
) -> nn.Sequential:
    """8 modules, to be cut at BOUNDARIES; the troubles are in one of that many stages."""
    model = nn.Sequential(Enter(), *[Layer() for _ in range(6)], Leave())
    if stage is not None:
        layer = model[max(1, stage * 8 // stages)]
        assert isinstance(layer, Layer)
        layer.in_forward, layer.in_backward = forward, backward
    return model


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Refuses marked targets."""
    if target.max() > 100:
        raises()
    return F.mse_loss(output, target)


class FailsLater(torch.optim.SGD):
    """Fails in its second step, in the last stage only."""

    def step(self, closure: Any = None) -> None:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 2 and any(p.shape == (2, WIDTH) for group in self.param_groups for p in group["params"]):
            raises()
        super().step(closure)


fails_later = partial(FailsLater, lr=0.1)

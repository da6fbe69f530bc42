"""Stages that only take time: what a pipeline does on many devices, tried on a machine that has few.

A sleeping stage needs no core, so eight of them run side by side on two cores, and what a step takes beyond their sleep
is what schedule, runtime and transport add.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.runtime.put_off import PutOff


class _Emulated(torch.autograd.Function):
    """y = x + w, slowly. layer: tells how slowly, and where the gradient of w is put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EmulatedStage) -> Tensor:  # type: ignore[override]
        ctx.layer, ctx.weight = layer, weight
        time.sleep(layer.forward_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        layer, weight = ctx.layer, ctx.weight
        time.sleep(layer.input_s)
        gx = gy if ctx.needs_input_grad[0] else None
        pending = None if layer.put_off is None else layer.put_off.pending
        if pending is not None:
            pending.append((_add_weight_gradient, (layer, weight, gy)))
            return gx, None, None
        time.sleep(layer.weight_s)
        return gx, gy.sum(), None


def _add_weight_gradient(layer: EmulatedStage, weight: Tensor, gy: Tensor) -> None:
    time.sleep(layer.weight_s)
    gradient = gy.sum()
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


class EmulatedStage(nn.Module):
    """Adds its one weight to its input, and takes as long as told.

    forward_s: seconds of the forward.
    input_s, weight_s: seconds of the gradient of the input and of the weight; a whole backward takes both, and under a
        schedule that splits the backward the second is spent in W.

    Its numbers are those of ``x + w``, so that gradients can be checked as well. The system wakes a sleeper some
    50 us late, which counts as part of the sleep.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.zeros(()))
        self.put_off: PutOff | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _Emulated.apply(x, self.weight, self)  # type: ignore[no-any-return]

    def split_with(self, put_off: PutOff) -> None:
        """See `stageflow.runtime.put_off.SplitsItself`."""
        self.put_off = put_off

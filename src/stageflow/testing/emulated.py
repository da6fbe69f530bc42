"""Stages that only take time: what a pipeline does on many devices, tried on a machine that has few.

A sleeping stage needs no core, so eight of them run side by side on two cores, and what a step takes beyond their sleep
is what schedule, runtime and transport add.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.runtime.put_off import PutOff

_NAP = 0.001


class _Emulated(torch.autograd.Function):
    """y = x + w, with a slow backward. layer: tells how slow, and where the gradient of w is put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EmulatedStage) -> Tensor:  # type: ignore[override]
        ctx.layer, ctx.weight = layer, weight
        return x + weight

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        started = time.perf_counter()
        layer, weight = ctx.layer, ctx.weight
        gx = gy if ctx.needs_input_grad[0] else None
        pending = None if layer.put_off is None else layer.put_off.pending
        if pending is not None:
            pending.append((_add_weight_gradient, (layer, weight, gy)))
            _sleep_until(started + layer.input_s)
            return gx, None, None
        gradient = gy.sum()
        _sleep_until(started + layer.input_s + layer.weight_s)
        return gx, gradient, None


def _add_weight_gradient(layer: EmulatedStage, weight: Tensor, gy: Tensor) -> None:
    started = time.perf_counter()
    gradient = gy.sum()
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
    _sleep_until(started + layer.weight_s)


def _sleep_until(end: float) -> None:
    """Take until ``end`` of `time.perf_counter`; going to sleep early makes up for waking late."""
    left = end - time.perf_counter() - _lateness()
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        pass


@functools.cache
def _lateness() -> float:
    """Seconds by which this machine usually wakes a sleeper late."""
    late = []
    for _ in range(21):
        started = time.perf_counter()
        time.sleep(_NAP)
        late.append(time.perf_counter() - started - _NAP)
    return statistics.median(late)


class EmulatedStage(nn.Module):
    """Adds its one weight to its input, and takes as long as told.

    forward_s: seconds of the forward.
    input_s, weight_s: seconds of the gradient of the input and of the weight; a whole backward takes both, and under a
        schedule that splits the backward the second is spent in W.

    Its numbers are those of ``x + w``, so that gradients can be checked as well; what computing them takes is part of
    the time, as the host's work is while a device computes.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.zeros(()))
        self.put_off: PutOff | None = None

    def forward(self, x: Tensor) -> Tensor:
        started = time.perf_counter()
        y = _Emulated.apply(x, self.weight, self)
        _sleep_until(started + self.forward_s)
        return y  # type: ignore[no-any-return]

    def split_with(self, put_off: PutOff) -> None:
        """See `stageflow.runtime.put_off.SplitsItself`."""
        self.put_off = put_off

"""Activation recomputation layer by layer: keep each layer's input, compute the rest again in the backward.

Unlike recomputation of a whole stage (see `Stage`), only one layer's activations are in memory at a time during a
backward (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, Section 4). The random state at a layer's
start is kept with its input, so dropout draws the same again; buffers that a layer changes count each micro-batch once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Make every layer that holds parameters keep only its input."""
    for layer in layers:
        if next(layer.parameters(), None) is not None and not issubclass(type(layer), _Recomputed):
            layer.__class__ = _recomputing_class(type(layer))


class _Recomputed:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(_Once(self, plain), *args, use_reentrant=False, **kwargs)


class _Once:
    """A layer's forward that leaves its buffers alone when it is run again."""

    def __init__(self, layer: nn.Module, forward: Any) -> None:
        self._layer = layer
        self._forward = forward
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._forward(*args, **kwargs)
        before = [(buffer, buffer.clone()) for buffer in self._layer.buffers()]
        try:
            return self._forward(*args, **kwargs)
        finally:  # checkpoint leaves by an exception as soon as it has what it needs
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


@functools.cache
def _recomputing_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})

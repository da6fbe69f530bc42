"""Where a received tensor enters a stage's autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stageflow.graph import Bundle


class _Enter(torch.autograd.Function):
    """The identity. What it returns is no leaf and no view, so the stage may change it in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradients


def arrive(bundle: Bundle, device: torch.device) -> Bundle:
    """The bundle with its tensors on this worker's device; not every transport delivers them there."""
    if device.type != "cpu" and any(tensor.device != device for tensor in bundle.tensors.values()):
        bundle.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in bundle.tensors.items()}
    return bundle


def enter(
    tensors: dict[str, Tensor], trained: list[str], as_leaves: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the tensors named in `trained` require grad.

    as_leaves: the stage changes none of them in place, so it can have the leaves themselves, which takes less time.
    Returns (the leaves, whose ``.grad`` a backward fills; all tensors as the stage may use them).
    """
    leaves = {name: tensors[name].detach().requires_grad_() for name in trained}
    if as_leaves:
        return leaves, {**tensors, **leaves}
    entered = dict(tensors)
    entered.update(zip(trained, _Enter.apply(*leaves.values()), strict=True))  # type: ignore[arg-type]
    return leaves, entered

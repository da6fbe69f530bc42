"""Where a received tensor enters a stage's autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Enter(torch.autograd.Function):
    """The identity. What it returns is no leaf and no view, so the stage may change it in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradients


def enter(tensors: dict[str, Tensor], trained: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the tensors named in `trained` require grad.

    Returns (the leaves, whose ``.grad`` a backward fills; all tensors as the stage may use them).
    """
    if not trained:
        return {}, tensors
    leaves = {name: tensors[name].detach().requires_grad_() for name in trained}
    entered = dict(tensors)
    entered.update(zip(trained, _Enter.apply(*leaves.values()), strict=True))  # type: ignore[arg-type]
    return leaves, entered

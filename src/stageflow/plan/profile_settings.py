"""How a profile is to be made, and of which micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageflow.errors import InputError
from stageflow.runtime.batch import MicroBatch, cut_batch
from stageflow.runtime.loss import LossFunction, compute_loss, own_loss
from stageflow.split import ModelLike
from stageflow.split.request import as_call
from stageflow.split.signature import positional_names
from stageflow.transport.structure import flatten


@dataclass(frozen=True)
class Settings:
    """The arguments of `profile_model` that say how."""

    target: Any
    loss: LossFunction | None
    optimizer: Callable[..., torch.optim.Optimizer] | None
    microbatch: int | None
    batch_dims: dict[str, int | None]
    split: str
    at_least: int
    device: str | torch.device | None
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    threads: int
    rounds: int
    warm_up: int
    progress: bool

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warm_up < 0:
            raise InputError(f"rounds must be at least 1 and warm_up 0, got {self.rounds} and {self.warm_up}")
        if self.threads < 1:
            raise InputError(f"threads must be at least 1, got {self.threads}")

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """The loss; where there is none, something in its place that costs next to nothing."""
        if self.loss is not None:
            return compute_loss(self.loss, output, target)
        try:
            return own_loss(output)
        except InputError:
            floats = [tensor for tensor in flatten(output)[0].values() if tensor.is_floating_point()]
            return sum((tensor.mean().float() for tensor in floats), torch.zeros(()))


def first_microbatch(model: ModelLike, example: Any, settings: Settings) -> tuple[MicroBatch, int]:
    """The first micro-batch of an example, and its number of samples (0 without a batch dimension)."""
    names = positional_names(model)
    args, kwargs = as_call(example)
    whole = cut_batch(args, kwargs, settings.target, 1, settings.batch_dims, names)
    size = whole.layout.sizes[0] if whole.layout.cut else 0
    wanted = settings.microbatch
    if wanted is None or wanted == size:
        return whole.microbatch(0), size
    if not size or wanted < 1 or size % wanted:
        raise InputError(f"microbatch={wanted} must divide the samples of the example, which has {size or 'no batch'}")
    return cut_batch(args, kwargs, settings.target, size // wanted, settings.batch_dims, names).microbatch(0), wanted


def moved(microbatch: MicroBatch, device: torch.device, dtype: torch.dtype | None) -> MicroBatch:
    """On a device; dtype: what floating-point tensors become, None leaves them."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    parts = (microbatch.args, microbatch.kwargs, microbatch.target)
    return MicroBatch(*pytree.tree_map(move, parts))

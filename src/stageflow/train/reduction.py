"""How the losses of micro-batches make the loss of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from stageflow.errors import InputError
from stageflow.runtime.batch import Batch

Reduction = Literal["mean", "sum"] | Callable[[Any], Any]


def check_reduction(reduction: Reduction) -> None:
    """Raise InputError for what is no reduction."""
    if reduction not in ("mean", "sum") and not callable(reduction):
        raise InputError(
            f"reduction={reduction!r}; expected 'mean', 'sum', or a function that gives a micro-batch's weight, such "
            "as lambda target: (target != -100).sum()"
        )


def loss_weights(reduction: Reduction, batch: Batch) -> tuple[float, ...]:
    """The weight of each micro-batch's loss in the batch's.

    "mean": its share of the samples. "sum": one. A function: its share of what the function gives, called with the
    micro-batch's target, or with the model's keyword arguments where no target was given.
    """
    sizes = batch.layout.sizes
    if reduction == "mean":
        return tuple(size / sum(sizes) for size in sizes)
    if reduction == "sum":
        return (1.0,) * len(sizes)
    assert callable(reduction)
    amounts = []
    for index in range(len(sizes)):
        microbatch = batch.microbatch(index)
        given = reduction(microbatch.kwargs if microbatch.target is None else microbatch.target)
        try:
            amounts.append(float(given))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the reduction gave {given!r} for a micro-batch; expected its weight, a number"
            ) from error
    total = sum(amounts)
    if not 0 < total < math.inf or any(amount < 0 for amount in amounts):
        raise InputError(
            f"the reduction gave the weights {amounts} for the micro-batches; they must be finite and >= 0, not all 0"
        )
    return tuple(amount / total for amount in amounts)

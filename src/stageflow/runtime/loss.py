"""From a stage's output to the one number that is differentiated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stageflow.errors import InputError

LossFunction = Callable[..., Tensor]


def takes_target(loss: LossFunction) -> bool:
    """Whether ``loss(output)`` is not enough: it wants ``loss(output, target)``."""
    try:
        inspect.signature(loss).bind(None)
    except TypeError:
        return True
    except ValueError:  # builtins without a signature
        return True
    return False


def compute_loss(loss: LossFunction | None, output: Any, target: Any) -> Tensor:
    """The loss of one micro-batch, a tensor without dimensions.

    loss: called as ``loss(output, target)``, as ``loss(output)`` where no target was given and it takes none; None:
        the model's own loss (``output.loss``, ``output["loss"]``, a first item or an output without dimensions).
    Raises InputError when that is not one number.
    """
    if loss is None:
        return _scalar(own_loss(output), "the model's own loss")
    value = loss(output) if target is None and not takes_target(loss) else loss(output, target)
    return _scalar(value, f"the loss function {getattr(loss, '__name__', type(loss).__name__)!r}")


def own_loss(output: Any) -> Any:
    """The loss inside a model's output. Raises InputError where there is none."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return output[0]
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    raise InputError(
        f"no loss function was given, and the model's output ({type(output).__name__}{shape}) holds no loss: "
        "pass loss=..., or call train_step with the labels that make the model compute its own"
    )


def _scalar(value: Any, origin: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{origin} gave a {type(value).__name__}; expected a tensor with one number")
    if value.numel() != 1:
        raise InputError(
            f"{origin} gave a tensor of shape {tuple(value.shape)}; expected one number: reduce it (mean or sum) and "
            "tell the pipeline which with reduction="
        )
    if not (torch.is_floating_point(value)):
        raise InputError(f"{origin} gave a tensor of {value.dtype}; expected a floating-point number")
    return value.reshape(())

"""What a model's forward says of its arguments."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def positional_names(model: Any) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward; none where they can't be told."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in _parameters(model) if parameter.kind in kinds)


def has_argument(model: Any, name: str) -> bool:
    """Whether a model's forward declares an argument of that name."""
    return any(parameter.name == name for parameter in _parameters(model))


def _parameters(model: Any) -> list[inspect.Parameter]:
    if not isinstance(model, nn.Module):
        return []
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []

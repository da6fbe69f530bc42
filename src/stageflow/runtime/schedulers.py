"""The state of learning-rate schedulers when parameters move to other groups.

A scheduler keeps some values once per parameter group of its optimizer. Stages group their parameters by what they
happen to hold, so a value is carried by the parameter and put together again for whatever groups there are later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PER_GROUP = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas"})


def narrow(state: Mapping[str, Any], group: int) -> dict[str, Any]:
    """The scheduler's state as it would be if ``group`` were its only one."""
    return {key: _narrow(key, value, group) for key, value in state.items()}


def join(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state for several groups from that of each: the opposite of `narrow`.

    What schedulers keep once (the step they are at) is taken from the first: all have made the same steps.
    """
    return {key: _join([state[key] for state in states], key) for key in states[0]}


def _narrow(key: str, value: Any, group: int) -> Any:
    if key in _PER_GROUP and isinstance(value, list):
        return value[group : group + 1]
    if isinstance(value, Mapping):
        return narrow(value, group)
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return [narrow(item, group) for item in value]  # schedulers that consist of others
    return value


def _join(values: Sequence[Any], key: str) -> Any:
    first = values[0]
    if key in _PER_GROUP and isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, Mapping):
        return join(values)
    if isinstance(first, list) and all(isinstance(item, Mapping) for item in first):
        return [join(items) for items in zip(*values, strict=True)]
    return first

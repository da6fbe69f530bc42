"""Whole numbers among arguments, also those of numpy."""

from __future__ import annotations

import operator
from typing import Any


def as_whole(value: Any, least: int | None = None) -> int | None:
    """A whole number as Python's own; None for anything else, for True and False, and for less than the least."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if least is None or number >= least else None

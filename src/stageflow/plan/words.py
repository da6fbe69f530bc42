"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math
import re

from stageflow.errors import InputError

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def bytes_of(size: str | float, name: str = "memory") -> float:
    """``"40GiB"``, ``"16 GB"`` or a number of bytes. name: of the argument, for the error. Raises InputError."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        try:
            value = float(match[1]) * unit if match and unit else math.nan
        except ValueError:
            value = math.nan
    else:
        value = size if isinstance(size, (int, float)) and not isinstance(size, bool) else math.nan
    if not value > 0:
        raise InputError(f"{name}={size!r} is no size: give bytes as a number > 0, or words such as '40GiB' or '16 GB'")
    return value


def size_words(size: float, plain: bool = False) -> str:
    """Bytes to three digits: ``12.3 MiB``; plain: of what is counted in no bytes."""
    if math.isinf(size):
        return "no limit"
    if plain:
        return _three(size)
    number, names = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while number >= 999.5 and power < len(names) - 1:
        number, power = number / 1024, power + 1
    return f"{_three(number)} {names[power]}"


def time_words(seconds: float, unit: str | None = None) -> str:
    """Seconds to three digits in the unit that suits them: ``12.3 ms``; unit: of times that are no seconds."""
    if unit is not None:
        return f"{_three(seconds)} {unit}".rstrip()
    if not seconds:
        return "0"
    factor, name = next((u for u in _TIMES if seconds >= 0.9995 * u[0]), _TIMES[-1])
    return f"{_three(seconds / factor)} {name}"


def _three(number: float) -> str:
    """Three digits, and none after the point that say nothing."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Rows as aligned lines; the first ``left`` columns are words, the others figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

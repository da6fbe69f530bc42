"""How far measuring and planning are, for somebody who looks on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
    """A bar that leaves nothing behind: tqdm's own, shown or not, starts a thread that stays."""

    monitor_interval = 0


class Progress:
    """A line on standard error that says what goes on; nothing where nobody looks.

    shown: None shows it on a terminal.
    """

    def __init__(self, shown: bool | None) -> None:
        disabled = not (sys.stderr.isatty() if shown is None else shown)
        self._line: Any = Bar(total=0, bar_format="{desc} ({elapsed})", leave=False, disable=disabled)

    def __enter__(self) -> Callable[[str], None]:
        return self._line.set_description_str  # type: ignore[no-any-return]

    def __exit__(self, *_: object) -> None:
        self._line.close()

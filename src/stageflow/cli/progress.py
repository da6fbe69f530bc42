"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

LINES = 10


class Progress:
    """Counts steps on standard error.

    total: how many there will be. shown: False says nothing at all.
    """

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._plain = shown and not sys.stderr.isatty()
        self._bar: Any = tqdm(total=total, unit="step", dynamic_ncols=True) if shown and not self._plain else None

    def step(self, words: str) -> None:
        """One more step is done; words say how it stands."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif self._plain and self._done * LINES // self._total > (self._done - 1) * LINES // self._total:
            seconds = time.monotonic() - self._start
            print(f"step {self._done}/{self._total}, {seconds:.0f} s: {words}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

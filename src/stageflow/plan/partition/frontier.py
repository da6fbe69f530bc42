"""The smallest sum plus weighted maximum, by way of partitions with the smallest sum under a bound on the maximum.

A partition's step is ``sum + (m - 1) · beat``. For a given limit on the beat the smallest sum is a shortest path, which
`solve` finds. Lower limits make for larger sums; the best step lies somewhere between. Limits that can't beat the best
step so far are left out: below a limit for which `solve` gave a sum, no sum is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NOISE = 1e-12  # relative; steps closer than this differ by rounding only


@dataclass(frozen=True)
class Found:
    """A partition with the smallest sum under some limit. path: whatever `solve` needs to tell which one it is."""

    total: float
    beat: float
    path: Sequence[int]

    def step(self, weight: float) -> float:
        return self.total + weight * self.beat


def minimise(
    solve: Callable[[float], Found | None], beats: np.ndarray, weight: float, best: Found, floor: float
) -> Found:
    """The partition with the smallest ``total + weight · beat``.

    solve: the smallest total among partitions whose beat is at most the limit; None if there is none.
    beats: ascending, the values that its beat may have, if it is not ``best``. weight: above zero.
    floor: no total is smaller.
    """
    pending = [(0, len(beats), floor)]  # ranges of beats not yet excluded, and what no total there is smaller than
    while pending:
        low, high, least = pending.pop()
        worth = (best.step(weight) * (1 - NOISE) - least) / weight
        high = min(high, int(np.searchsorted(beats, worth)))
        if low >= high:
            continue
        middle = (low + high) // 2
        found = solve(float(beats[middle]))
        pending.append((middle + 1, high, least))
        if found is not None:  # else nothing fits below, either
            if found.step(weight) < best.step(weight):
                best = found
            below = int(np.searchsorted(beats, found.beat))
            pending.append((low, min(middle, below), found.total))
    return best

"""Cutting a chain of costs into consecutive stages so that the slowest one is as fast as it can be. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm

from stageflow.errors import InputError


def chain_min_max(costs: Sequence[float], stages: int, *, allowed: Collection[int] | None = None) -> list[int]:
    """Cut ``costs`` into ``stages`` non-empty runs with the smallest possible largest sum.

    costs: one per layer, finite and not negative, in any unit.
    allowed: positions at which a cut may be, ``i`` being the one before layer ``i``; None allows all.

    Returns ``stages + 1`` bounds, from 0 to ``len(costs)``: stage s has the layers ``bounds[s]:bounds[s + 1]``.
    The minimum is exact, computed in integers. Of several cuts that reach it the choice is fixed: from the front,
    each stage takes the fewest layers that reach the mean of what is left, so that later stages are the lighter ones.

    Raises InputError when there are fewer pieces than stages; `most_stages` tells how many there may be.
    """
    _check(costs, stages, allowed)
    starts = _piece_starts(len(costs), allowed)
    sums = _prefix_sums(costs)
    prefix = [sums[start] for start in starts] + [sums[-1]]  # over pieces: runs of layers that may not be cut
    cuts = _cut(prefix, stages, _smallest_bottleneck(prefix, stages))
    return [starts[cut] for cut in cuts] + [len(costs)]


def most_stages(n_layers: int, allowed: Collection[int] | None = None) -> int:
    """Into how many non-empty stages ``n_layers`` can be cut."""
    return len(_piece_starts(n_layers, allowed))


def _check(costs: Sequence[float], stages: int, allowed: Collection[int] | None) -> None:
    for layer, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise InputError(f"the cost of layer {layer} is {cost}; costs must be finite and not negative")
    possible = most_stages(len(costs), allowed)
    if not 1 <= stages <= possible:
        where = "" if allowed is None else " that may be cut at the given places"
        raise InputError(f"{len(costs)} layers{where} can't make {stages} stages; choose between 1 and {possible}")


def _piece_starts(n_layers: int, allowed: Collection[int] | None) -> list[int]:
    if n_layers == 0:
        return []
    inner = range(1, n_layers) if allowed is None else sorted(i for i in set(allowed) if 0 < i < n_layers)
    return [0, *inner]


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Exact sums, scaled to integers: rounded sums would make "the smallest" depend on the order of adding."""
    exact = [Fraction(cost) for cost in costs]
    scale = lcm(*(cost.denominator for cost in exact))
    return [0, *accumulate(cost.numerator * (scale // cost.denominator) for cost in exact)]


def _smallest_bottleneck(prefix: list[int], stages: int) -> int:
    """Bisect for the smallest bound under which greedily filled stages suffice."""
    low, high = 0, prefix[-1]
    while low < high:
        bound = (low + high) // 2
        if _fits(prefix, stages, bound):
            high = bound
        else:
            low = bound + 1
    return low


def _fits(prefix: list[int], stages: int, bound: int) -> bool:
    start = 0
    for _ in range(stages):
        start = bisect_right(prefix, prefix[start] + bound) - 1
        if start == len(prefix) - 1:
            return True
    return False


def _cut(prefix: list[int], stages: int, bound: int) -> list[int]:
    n = len(prefix) - 1
    earliest = _earliest_starts(prefix, stages, bound)
    cuts = [0]
    for stage in range(stages - 1):
        start, left = cuts[-1], stages - stage
        lowest = max(start + 1, earliest[left - 1])
        highest = min(bisect_right(prefix, prefix[start] + bound) - 1, n - (left - 1))
        mean = Fraction(prefix[-1] - prefix[start], left)
        cuts.append(min(max(bisect_left(prefix, prefix[start] + mean), lowest), highest))
    return cuts


def _earliest_starts(prefix: list[int], stages: int, bound: int) -> list[int]:
    """Entry k: the first piece from which k stages suffice for all the rest."""
    starts = [len(prefix) - 1]
    for _ in range(stages):
        starts.append(bisect_left(prefix, prefix[starts[-1]] - bound))
    return starts

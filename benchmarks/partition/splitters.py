"""How other programs cut a chain, each written anew from its description; all return the bounds of the stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

PROBE_STEP = 1e-3  # of the binary search, in units of the costs


def equal_counts(costs: Sequence[float], stages: int) -> list[int]:
    """As many blocks for every stage, give or take one."""
    return [len(costs) * stage // stages for stage in range(stages + 1)]


def block_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Stages that differ by at most the largest cost (Bárány and Grinberg 2015, Block partitions of sequences).

    From equal counts on: the smallest stage that is nearest to the largest one takes a block from the neighbour that
    lies between them, until the largest and the smallest differ by no more than the largest block. Named by torchgpipe
    as what it balances with.
    """
    most = max(costs)
    sums = [0.0, *accumulate(cost / most for cost in costs)]
    bounds = equal_counts(costs, stages)
    seen: set[tuple[int, ...]] = set()
    while tuple(bounds) not in seen:
        seen.add(tuple(bounds))
        sizes = [sums[end] - sums[start] for start, end in pairwise(bounds)]
        largest = max(range(stages), key=sizes.__getitem__)
        least = min(sizes)
        if sizes[largest] <= least + 1:
            break
        smallest = min((s for s in range(stages) if sizes[s] == least), key=lambda s: abs(s - largest))
        if largest < smallest:
            bounds[smallest] -= 1
        else:
            bounds[smallest + 1] += 1
    return bounds


def binary_search(costs: Sequence[float], stages: int) -> list[int]:
    """The smallest bound on a stage's cost found by halving, for which filling stages greedily is enough.

    Halving ends at a fixed step, in the units of the costs. Named by DeepSpeed as `partition_balanced`.
    """
    sums = [0.0, *accumulate(costs)]
    low, high = sums[-1] / stages, sums[-1]
    while high > low + PROBE_STEP:
        middle = (low + high) / 2
        if _filled(sums, stages, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle + PROBE_STEP
    return _filled(sums, stages, high)


def _filled(sums: Sequence[float], stages: int, bound: float) -> list[int]:
    bounds = [0]
    for _ in range(stages):
        bounds.append(max(bounds[-1], bisect_right(sums, sums[bounds[-1]] + bound) - 1))
    return bounds


SPLITTERS = {
    "equal counts": equal_counts,
    "block partition (torchgpipe)": block_partition,
    "binary search (DeepSpeed)": binary_search,
}

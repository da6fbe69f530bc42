"""Blocks in a row, cut into runs of consecutive blocks: exact, by dynamic programming over the places of the cuts.

For a limit on the beat, the smallest sum over the first j blocks in s stages follows from that over i < j blocks in
s - 1 stages and the weight of one stage with the blocks between. Only stages short enough for the limit are looked at,
which makes the table a band; a band's rows are done at once by numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stageflow.plan.partition.block import Block, Device, Tie
from stageflow.plan.partition.frontier import Found, minimise
from stageflow.plan.partition.model import InFlight, Load, Recompute, Rules, Weight, block_time, check, weigh
from stageflow.plan.partition.partition import Partition, evaluate
from stageflow.plan.partition.refuse import least_memory, refusal

GROWTH = 1.5  # of the limit, until a first partition is found
HALVINGS = 6  # of the distance from there to a limit that is too low
NARROWING = 5
LOOSELY = 1 + 1e-9  # limits of what is looked at, so that rounding leaves nothing out
KEPT_CELLS = 20_000_000  # weights held in memory at once; beyond that they are worked out again for every limit


def split_chain(
    blocks: Sequence[Block],
    devices: Sequence[Device],
    *,
    microbatches: int,
    in_flight: InFlight = "1f1b",
    put_off: Sequence[float] | None = None,
    recompute: Recompute = "auto",
    ties: Sequence[Tie] = (),
    split: bool = False,
    overlap: bool = False,
) -> Partition:
    """Cut a row of blocks into one stage per device so that a step takes the least.

    devices: in the order of the stages.
    in_flight: per stage, how many micro-batches' activations are kept at once: "1f1b" is the smaller of
        ``microbatches`` and the number of stages from this one on, "gpipe" is all of them.
    put_off: with ``split``, per stage, how many micro-batches wait between their I and their W; None: none.
    recompute: "auto" lets those stages recompute their activations that would not fit otherwise; True makes all of
        them, False none.
    ties: weights that several blocks use.
    split: backwards are I and W, which take what was measured for these, not for B.
    overlap: the schedule goes on computing while transfers are under way; 1F1B does not, see
        `stageflow.plan.partition.model` for the model of a step.

    The result is the exact minimum of that model. Raises InputError for arguments that make no sense, SplitError with
    the numbers where nothing fits into memory.
    """
    check(blocks, devices, ties)
    rules = Rules.of(len(devices), microbatches, in_flight, put_off, recompute, split, overlap)
    chain = _Chain(blocks, devices, ties, rules)
    found = _best(chain, microbatches - 1)
    if found is None:
        cuts = chain.closest_to_fitting()
        may = dataclasses.replace(rules, recompute="auto")
        would = recompute is False and _best(_Chain(blocks, devices, ties, may), microbatches - 1) is not None
        raise refusal(blocks, _runs(cuts), chain.loads_of(cuts), devices, rules, would)
    loads = chain.loads_of(found.path)
    flags = [bool(weigh(load, stage, devices, rules).recompute) for stage, load in enumerate(loads)]
    return evaluate(_runs(found.path), loads, flags, devices, rules)


def _runs(cuts: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise(cuts)]


def _best(chain: _Chain, weight: int) -> Found | None:
    if weight == 0:
        return chain.solve(math.inf)
    first = chain.first()
    if first is None:
        return None
    most = first.step(weight) / weight
    for _ in range(NARROWING):  # no better partition has a higher beat, and those below have no smaller sum
        most = (first.step(weight) - chain.least_total(most)) / weight
    loosest = chain.solve(max(most, first.beat))
    assert loosest is not None
    best = min(loosest, first, key=lambda found: found.step(weight))
    return minimise(chain.solve, chain.beats(loosest.beat), weight, best, loosest.total)


class _Chain:
    """The blocks' sums, and the table for one limit at a time."""

    def __init__(self, blocks: Sequence[Block], devices: Sequence[Device], ties: Sequence[Tie], rules: Rules) -> None:
        self._devices = devices
        self._rules = rules
        self._ties = ties
        self._n = len(blocks)
        self._longest = self._n - len(devices) + 1  # no stage has more blocks, as none is empty
        self._fastest = max(device.speed for device in devices)
        self._largest = max(device.memory for device in devices)
        self._time = _sums(block_time(block, rules) for block in blocks)
        self._again = _sums(block.again for block in blocks)
        self._static = _sums(block.static for block in blocks)
        self._activation = _sums(block.activation for block in blocks)
        self._deferred = _sums(block.deferred for block in blocks)
        self._lightest = self._static + self._activation  # no stage with these blocks takes less memory
        self._entry = np.array([block.entry for block in blocks])
        self._exit = np.array([block.exit for block in blocks])
        self._boundary = np.array([block.boundary for block in blocks])
        self._received = np.array([0.0, *(block.output for block in blocks[:-1])])
        slowest = min(device.speed for device in devices)
        links = [device.latency + float(self._received.max()) / device.bandwidth for device in devices]
        self._highest = float(self._time[-1] + self._again[-1]) / slowest + 2 * max(links)  # no beat is higher
        self._width = 0
        self._kinds = [self._kind(stage) for stage in range(len(devices))]
        self._weights: dict[tuple[object, ...], Weight] = {}

    def least_total(self, limit: float) -> float:
        """No sum under this limit is smaller: the fastest devices filled up to it."""
        left, total = float(self._time[-1]), 0.0
        for speed in sorted((device.speed for device in self._devices), reverse=True):
            part = min(left, limit * speed)
            total += part / speed
            left -= part
        return total

    def first(self) -> Found | None:
        """Some partition with a beat near the lowest."""
        shares = sum(device.speed for device in self._devices)
        limit = max(float(np.diff(self._time).max()) / self._fastest, float(self._time[-1]) / shares)
        self._widen(self._reach(GROWTH * limit))  # weights are worked out anew for every wider band
        failed, found = 0.0, self.solve(limit)
        while found is None and limit < math.inf:
            failed, limit = limit, limit * GROWTH if 0.0 < limit < self._highest else math.inf
            found = self.solve(limit)
        if found is None:
            return None
        for _ in range(HALVINGS):
            middle = (failed + found.beat) / 2
            closer = self.solve(middle)
            failed, found = (middle, found) if closer is None else (failed, closer)
        return found

    def beats(self, most: float) -> np.ndarray:
        """Ascending, all beats that stages can have, below ``most``."""
        self._widen(self._reach(most))
        first = {kind: stage for stage, kind in enumerate(self._kinds)}
        beats = (self._weight(stage).beat for stage in first.values())
        return np.unique(np.concatenate([beat[beat < most] for beat in beats]))

    def solve(self, limit: float) -> Found | None:
        """The smallest sum of partitions whose beat is at most ``limit``."""
        width = self._reach(limit)
        self._widen(width)
        least = np.full(self._n + 1 + width, math.inf)  # entry width + j: over the first j blocks
        least[width] = 0.0
        before = sliding_window_view(least, width)
        origins = np.zeros((len(self._devices), self._n + 1), int)
        for stage, ends in enumerate(self._ends(limit)):
            weight = self._weight(stage)
            rows = slice(ends.start - 1, ends.stop - 1)
            cost, beat = weight.cost[rows, -width:], weight.beat[rows, -width:]
            sums = before[ends.start : ends.stop] + cost
            sums[beat > limit] = math.inf
            choice = sums.argmin(axis=1)
            origins[stage, ends.start : ends.stop] = np.arange(ends.start, ends.stop) - width + choice
            least[width:] = math.inf
            least[width + ends.start : width + ends.stop] = sums[np.arange(len(ends)), choice]
        total = float(least[-1])
        if math.isinf(total):
            return None
        cuts = _trace_back(origins, self._n)
        beats = (
            float(self._weight(stage).beat[end - 1, self._width - (end - start)])
            for stage, (start, end) in enumerate(pairwise(cuts))
        )
        return Found(total, max(beats), cuts)

    def closest_to_fitting(self) -> list[int]:
        """The cuts for which the largest need for memory, over what the device has, is the smallest."""
        load = self._load(np.arange(1, self._n + 1)[:, None], self._longest)
        width, rows = self._longest, np.arange(self._n)
        least = np.full(self._n + 1 + width, math.inf)
        least[width] = 0.0
        origins = np.zeros((len(self._devices), self._n + 1), int)
        for stage, device in enumerate(self._devices):
            share = least_memory(load, stage, self._rules) / device.memory
            worst = np.maximum(sliding_window_view(least, width)[1 : self._n + 1], share)
            worst[np.isnan(load.time)] = math.inf
            choice = worst.argmin(axis=1)
            origins[stage, 1:] = rows + 1 - width + choice
            least[width:] = [math.inf, *worst[rows, choice]]
        return _trace_back(origins, self._n)

    def loads_of(self, cuts: Sequence[int]) -> list[Load]:
        """What each stage of a cut bears."""
        return [self._bear(start, end) for start, end in pairwise(cuts)]

    def _reach(self, limit: float) -> int:
        """The most blocks that a stage within the limit, and within some device's memory, can have."""
        in_time = np.searchsorted(self._time, self._time - limit * self._fastest * LOOSELY)
        in_memory = np.searchsorted(self._lightest, self._lightest - self._largest * LOOSELY)
        most = int((np.arange(self._n + 1) - np.maximum(in_time, in_memory)).max())
        return min(self._longest, max(1, most))

    def _ends(self, limit: float) -> Iterator[range]:
        """For each stage where it can end: the stages up to it can do what is before, the later ones what is after."""
        stages = len(self._devices)
        able = np.cumsum([device.speed for device in self._devices]) * limit * LOOSELY
        left = able[-1] - able if limit < math.inf else able
        firsts = np.searchsorted(self._time, self._time[-1] - left).tolist()
        lasts = (np.searchsorted(self._time, able, side="right") - 1).tolist()
        for stage, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            yield range(max(stage + 1, first), max(0, min(self._n - (stages - 1 - stage), last)) + 1)

    def _widen(self, width: int) -> None:
        if width > self._width:
            self._width = width
            self._weights.clear()
            self._band = self._load(np.arange(1, self._n + 1)[:, None], width)

    def _weight(self, stage: int) -> Weight:
        kind = self._kinds[stage]
        weight = self._weights.get(kind)
        if weight is None:
            weight = weigh(self._band, stage, self._devices, self._rules)
            cost, beat = (np.where(np.isnan(part), math.inf, part) for part in (weight.cost, weight.beat))
            weight = Weight(cost, beat, weight.recompute)
            if (len(self._weights) + 1) * weight.cost.size <= KEPT_CELLS:
                self._weights[kind] = weight
        return weight

    def _kind(self, stage: int) -> tuple[object, ...]:
        """Stages that agree in these have the same weights."""
        device, link = self._devices[stage], self._devices[stage - 1] if stage else None
        counts = (self._rules.kept[stage], self._rules.put_off[stage]) if math.isfinite(device.memory) else ()
        return device.speed, device.memory, link and (link.latency, link.bandwidth), counts

    def _load(self, ends: np.ndarray, width: int) -> Load:
        """Of the stages with 1 to ``width`` blocks up to each end: row = end - 1, last column = one block.

        Where a stage would begin before the first block its time is NaN.
        """
        starts = ends - np.arange(width, 0, -1)
        load = self._bear(np.maximum(starts, 0), ends)
        load.time = np.where(starts < 0, math.nan, load.time)
        return load

    def _bear(self, starts: np.ndarray | int, ends: np.ndarray | int) -> Load:
        """Sums over the blocks from each start to before each end."""

        def over(sums: np.ndarray) -> np.ndarray:
            return sums[ends] - sums[starts]

        kept = over(self._activation) + self._entry[starts] + self._exit[np.subtract(ends, 1)]
        return Load(
            time=over(self._time),
            again=over(self._again),
            static=over(self._static),
            activation=kept,
            deferred=over(self._deferred),
            boundary=self._boundary[starts] + np.zeros_like(kept),
            received=self._received[starts] + np.zeros_like(kept),
            tied=self._tied(starts, ends) + np.zeros_like(kept),
        )

    def _tied(self, starts: np.ndarray | int, ends: np.ndarray | int) -> np.ndarray:
        """Bytes of the copies of weights whose first user is in an earlier stage."""
        total = np.zeros(np.broadcast_shapes(np.shape(starts), np.shape(ends)))
        for tie in self._ties:
            users = np.array([*tie.blocks, self._n])
            following = users[np.searchsorted(users, np.minimum(starts, self._n))]
            total = total + np.where((following < ends) & (tie.blocks[0] < starts), tie.bytes, 0.0)
        return total


def _trace_back(origins: np.ndarray, n: int) -> list[int]:
    """The cuts. origins: by stage and where it ends, where it starts."""
    cuts = [n]
    for origin in origins[::-1]:
        cuts.append(int(origin[cuts[-1]]))
    return cuts[::-1]


def _sums(values: Iterable[float]) -> np.ndarray:
    """Running sums, from 0."""
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, float))])

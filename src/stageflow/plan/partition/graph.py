"""Blocks in a DAG, cut into stages whose values only flow forward.

The first s stages together hold an ideal: a set of blocks with all that these need. A partition is a chain of ideals
from nothing to everything, so the best one is a path over pairs of ideals, found as `chain` finds its own over pairs of
places. A DAG of width w has at most (n / w + 1)^w ideals. With more of them than can be looked at, only those are taken
that some orders of the blocks run through, and the result comes with a bound and its gap.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from stageflow.errors import InputError
from stageflow.plan.partition.block import Block, Device, Tie
from stageflow.plan.partition.frontier import Found, minimise
from stageflow.plan.partition.model import InFlight, Load, Recompute, Rules, Weight, block_time, check, weigh
from stageflow.plan.partition.partition import Partition, evaluate
from stageflow.plan.partition.refuse import least_memory, refusal

Edge = tuple[int, int]
CHUNK = 50_000  # pairs of ideals that are looked at in one go
ORDERS = 12  # of the blocks, at most, where there are too many ideals


def split_graph(
    blocks: Sequence[Block],
    edges: Collection[Edge],
    devices: Sequence[Device],
    *,
    microbatches: int,
    in_flight: InFlight = "1f1b",
    put_off: Sequence[float] | None = None,
    recompute: Recompute = "auto",
    ties: Sequence[Tie] = (),
    split: bool = False,
    overlap: bool = False,
    ideals: int = 1000,
) -> Partition:
    """Cut a DAG of blocks into one stage per device so that a step takes the least.

    edges: (producer, consumer), numbers of blocks, the producer's being the lower one. A block's ``output`` is what it
        hands to each consumer; once to each stage that has any. What a stage receives counts as its boundary.
    ideals: how many to look at; if the DAG has no more, the result is the exact minimum, else it has a ``gap``.

    Everything else is as for `split_chain`, and a chain gives the same. Raises InputError and SplitError as that does.
    """
    check(blocks, devices, ties)
    for edge in edges:
        if not 0 <= edge[0] < edge[1] < len(blocks):
            raise InputError(f"edge {edge} does not go up within blocks 0 to {len(blocks) - 1}")
    rules = Rules.of(len(devices), microbatches, in_flight, put_off, recompute, split, overlap)
    graph = _Graph(blocks, edges, ties, rules)
    family, whole = graph.ideals(ideals)
    table = _Table(graph, family, devices, rules)
    found = table.best(microbatches - 1)
    if found is None:
        path = table.closest_to_fitting()
        stages, loads = _stages(graph, [family[i] for i in path])
        raise refusal(blocks, stages, loads, devices, rules, recomputing_fits=False)
    stages, loads = _stages(graph, [family[i] for i in found.path])
    flags = [bool(weigh(load, stage, devices, rules).recompute) for stage, load in enumerate(loads)]
    bound = None if whole else _bound(blocks, devices, rules)
    return evaluate(stages, loads, flags, devices, rules, bound)


def _bound(blocks: Sequence[Block], devices: Sequence[Device], rules: Rules) -> float:
    """No partition takes less: all blocks on the fastest device for the sum, spread evenly for the beat."""
    times = [block_time(block, rules) for block in blocks]
    fastest = max(device.speed for device in devices)
    beat = max(sum(times) / sum(device.speed for device in devices), max(times) / fastest)
    return sum(times) / fastest + (rules.microbatches - 1) * beat


def _stages(graph: _Graph, chain: Sequence[int]) -> tuple[list[list[int]], list[Load]]:
    """Blocks and load of each stage. chain: of ideals, as bit sets."""
    pairs = list(pairwise(chain))
    return [_members(after & ~before) for before, after in pairs], [
        graph.load(before, after) for before, after in pairs
    ]


def _members(blocks: int) -> list[int]:
    return [number for number in range(blocks.bit_length()) if blocks >> number & 1]


class _Graph:
    """The blocks and who needs whom, as bit sets."""

    def __init__(self, blocks: Sequence[Block], edges: Collection[Edge], ties: Sequence[Tie], rules: Rules) -> None:
        self.blocks = blocks
        self.ties = ties
        self.rules = rules
        self.n = len(blocks)
        self.needs = [sum(1 << p for p in {p for p, c in edges if c == block}) for block in range(self.n)]
        self.users = [sum(1 << c for c in {c for p, c in edges if p == block}) for block in range(self.n)]

    def ideals(self, most: int) -> tuple[list[int], bool]:
        """Ideals, smaller ones first, and whether these are all there are."""
        found = {0}
        layer = [0]
        for _ in range(self.n):
            layer = list({ideal | 1 << block for ideal in layer for block in self.ready(ideal)})
            found.update(layer)
            if len(found) > most:
                return sorted(self._some_ideals(most), key=lambda ideal: (ideal.bit_count(), ideal)), False
        return sorted(found, key=lambda ideal: (ideal.bit_count(), ideal)), True

    def ready(self, ideal: int) -> Iterator[int]:
        """Blocks whose needs are met by an ideal that is without them."""
        for block in range(self.n):
            if not ideal >> block & 1 and self.needs[block] & ~ideal == 0:
                yield block

    def _some_ideals(self, most: int) -> set[int]:
        """Those that a few orders run through: as numbered, depth first from either side, and at random."""
        rng = random.Random(0)
        picks = [min, max, *([rng.choice] * (ORDERS - 2))]
        found: set[int] = set()
        for pick in picks:
            if found and len(found) + self.n > most:
                break
            ideal = 0
            found.add(ideal)
            while ideal.bit_count() < self.n:
                ideal |= 1 << pick(list(self.ready(ideal)))
                found.add(ideal)
        return found

    def load(self, before: int, after: int) -> Load:
        """Of the stage with the blocks that ``after`` has and ``before`` has not."""
        inside = after & ~before
        members = [(number, self.blocks[number]) for number in _members(inside)]
        received = sum(self.blocks[p].output for p in _members(before) if self.users[p] & inside)
        sources = [block for number, block in members if not self.needs[number]]
        begin = [block for number, block in members if not self.needs[number] or self.needs[number] & before]
        end = [block for number, block in members if not self.users[number] or self.users[number] & ~after]
        copies = [
            tie for tie in self.ties if before >> tie.blocks[0] & 1 and any(inside >> block & 1 for block in tie.blocks)
        ]
        activation = sum(block.activation for _, block in members)
        return Load(
            time=sum(block_time(block, self.rules) for _, block in members),
            again=sum(block.again for _, block in members),
            static=sum(block.static for _, block in members),
            activation=activation + sum(block.entry for block in begin) + sum(block.exit for block in end),
            deferred=sum(block.deferred for _, block in members),
            boundary=received + sum(block.boundary for block in sources),
            received=received,
            tied=sum(tie.bytes for tie in copies),
        )

    def loads(self, has: np.ndarray, small: np.ndarray, large: np.ndarray) -> Load:
        """`load` of many stages at once. has: ideals x blocks. small, large: per stage, the ideals before and after."""
        blocks = self.blocks
        uses = np.array([[self.users[p] >> c & 1 for c in range(self.n)] for p in range(self.n)], np.int32)
        used, needed = has @ uses.T, has @ uses  # how many of a block's users, and needs, an ideal has
        needs, users = uses.sum(axis=0), uses.sum(axis=1)
        after, before = has[large] > 0, has[small] > 0
        inside = after & ~before
        crosses = before & (used[large] > used[small])
        begins = inside & ((needs == 0) | (needed[small] > 0))
        ends = inside & ((users == 0) | (used[large] < users))

        def over(mask: np.ndarray, values: Iterable[float]) -> np.ndarray:
            return mask @ np.fromiter(values, float, self.n)

        received = over(crosses, (block.output for block in blocks))
        kept = over(inside, (block.activation for block in blocks)) + over(begins, (block.entry for block in blocks))
        tied = np.zeros(len(small))
        for tie in self.ties:
            tied += tie.bytes * (before[:, tie.blocks[0]] & inside[:, list(tie.blocks)].any(axis=1))
        return Load(
            time=over(inside, (block_time(block, self.rules) for block in blocks)),
            again=over(inside, (block.again for block in blocks)),
            static=over(inside, (block.static for block in blocks)),
            activation=kept + over(ends, (block.exit for block in blocks)),
            deferred=over(inside, (block.deferred for block in blocks)),
            boundary=received + over(inside & (needs == 0), (block.boundary for block in blocks)),
            received=received,
            tied=tied,
        )


class _Table:
    """All pairs of nested ideals, sorted by the larger one, and what a stage between them would bear."""

    def __init__(self, graph: _Graph, family: list[int], devices: Sequence[Device], rules: Rules) -> None:
        self._devices = devices
        self._rules = rules
        self._size = len(family)
        has = np.array([[ideal >> block & 1 for block in range(graph.n)] for ideal in family], np.int32)
        common = has @ has.T
        self._large, self._small = np.nonzero(np.tril(common == has.sum(axis=1)[None, :], -1))
        parts = [
            graph.loads(has, self._small[start : start + CHUNK], self._large[start : start + CHUNK])
            for start in range(0, len(self._small), CHUNK)
        ]
        names = [field.name for field in dataclasses.fields(Load)]
        self._load = Load(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
        self._first = np.searchsorted(self._large, np.arange(1, self._size))  # of the pairs of each larger ideal
        self._weights: list[Weight] = [weigh(self._load, s, devices, rules) for s in range(len(devices))]

    def best(self, weight: int) -> Found | None:
        """The partition with the smallest ``total + weight · beat``."""
        loosest = self._solve(math.inf)
        if loosest is None or weight == 0:
            return loosest
        beats = np.unique(np.concatenate([each.beat for each in self._weights]))
        return minimise(self._solve, beats[beats < loosest.beat], weight, loosest, loosest.total)

    def _solve(self, limit: float) -> Found | None:
        costs = [np.where(each.beat <= limit, each.cost, math.inf) for each in self._weights]
        total, pairs = self._path(costs, np.add)
        if math.isinf(total):
            return None
        beat = max(float(each.beat[pair]) for each, pair in zip(self._weights, pairs, strict=True))
        return Found(total, beat, self._chain(pairs))

    def closest_to_fitting(self) -> list[int]:
        """The chain of ideals for which the largest need for memory, over what the device has, is the smallest."""
        shares = [
            least_memory(self._load, stage, self._rules) / device.memory for stage, device in enumerate(self._devices)
        ]
        return self._chain(self._path(shares, np.maximum)[1])

    def _chain(self, pairs: Sequence[int]) -> list[int]:
        return [0, *(int(self._large[pair]) for pair in pairs)]

    def _path(self, costs: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, list[int]]:
        """The path from nothing to everything with the smallest joint cost, as one pair per stage."""
        least = np.full(self._size, math.inf)
        least[0] = 0.0
        history = []
        for cost in costs:
            joint = join(least[self._small], cost)
            history.append(joint)
            least = np.concatenate([[math.inf], np.minimum.reduceat(joint, self._first)])
        place, pairs = self._size - 1, []
        ends = [*self._first[1:], len(self._large)]
        for joint in reversed(history):
            start, end = self._first[place - 1], ends[place - 1]
            pair = int(start + joint[start:end].argmin())
            pairs.append(pair)
            place = int(self._small[pair])
        return float(least[-1]), pairs[::-1]

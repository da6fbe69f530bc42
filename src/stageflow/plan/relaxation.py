"""What bounds count with: the problem with a backward in two parts, and what comes before and after every action.

Proofs are in docs/bounds.md.

    head   seconds that must pass before an action can start
    tail   seconds that must pass after its end
"""

from __future__ import annotations

import math

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action
from stageflow.schedule.costs import Costs, at_stage
from stageflow.schedule.memory import Footprint
from stageflow.schedule.rules import depends_on, in_one_piece

NEVER = float("-inf")  # the head of what nothing here comes before


class Relaxation:
    """The problem with a backward in two parts, gradient and rest, of the least time that either way takes.

    Letters: F of stage s is 2s, its gradient (B, or I) is 2s + 1. The rest, what a whole backward or a W adds, is kept
    by stage.
    """

    def __init__(
        self,
        graph: StageGraph,
        placement: tuple[int, ...],
        microbatches: int,
        costs: Costs,
        footprint: Footprint,
        room: tuple[float, ...],
        split: bool,
    ) -> None:
        self.placement, self.microbatches, self.room, self.footprint = placement, microbatches, room, footprint
        self.costs, self.split = costs, split
        self.stages = range(graph.n_stages)
        self.workers = range(max(placement) + 1)
        self.local = [[s for s in self.stages if placement[s] == w] for w in self.workers]
        self.seconds: list[float] = []
        self.rest: list[float] = []
        for s in self.stages:
            forward, whole, inputs, weights = (costs.of(Action(kind, s, 0)) for kind in ("F", "B", "I", "W"))
            gradient = min(whole, inputs) if split else whole
            self.seconds += [forward, gradient]
            self.rest.append(min(whole, inputs + weights) - gradient if split else 0.0)
        self.reduction = [at_stage(costs.reduction, s) for s in self.stages]
        self.order = [2 * s for s in self.stages] + [2 * s + 1 for s in reversed(self.stages)]
        self.before: list[list[tuple[int, float]]] = [[] for _ in self.order]
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.order]
        for letter in self.order:
            stage, is_gradient = divmod(letter, 2)
            for need in depends_on(Action("B" if is_gradient else "F", stage, 0), graph, in_one_piece):
                source = 2 * need.stage + (need.kind != "F")
                delay = self._delay(need.stage, stage)
                self.before[letter].append((source, delay))
                self.after[source].append((letter, delay))
        self.ancestors = self._closure(self.order, self.before)
        descendants = self._closure(self.order[::-1], self.after)
        self.needed = [self._work_of(self.ancestors[a], self.worker(a)) for a in range(len(self.order))]
        self.following = [
            self._work_of(descendants[a], self.worker(a))
            + sum(self.rest[other // 2] for other in self._here({a} | descendants[a], self.worker(a)) if other % 2)
            for a in range(len(self.order))
        ]
        self._add_memory()

    def _delay(self, source: int, target: int) -> float:
        if self.placement[source] == self.placement[target]:
            return 0.0
        return self.costs.transfer_between(source, target) + self.costs.hop_between(source, target)

    def _closure(self, order: list[int], arcs: list[list[tuple[int, float]]]) -> list[set[int]]:
        reached: list[set[int]] = [set() for _ in order]
        for letter in order:
            for other, _ in arcs[letter]:
                reached[letter] |= {other} | reached[other]
        return reached

    def worker(self, letter: int) -> int:
        return self.placement[letter // 2]

    def _here(self, letters: set[int], worker: int) -> list[int]:
        return [letter for letter in sorted(letters) if self.worker(letter) == worker]

    def _work_of(self, letters: set[int], worker: int) -> float:
        """Seconds of those letters that are the worker's."""
        return sum(self.seconds[letter] for letter in self._here(letters, worker))

    def kept(self, stage: int) -> tuple[float, float]:
        """Bytes of an activation, and of what waits for a W."""
        activation = at_stage(self.footprint.activation, stage)
        deferred = self.footprint.deferred
        return activation, activation if deferred is None else at_stage(deferred, stage)

    def _add_memory(self) -> None:
        """For every stage, whose gradient and whose end of the rest its F needs, how many micro-batches before.

        When the F of micro-batch k starts, each stage on the worker that comes before it, and it itself, keeps k, and
        a stage keeps at least as many as one that comes after it.
        """
        self.after_gradient: list[list[tuple[int, int]]] = []
        self.after_rest: list[list[tuple[int, int]]] = []
        for stage in self.stages:
            room = self.room[self.placement[stage]] * (1 + 1e-9)
            line = [s for s in self.local[self.placement[stage]] if s == stage or 2 * s in self.ancestors[2 * stage]]
            one_of_each = sum(self.kept(s)[0] for s in line)
            gradients: list[tuple[int, int]] = []
            rests: list[tuple[int, int]] = []
            for s in line:
                earlier = [t for t in line if t == s or 2 * t in self.ancestors[2 * s]]
                each = sum(self.kept(t)[0] for t in earlier)
                gradients += [(s, number) for number in _count(room - one_of_each + each, each)]
                activation, deferred = self.kept(s)
                least = min(activation, deferred) if self.split else activation
                rests += [(s, number + 1) for number in _count(room - one_of_each, least)]
            self.after_gradient.append(gradients)
            self.after_rest.append(rests)
        self.gradient_before = _turned(self.after_gradient)
        self.rest_before = _turned(self.after_rest)

    def load(self, worker: int) -> float:
        """Seconds of work."""
        each = [self.seconds[2 * s] + self.seconds[2 * s + 1] + self.rest[s] for s in self.local[worker]]
        return self.microbatches * sum(each)

    def heads(self, alone: int | None) -> list[list[float]]:
        """Per letter and micro-batch. alone: None, or the worker whose first start is zero; then NEVER elsewhere means
        that nothing of that worker must come before."""
        found: list[list[float]] = [[] for _ in self.order]
        first = [math.inf] * len(self.workers)
        for k in range(self.microbatches):
            for letter in self.order:
                worker = self.worker(letter)
                ways = [found[source][k] + self.seconds[source] + delay for source, delay in self.before[letter]]
                if alone is None or alone == worker:
                    ways.append(0.0)
                if k:
                    ways.append(found[letter][k - 1] + self.seconds[letter])
                if first[worker] < math.inf and (alone is None or alone == worker):
                    ways.append(first[worker] + self._load_before(letter, k))
                if letter % 2 == 0:
                    ways += self._memory_heads(letter // 2, k, found)
                head = max(ways, default=NEVER)
                found[letter].append(head)
                if not k and letter % 2 == 0:
                    first[worker] = min(first[worker], head)
        return found

    def _memory_heads(self, stage: int, k: int, found: list[list[float]]) -> list[float]:
        """An F needs the room of a micro-batch before it."""
        ways: list[float] = []
        for s, number in self.after_gradient[stage]:
            if k >= number:
                ways.append(found[2 * s + 1][k - number] + self.seconds[2 * s + 1])
        for s, number in self.after_rest[stage]:
            if k >= number:
                ways.append(found[2 * s + 1][k - number] + self.seconds[2 * s + 1] + self.rest[s])
        return ways

    def _load_before(self, letter: int, k: int) -> float:
        """Work that its worker must have done before its k-th time."""
        return (k + 1) * self.needed[letter] + k * self.seconds[letter]

    def tails(self, alone: int | None) -> tuple[list[list[float]], list[list[float]]]:
        """Per letter and micro-batch, and of the rest per stage and micro-batch."""
        m = self.microbatches
        found = [[NEVER] * m for _ in self.order]
        rests = [[NEVER] * m for _ in self.stages]
        last = [math.inf] * len(self.workers)
        for k in reversed(range(m)):
            for letter in reversed(self.order):
                stage, is_gradient = divmod(letter, 2)
                worker = self.placement[stage]
                counted = alone is None or alone == worker
                if is_gradient:
                    rests[stage][k] = self._rest_tail(stage, k, found, rests, counted)
                ways = [found[target][k] + self.seconds[target] + delay for target, delay in self.after[letter]]
                if is_gradient:
                    ways.append(rests[stage][k] + self.rest[stage])
                    ways += self._memory_tails(self.gradient_before[stage], k, found)
                if k + 1 < m:
                    ways.append(found[letter][k + 1] + self.seconds[letter])
                if counted and k + 1 < m:
                    ways.append(last[worker] + self._load_after(letter, k))
                found[letter][k] = max(ways, default=NEVER)
                if is_gradient and k + 1 == m:
                    ends = rests[stage][k] if self.rest[stage] else found[letter][k]
                    last[worker] = min(last[worker], ends)
        return found, rests

    def _rest_tail(
        self, stage: int, k: int, found: list[list[float]], rests: list[list[float]], counted: bool
    ) -> float:
        m = self.microbatches
        ways = [self.reduction[stage] if counted else NEVER]
        if k + 1 < m:
            ways.append(rests[stage][k + 1] + self.rest[stage])
        ways += self._memory_tails(self.rest_before[stage], k, found)
        return max(ways)

    def _memory_tails(self, waiting: list[tuple[int, int]], k: int, found: list[list[float]]) -> list[float]:
        """The F that wait for the room of micro-batch k: stages, and how many micro-batches later."""
        return [
            found[2 * s][k + number] + self.seconds[2 * s] for s, number in waiting if k + number < self.microbatches
        ]

    def _load_after(self, letter: int, k: int) -> float:
        """Work that its worker must still do after its k-th time."""
        return (self.microbatches - k) * self.following[letter] + (self.microbatches - 1 - k) * self.seconds[letter]


def _count(room: float, each: float) -> list[int]:
    """How many fit; nothing where any number does."""
    return [] if not each or room == math.inf else [math.floor(room / each)]


def _turned(lists: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Who is in whose list."""
    return [[(b, n) for b, line in enumerate(lists) for s, n in line if s == a] for a in range(len(lists))]

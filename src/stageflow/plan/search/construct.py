"""List scheduling: words from a rule of what a worker does next, within its memory.

Each worker, whenever it is free, takes the best of what could start. What is best is a rule with a few numbers, and
trying many of them gives words that differ in the large, where a local search differs in the small.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageflow.plan.search.decode import NEVER, ROUNDING
from stageflow.plan.search.problem import NO_LINK, B, F, I, Problem, W, Word


@dataclass(frozen=True)
class Rule:
    """What a worker prefers.

    ahead: by worker, how many bytes of activations it may keep before gradients come first; below that, forwards do.
    group: forwards go through all local stages in groups of so many micro-batches; deep: within a group the stage
        nearest to the output first rather than the earliest.
    split: I and W rather than B.
    reach: how much of its time a W may stick out of the gap into which it is put.
    """

    ahead: tuple[float, ...]
    group: int
    deep: bool
    split: bool
    reach: float


def construct(problem: Problem, rule: Rule) -> list[Word] | None:
    """Words, W included, that follow the rule and fit into memory.

    A worker always leaves room for one activation of each of its stages that holds none, so of the oldest unfinished
    micro-batch something can always start. None only where an I leaves more for its W than there is room for.
    """
    return _ListScheduler(problem, rule).run()


class _ListScheduler:
    def __init__(self, problem: Problem, rule: Rule) -> None:
        self._problem, self._rule = problem, rule
        workers = range(problem.n_workers)
        stages = [[s for s, w in enumerate(problem.placement) if w == worker] for worker in workers]
        backward = I if rule.split else B
        self._forwards = [[4 * s + F for s in local] for local in stages]
        self._backwards = [[4 * s + backward for s in local] for local in stages]
        self._counts = [0] * (3 * problem.graph.n_stages)
        self._arrived: list[list[float]] = [[] for _ in range(problem.n_channels)]
        self._links = [0.0] * len(stages) ** 2
        self._free = [0.0] * len(stages)
        self._kept = [0.0] * len(stages)
        self._held = [[0] * len(local) for local in stages]
        self._owed: list[Word] = [[] for _ in workers]
        self._words: list[Word] = [[] for _ in workers]

    def run(self) -> list[Word] | None:
        problem = self._problem
        left = len(problem.placement) * problem.microbatches * (3 if self._rule.split else 2)
        choices = [self._choose(worker) for worker in range(problem.n_workers)]
        while left:
            worker = min(range(len(choices)), key=lambda w: choices[w][0])
            start, letter = choices[worker]
            if start == NEVER:
                return None
            reached = self._take(worker, start, letter)
            left -= 1
            for other in (worker, *reached):
                choices[other] = self._choose(other)
        return self._words

    def _choose(self, worker: int) -> tuple[float, int]:
        """When the worker could start its next letter, and which; (NEVER, -1) while it has to wait for another."""
        now, rule, keeps = self._free[worker], self._rule, self._problem.keeps
        best, best_key = (NEVER, -1), (NEVER,)
        blocked = NEVER  # when the first forward could start for which there is no room
        room = self._room(worker)
        eager = self._kept[worker] < rule.ahead[worker]
        for place, letter in enumerate(self._forwards[worker]):
            start = max(self._ready(letter), now)
            if keeps[letter] > room[place]:
                blocked = min(blocked, start)
            elif start < NEVER:
                key = (start, not eager, *self._turn(letter))
                if key < best_key:
                    best, best_key = (start, letter), key
        for letter in self._backwards[worker]:
            start = max(self._ready(letter), now)
            if keeps[letter] > 0 and self._kept[worker] + keeps[letter] > self._problem.room[worker]:
                blocked = min(blocked, start)
            elif start < NEVER:
                key = (start, eager, *self._turn(letter))
                if key < best_key:
                    best, best_key = (start, letter), key
        if self._owed[worker]:
            weights = self._owed[worker][0]
            seconds = self._problem.seconds[weights]
            if now + seconds <= best[0] + rule.reach * seconds or blocked < best[0]:
                return now, weights
        return best

    def _turn(self, letter: int) -> tuple[int, int]:
        """Groups of micro-batches in turn; within one, forwards as the rule says and gradients from the output on."""
        group = self._counts[self._problem.stream[letter]] // self._rule.group
        stage, kind = divmod(letter, 4)
        return group, stage if kind == F and not self._rule.deep else -stage

    def _room(self, worker: int) -> list[float]:
        """By local stage, how many bytes its next forward may keep."""
        keeps, forwards = self._problem.keeps, self._forwards[worker]
        reserved = [0.0 if held else keeps[letter] for held, letter in zip(self._held[worker], forwards, strict=True)]
        room = self._problem.room[worker] - self._kept[worker] - sum(reserved)
        return [(room + mine) * (1 + ROUNDING) + ROUNDING for mine in reserved]

    def _ready(self, letter: int) -> float:
        """When all the letter needs is here; NEVER while that is not known, or when it has all been done."""
        problem = self._problem
        count = self._counts[problem.stream[letter]]
        if count >= problem.microbatches or any(self._counts[need] <= count for need in problem.local[letter]):
            return NEVER
        ready = 0.0
        for channel in problem.arrivals[letter]:
            values = self._arrived[channel]
            if count >= len(values):
                return NEVER
            ready = max(ready, values[count])
        return ready

    def _take(self, worker: int, start: float, letter: int) -> set[int]:
        """Do it; the workers that get something from it."""
        problem = self._problem
        self._counts[problem.stream[letter]] += 1
        self._words[worker].append(letter)
        self._free[worker] = end = start + problem.seconds[letter]
        self._kept[worker] += problem.keeps[letter]
        stage, kind = divmod(letter, 4)
        place = self._forwards[worker].index(4 * stage + F)
        if kind == F:
            self._held[worker][place] += 1
        elif kind in (B, W):
            self._held[worker][place] -= 1
        if kind == I:
            self._owed[worker].append(letter + W - I)
        elif kind == W:
            self._owed[worker].remove(letter)
        reached: set[int] = set()
        for output in problem.outputs[letter]:
            sent = end
            if output.link != NO_LINK:
                self._links[output.link] = sent = max(end, self._links[output.link]) + output.transfer
            self._arrived[output.channel].append(sent + output.hop)
            reached.add(problem.receivers[output.channel])
        return reached

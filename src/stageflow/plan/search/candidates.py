"""Steps that a search has found, and what can be done to one: the work on one placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal

from stageflow.plan.bounds import lower_bound
from stageflow.plan.search.anneal import Annealer, Heat, short
from stageflow.plan.search.decode import Decoder, Step
from stageflow.plan.search.explore import explore, plainest
from stageflow.plan.search.named import named_schedules
from stageflow.plan.search.problem import B, I, Problem, W, Word
from stageflow.schedule.schedule import Schedule

Split = bool | Literal["auto"]

SAME = 1e-9  # relative: seconds that differ by less are equal
REACH = 0.3  # for schedules that were not made with one
MOST_TRIES = 12  # of merging I and W into B, one stage at a time


@dataclass(frozen=True)
class Candidate:
    """A step that can be run, of one of the placements. named: the schedule that it came from, unchanged."""

    search: PlacementSearch
    step: Step
    reach: float
    named: Schedule | None = None

    @property
    def key(self) -> tuple[float, float]:
        return self.step.seconds, self.step.total

    def schedule(self) -> Schedule:
        return self.named or self.search.problem.schedule(self.step.words, "searched")


class PlacementSearch:
    """Everything about one placement."""

    def __init__(self, problem: Problem, split: Split, random: Random) -> None:
        self.problem, self.split, self.random = problem, split, random
        self.decoder = Decoder(problem)
        self.bound = lower_bound(
            problem.costs,
            problem.placement,
            problem.microbatches,
            graph=problem.graph,
            footprint=problem.footprint,
            memory=problem.memory,
            split=split is not False,
            metric=problem.metric,
        )

    def start(self) -> Iterator[Candidate]:
        """Named schedules, as they are and as the decoder would place their W, and the plainest list schedule."""
        for schedule in named_schedules(self.problem):
            words = self.problem.words(schedule.orders)
            if self._allowed(words):
                step = self.decoder.run(words, None)
                if step is not None:
                    in_turn = self.problem.orders(words) == schedule.orders  # first come, first served, as words are
                    yield Candidate(self, step, REACH, schedule if in_turn else None)
            yield from self._variants(words)
        for is_split in self._splits():
            words = plainest(self.problem, is_split)
            if words is not None:
                yield from self._variants(words)

    def explore(self, budget: int) -> Iterator[Candidate]:
        for step, reach in explore(self.decoder, self.random, budget, self._splits()):
            yield Candidate(self, step, reach)

    def walk(self, candidate: Candidate, budget: int, heat: Heat, polish: bool) -> Candidate:
        """A local search from a candidate. polish: move W too, each by itself, rather than let the decoder place it."""
        words: Sequence[Word] = candidate.step.words
        reach = None if polish else candidate.reach
        if reach is not None:
            filled = short(words)
            if self.decoder.run(filled, reach) is not None:
                words = filled
            else:
                reach = None
        flips = self.split == "auto" and reach is not None
        annealer = Annealer(self.decoder, words, self.random, reach=reach, flips=flips)
        best = annealer.walk(budget, heat, self.bound.seconds * (1 + SAME))
        return min(candidate, Candidate(self, best, candidate.reach), key=lambda each: each.key)

    def merged(self, candidate: Candidate) -> Candidate:
        """Without the splits that don't pay: B rather than I and W wherever the step gets no longer by it."""
        if self.split != "auto" or candidate.named is not None:
            return candidate
        stages = range(self.problem.graph.n_stages)
        chosen = [stages, *([stage] for stage in stages)][: MOST_TRIES + 1]
        for far, some in product((True, False), chosen):
            words = [_merge(word, some, far) for word in candidate.step.words]
            if words == candidate.step.words:
                continue
            step = self.decoder.run(words, None)
            if step is not None and step.seconds <= candidate.step.seconds * (1 + SAME):
                candidate = Candidate(self, step, candidate.reach)
        return candidate

    def _splits(self) -> tuple[bool, ...]:
        return (True, False) if self.split == "auto" else (bool(self.split),)

    def _allowed(self, words: Sequence[Word]) -> bool:
        kinds = {letter & 3 for word in words for letter in word}
        return not ((self.split is True and B in kinds) or (self.split is False and I in kinds))

    def _variants(self, words: Sequence[Word]) -> Iterator[Candidate]:
        for is_split in self._splits():
            kind = I if is_split else B
            turned = [
                [letter & ~3 | kind if letter & 3 in (B, I) else letter for letter in word] for word in short(words)
            ]
            for reach in (0.0, REACH) if is_split else (0.0,):
                step = self.decoder.run(turned, reach)
                if step is not None:
                    yield Candidate(self, step, reach)


class Pool:
    """Candidates, those that are equal in time kept once."""

    def __init__(self) -> None:
        self.candidates: dict[tuple[int, float, float], Candidate] = {}

    @property
    def seconds(self) -> float:
        return min((candidate.step.seconds for candidate in self.candidates.values()), default=float("inf"))

    def add(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            key = (id(candidate.search), *candidate.key)
            if key not in self.candidates or (candidate.named and not self.candidates[key].named):
                self.candidates[key] = candidate

    def winner(self) -> Candidate:
        """The fastest; of several that are equal, one with a name."""
        seconds = self.seconds * (1 + SAME)
        equal = [candidate for candidate in self.candidates.values() if candidate.step.seconds <= seconds]
        return min(equal, key=lambda candidate: (candidate.named is None, candidate.key))

    def best(self, number: int) -> list[Candidate]:
        """The fastest; of a placement that can't beat them by its own bound, none."""
        seconds = self.seconds
        able = [
            candidate
            for candidate in self.candidates.values()
            if candidate.step.seconds <= seconds or candidate.search.bound.seconds < seconds
        ]
        return sorted(able, key=lambda candidate: candidate.key)[:number]


def _merge(word: Word, stages: Iterable[int], far: bool) -> Word:
    """The I of these stages as B, where the W follows at once; far: all of them, wherever their W is."""
    chosen = set(stages)
    if far:
        merged = [letter for letter in word if letter & 3 != W or letter >> 2 not in chosen]
        return [letter + B - I if letter & 3 == I and letter >> 2 in chosen else letter for letter in merged]
    merged: Word = []
    for letter in word:
        if letter & 3 == W and merged and merged[-1] == letter + I - W and letter >> 2 in chosen:
            merged[-1] = letter + B - W
        else:
            merged.append(letter)
    return merged

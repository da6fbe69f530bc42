"""Tries rules of list scheduling, at first at random, then near the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from random import Random

from stageflow.plan.search.anneal import short
from stageflow.plan.search.construct import Rule, construct
from stageflow.plan.search.decode import Decoder, Step
from stageflow.plan.search.problem import F, Problem, Word

CONSTRUCTED = 6  # letters decoded in the time that list scheduling takes for one
REACHES = (0.0, 0.3, 0.6)


def explore(decoder: Decoder, random: Random, budget: int, splits: tuple[bool, ...]) -> Iterator[tuple[Step, float]]:
    """Steps with the reach they were decoded with, until ``budget`` more letters have been decoded.

    splits: whether backwards are split, in the rules to be tried.
    """
    problem = decoder.problem
    begin = decoder.letters
    best: tuple[float, Rule] | None = None
    while (share := (decoder.letters - begin) / budget) < 1:
        near = best is not None and share > 0.4 and random.random() < 0.7
        rule = _near(best[1], random) if near and best else _any(problem, random, splits)
        words = construct(problem, rule)
        if words is None:
            decoder.letters += CONSTRUCTED * problem.microbatches  # it got somewhere before it got stuck
            continue
        decoder.letters += CONSTRUCTED * sum(map(len, words))
        for given, reach in ((words, None), (short(words), rule.reach)):
            step = decoder.run(given, reach)
            if step is not None:
                yield step, rule.reach
                if best is None or step.seconds < best[0]:
                    best = step.seconds, rule


def plainest(problem: Problem, split: bool) -> list[Word] | None:
    """Gradients whenever they can start: the words that need the least memory."""
    return construct(problem, Rule((0.0,) * problem.n_workers, 1, True, split, 0.0))


def _any(problem: Problem, random: Random, splits: tuple[bool, ...]) -> Rule:
    """Ahead falls from worker to worker in a line, steep or flat, from all the memory or from a part of it."""
    level = random.choice((1.0, 1.0, 0.75, 0.5, 0.35, 1.0 / problem.microbatches))
    slope = random.choice((0.0, 0.0, 0.5, 1.0))
    workers = problem.n_workers
    return Rule(
        ahead=tuple(_most(problem, worker) * level * (1 - slope * worker / workers) for worker in range(workers)),
        group=random.choice((1, 2, workers, workers, workers + 1, problem.microbatches)),
        deep=random.random() < 0.5,
        split=random.choice(splits),
        reach=random.choice(REACHES),
    )


def _most(problem: Problem, worker: int) -> float:
    """Bytes that a worker could keep: its room, or what all micro-batches together or twice a pipeline's depth need."""
    number = min(problem.microbatches, 2 * len(problem.placement))
    keeps = [problem.keeps[4 * s + F] for s, w in enumerate(problem.placement) if w == worker]
    return min(problem.room[worker], number * sum(keeps))


def _near(rule: Rule, random: Random) -> Rule:
    """The rule with a number or two changed."""
    what = random.random()
    if what < 0.7:
        ahead = list(rule.ahead)
        for _ in range(random.randint(1, 2)):
            worker = random.randrange(len(ahead))
            ahead[worker] *= math.exp(random.uniform(-0.4, 0.4))
        return dataclasses.replace(rule, ahead=tuple(ahead))
    if what < 0.85:
        return dataclasses.replace(rule, group=max(1, rule.group + random.choice((-1, 1))))
    return dataclasses.replace(rule, reach=random.choice(REACHES))

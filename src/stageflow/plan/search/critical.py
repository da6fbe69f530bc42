"""Which actions decide how long a step takes."""

from __future__ import annotations

from typing import NamedTuple

from stageflow.plan.search.decode import Step
from stageflow.plan.search.problem import Problem, Word


class Block(NamedTuple):
    """Actions of one worker, one right after the other, on the longest path: positions first to last."""

    worker: int
    first: int
    last: int


def critical_blocks(problem: Problem, step: Step) -> list[Block]:
    """The longest path that ends last, cut where it goes from worker to worker; from the end back to the start.

    Only another order inside a block, or across its ends, can make the step shorter.
    """
    starts, seconds = step.starts, problem.seconds
    spans = [
        end - (began[0] if problem.metric == "span" else 0.0) for end, began in zip(step.ends, starts, strict=True)
    ]
    worker = spans.index(max(spans))
    at = len(starts[worker]) - 1
    numbers, places = _number(problem, step.words)
    blocks: list[Block] = []
    while True:
        word, began, last = step.words[worker], starts[worker], at
        while at > 0 and began[at - 1] + seconds[word[at - 1]] == began[at]:
            at -= 1
        blocks.append(Block(worker, at, last))
        maker = _maker(problem, step, word[at], numbers[worker][at], began[at], places)
        if maker is None:
            return blocks
        worker, at = maker


def _number(problem: Problem, words: list[Word]) -> tuple[list[list[int]], dict[tuple[int, int], tuple[int, int]]]:
    """The micro-batch at each position, and the (worker, position) that makes each (stream, micro-batch)."""
    numbers: list[list[int]] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for worker, word in enumerate(words):
        counts: dict[int, int] = {}
        line: list[int] = []
        for at, letter in enumerate(word):
            stream = problem.stream[letter]
            count = counts.get(stream, 0)
            counts[stream] = count + 1
            places[stream, count] = worker, at
            line.append(count)
        numbers.append(line)
    return numbers, places


def _maker(
    problem: Problem, step: Step, letter: int, number: int, start: float, places: dict[tuple[int, int], tuple[int, int]]
) -> tuple[int, int] | None:
    """Where the value was made for which the letter waited: the last of those that it needs from other workers.

    A value that queued for its link stands for those before it in the queue.
    """
    makers = [places[problem.makers[channel], number] for channel in problem.arrivals[letter]]
    if not makers or start <= 0:
        return None

    def end(place: tuple[int, int]) -> float:
        worker, at = place
        return step.starts[worker][at] + problem.seconds[step.words[worker][at]]

    return max(makers, key=end)

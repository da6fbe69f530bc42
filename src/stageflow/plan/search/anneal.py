"""Local search: moves letters of words about, most of them on the longest path, and keeps what is shorter.

Simulated annealing (Kirkpatrick et al. 1983) over the moves of job shop scheduling (Nowicki and Smutnicki 1996, "A Fast
Taboo Search Algorithm for the Job Shop Problem": only a move at or across the ends of a block of the longest path can
shorten it). Letters move in the words only; each W goes where the decoder puts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stageflow.plan.search.critical import Block, critical_blocks
from stageflow.plan.search.decode import Decoder, Step
from stageflow.plan.search.problem import B, I, W, Word

TOTAL = 0.02  # weight of the workers' mean end beside the last end: of two equal steps, the one with more slack


@dataclass(frozen=True)
class Heat:
    """What a worse step may be worse by: this share of the first one's seconds, at the start and at the end."""

    first: float
    last: float


class Annealer:
    """One walk from one set of words.

    reach: for the decoder. flips: whether a B may become an I and a W, and back.
    """

    def __init__(
        self, decoder: Decoder, words: Sequence[Word], random: Random, *, reach: float | None, flips: bool
    ) -> None:
        self._decoder, self._problem, self._random = decoder, decoder.problem, random
        self._reach, self._flips = reach, flips
        self._words = [list(word) for word in words]
        step = decoder.run(self._words, reach)
        if step is None:
            raise ValueError("the words that a walk starts from can't be run")
        self._step = self.best = step
        self._blocks: list[Block] = []
        self._work = [self._problem.work(word) for word in self._words]

    def walk(self, budget: int, heat: Heat, enough: float) -> Step:
        """Go on until ``budget`` more letters have been decoded, or a step takes ``enough`` seconds or less."""
        decoder, random = self._decoder, self._random
        begin = decoder.letters
        scale = self._step.seconds
        while self.best.seconds > enough:
            share = (decoder.letters - begin) / budget
            if share >= 1:
                break
            decoder.letters += 8  # a move that is refused unseen costs something too: no walk is endless
            changed = self._change()
            if changed is None:
                continue
            worker, word = changed
            heat_now = scale * heat.first * (heat.last / heat.first) ** share
            limit = self._value(self._step) - heat_now * math.log(1.0 - random.random())
            old, self._words[worker] = self._words[worker], word
            busy = self._work[worker]
            if self._flips:
                self._work[worker] = self._problem.work(word)
            least = TOTAL * sum(self._work) / len(self._words)
            step = decoder.run(self._words, self._reach, limit - least, self._work)
            if step is None or self._value(step) > limit:
                self._words[worker], self._work[worker] = old, busy
                continue
            self._take(step)
        return self.best

    def _take(self, step: Step) -> None:
        self._step = step
        self._blocks = []
        if self._reach is None:
            self._words = [list(word) for word in step.words]
        if (step.seconds, step.total) < (self.best.seconds, self.best.total):
            self.best = step

    def _value(self, step: Step) -> float:
        return step.seconds + TOTAL * step.total / len(step.words)

    def _change(self) -> tuple[int, Word] | None:
        """A worker and a new word for it."""
        random = self._random
        worker, first, last = self._where()
        word = self._words[worker]
        if self._flips and random.random() < 0.08:
            return self._flip(worker, random.randint(first, last))
        kind = random.random()
        if kind < 0.35:  # the block's last letter earlier
            source, target = last, max(first, last - _distance(random, 0.4))
        elif kind < 0.55:  # its first one later
            source, target = first, min(last, first + _distance(random, 0.4))
        else:
            source = random.randint(first, last)
            ahead = random.random() < 0.5
            target = source + _distance(random, 0.25) * (-1 if ahead else 1)
            target = min(max(target, 0), len(word) - 1)
        if word[source] == word[target]:
            return None
        new = list(word)
        new.insert(target, new.pop(source))
        return worker, new

    def _where(self) -> tuple[int, int, int]:
        """Worker and two positions in its word: a block of the longest path, or now and then anything."""
        random = self._random
        if random.random() < 0.15:
            worker = random.randrange(len(self._words))
            return worker, 0, len(self._words[worker]) - 1
        if not self._blocks:
            self._blocks = critical_blocks(self._problem, self._step)
            if self._reach is not None:
                self._blocks = [self._without_weights(block) for block in self._blocks]
        worker, first, last = random.choice(self._blocks)
        if last == first:
            first, last = first - 1, last + random.randint(1, 3)
        end = len(self._words[worker]) - 1
        return worker, min(max(first, 0), end), min(last, end)

    def _without_weights(self, block: Block) -> Block:
        """The block's place in a word that leaves out the W."""
        made = self._step.words[block.worker]
        first = sum(letter & 3 != W for letter in made[: block.first])
        last = first - 1 + sum(letter & 3 != W for letter in made[block.first : block.last + 1])
        return Block(block.worker, first, max(first, last))

    def _flip(self, worker: int, at: int) -> tuple[int, Word] | None:
        """A backward whole instead of split, or split instead of whole."""
        letter = self._words[worker][at]
        kind = letter & 3
        if kind not in (B, I):
            return None
        new = list(self._words[worker])
        new[at] = letter + (I - B if kind == B else B - I)
        return worker, new


def _distance(random: Random, rate: float) -> int:
    return 1 + int(random.expovariate(rate))


def short(words: Sequence[Word]) -> list[Word]:
    """Words without W: the decoder finds their places."""
    return [[letter for letter in word if letter & 3 != W] for word in words]

"""What words stand for: the actions in time, with gradients of weights put where a worker would wait.

A word lists a worker's F, B and I in order. Its W need not be there: while the next letter has not arrived, the worker
does what W it owes, if they fit into the gap (or stick out of it by no more than ``reach`` of their time), and it does
them too when an F has no room without. A W that is in the word says: by here at the latest. So a word is short, and a
change of two letters moves all W to where they now belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageflow.plan.search.problem import NO_LINK, B, I, Problem, W, Word

NEVER = float("inf")
ROUNDING = 1e-9  # relative; sums of bytes may differ by their order


@dataclass(frozen=True)
class Step:
    """A step that words stand for.

    seconds: the problem's metric. total: the ends of all workers added up. words: with every W in its place. starts: of
    every letter of them, in seconds. ends: of each worker, reductions included.
    """

    seconds: float
    total: float
    words: list[Word]
    starts: list[list[float]]
    ends: list[float]


class Decoder:
    """Turns words into steps, as `stageflow.schedule.simulate` would time them, in a fraction of the time.

    letters: how many have been decoded, the unit of a search's budget.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.letters = 0
        self._outputs = [[(o.channel, o.hop, o.link, o.transfer) for o in outputs] for outputs in problem.outputs]
        self._span = problem.metric == "span"
        self._room = [room * (1 + ROUNDING) + ROUNDING for room in problem.room]
        self._reduces = any(problem.reduction)

    def run(
        self, words: Sequence[Word], reach: float | None = 0.0, cutoff: float = NEVER, work: Sequence[float] = ()
    ) -> Step | None:
        """Time the words; None when they are impossible, or take longer than ``cutoff`` seconds.

        reach: see above; None leaves W where the words have them.
        work: each worker's busy seconds (`Problem.work`); known, a hopeless try is given up early.
        Impossible: a letter before what it needs, workers that wait for each other, more memory than there is.
        """
        problem = self.problem
        seconds, streams, local, keeps = problem.seconds, problem.stream, problem.local, problem.keeps
        arrivals, outputs, rooms = problem.arrivals, self._outputs, self._room
        workers = range(len(words))
        arrived: list[list[float]] = [[] for _ in range(problem.n_channels)]
        waiting = [-1] * problem.n_channels
        links = [0.0] * (len(words) * len(words))
        counts = [0] * (3 * problem.graph.n_stages)
        made: list[Word] = [[] for _ in workers]
        starts: list[list[float]] = [[] for _ in workers]
        owed: list[Word] = [[] for _ in workers]
        free, kept, heads = [0.0] * len(words), [0.0] * len(words), [0] * len(words)
        tolerance = ROUNDING * cutoff if cutoff < NEVER else 0.0
        spare = [cutoff - busy + tolerance for busy in work] or [NEVER] * len(words)
        ready = list(workers)
        while ready:
            worker = ready.pop()
            word, out, began, owes = words[worker], made[worker], starts[worker], owed[worker]
            now, memory, room = free[worker], kept[worker], rooms[worker]
            at = heads[worker]
            for at in range(heads[worker], len(word)):
                letter = word[at]
                stream = streams[letter]
                count = counts[stream]
                start = now
                if letter & 3 == W:
                    if letter not in owes:
                        continue  # done earlier
                    owes.remove(letter)
                    memory += keeps[letter]
                    counts[stream] = count + 1
                    out.append(letter)
                    began.append(now)
                    now += seconds[letter]
                    continue
                for channel in arrivals[letter]:
                    values = arrived[channel]
                    if count >= len(values):
                        waiting[channel] = worker
                        break
                    if values[count] > start:
                        start = values[count]
                else:
                    for need in local[letter]:
                        if counts[need] <= count:
                            return None
                    change = keeps[letter]
                    while owes:
                        weights = owes[0]
                        time = seconds[weights]
                        if memory + change <= room and (reach is None or now + time > start + reach * time):
                            break
                        del owes[0]
                        memory += keeps[weights]
                        counts[streams[weights]] += 1
                        out.append(weights)
                        began.append(now)
                        now += time
                    memory += change
                    if memory > room:
                        return None
                    if now > start:
                        start = now
                    elif out:
                        spare[worker] -= start - now
                    else:
                        spare[worker] -= 0.0 if self._span else start
                    if spare[worker] < 0:
                        self.letters += sum(map(len, made))
                        return None
                    counts[stream] = count + 1
                    out.append(letter)
                    began.append(start)
                    now = start + seconds[letter]
                    if letter & 3 == I:
                        owes.append(letter + W - I)
                    for channel, hop, link, transfer in outputs[letter]:
                        sent = now
                        if link != NO_LINK:
                            if links[link] > sent:
                                sent = links[link]
                            links[link] = sent = sent + transfer
                        arrived[channel].append(sent + hop)
                        if waiting[channel] >= 0:
                            ready.append(waiting[channel])
                            waiting[channel] = -1
                    continue
                heads[worker] = at
                break
            else:
                heads[worker] = len(word)
                for weights in owes:
                    out.append(weights)
                    began.append(now)
                    now += seconds[weights]
                owes.clear()
            free[worker], kept[worker] = now, memory
        self.letters += sum(map(len, made))
        if any(head < len(word) for head, word in zip(heads, words, strict=True)):
            return None
        ends = self._with_reductions(made, starts, free) if self._reduces else free
        firsts = [began[0] if self._span else 0.0 for began in starts]
        longest = max(end - first for end, first in zip(ends, firsts, strict=True))
        return Step(longest, sum(ends), made, starts, ends) if longest <= cutoff else None

    def _with_reductions(self, words: list[Word], starts: list[list[float]], free: list[float]) -> list[float]:
        """When the workers' last gradients are reduced too."""
        problem = self.problem
        ends = list(free)
        for worker, word in enumerate(words):
            seen: set[int] = set()
            for at in reversed(range(len(word))):
                letter = word[at]
                stage, kind = divmod(letter, 4)
                if kind in (B, W) and stage not in seen:
                    seen.add(stage)
                    end = starts[worker][at] + problem.seconds[letter] + problem.reduction[stage]
                    ends[worker] = max(ends[worker], end)
        return ends

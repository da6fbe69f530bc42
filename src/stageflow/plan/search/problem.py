"""A scheduling problem as numbers, for programs that look at very many orders.

All micro-batches of a stage cost the same, so any schedule can be relabelled, without moving an action in time, until
the micro-batches of every stage go first come, first served: the k-th F of a stage serves the k-th F of the stage
before, and so on (docs/bounds.md has the proof). An order of a worker is then a word of letters, and a letter says only
what is done for which stage; the k-th of its kind is for micro-batch k.

    letter 4 * stage + 0 F   1 B   2 I   3 W
    stream 2 * stage + 0 values, made by F   1 gradients, made by B or I alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stageflow.graph import StageGraph
from stageflow.plan.bounds import Metric
from stageflow.schedule.actions import KINDS, Action, Orders
from stageflow.schedule.costs import Costs, at_stage
from stageflow.schedule.memory import Footprint, static_memory
from stageflow.schedule.rules import depends_on, in_one_piece
from stageflow.schedule.schedule import Schedule

F, B, I, W = range(4)  # noqa: E741 - the field's own names
Word = list[int]
NO_LINK = -1


@dataclass(frozen=True)
class Output:
    """Where a letter's value goes: the channel, seconds of latency, and the link it occupies and for how long."""

    channel: int
    hop: float
    link: int = NO_LINK
    transfer: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What there is to schedule.

    placement: the worker of each stage. costs: seconds. footprint: what a stage keeps. memory: bytes per worker, or
    None for no limit. metric: "makespan" or "span", see `Simulation`.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    footprint: Footprint
    memory: tuple[float, ...] | None
    metric: Metric = "makespan"

    @property
    def n_workers(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def worker(self) -> tuple[int, ...]:
        """By letter."""
        return tuple(w for w in self.placement for _ in KINDS)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """By letter."""
        return tuple(self.costs.of(Action(kind, s, 0)) for s in range(self.graph.n_stages) for kind in KINDS)

    @cached_property
    def stream(self) -> tuple[int, ...]:
        """By letter, which stream it makes the next value of; a W makes none, and its number is only a counter."""
        n = self.graph.n_stages
        return tuple(number for s in range(n) for number in (2 * s, 2 * s + 1, 2 * s + 1, 2 * n + s))

    @cached_property
    def _dependences(self) -> tuple[tuple[int, ...], ...]:
        """By letter, the streams it waits for, as the one rule says."""

        def stream_of(action: Action) -> int:
            return 2 * action.stage + (action.kind != "F")

        return tuple(
            tuple(stream_of(need) for need in depends_on(Action(kind, s, 0), self.graph, in_one_piece))
            for s in range(self.graph.n_stages)
            for kind in KINDS
        )

    @cached_property
    def _channels(self) -> dict[tuple[int, int], int]:
        """(stream made, stream that waits) -> number, for values that cross to another worker."""
        found: dict[tuple[int, int], int] = {}
        for letter, needs in enumerate(self._dependences):
            for need in needs:
                if self.placement[need // 2] != self.worker[letter]:
                    found.setdefault((need, self.stream[letter]), len(found))
        return found

    @property
    def n_channels(self) -> int:
        return len(self._channels)

    @cached_property
    def makers(self) -> tuple[int, ...]:
        """By channel, the stream whose values it carries."""
        return tuple(made for made, _ in self._channels)

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """By channel, the worker that it leads to."""
        return tuple(self.placement[waits // 2] for _, waits in self._channels)

    @cached_property
    def arrivals(self) -> tuple[tuple[int, ...], ...]:
        """By letter, the channels it waits for."""
        return tuple(
            tuple(
                self._channels[need, self.stream[letter]]
                for need in needs
                if (need, self.stream[letter]) in self._channels
            )
            for letter, needs in enumerate(self._dependences)
        )

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """By letter, the streams of its own worker that it waits for."""
        return tuple(
            tuple(need for need in needs if self.placement[need // 2] == self.worker[letter])
            for letter, needs in enumerate(self._dependences)
        )

    @cached_property
    def outputs(self) -> tuple[tuple[Output, ...], ...]:
        """By letter, where its value goes, in the order in which a worker hands values to its links."""
        made: dict[int, list[Output]] = {}
        ways = {channel: (made // 2, waits // 2) for (made, waits), channel in self._channels.items()}
        queued = any(self.costs.transfer_between(*way) for way in ways.values())
        for (stream, _), channel in self._channels.items():
            source, target = ways[channel]
            link = self.placement[source] * self.n_workers + self.placement[target] if queued else NO_LINK
            hop, transfer = self.costs.hop_between(source, target), self.costs.transfer_between(source, target)
            made.setdefault(stream, []).append(Output(channel, hop, link, transfer))
        return tuple(
            tuple(made.get(stream, ())) if letter % 4 != W else () for letter, stream in enumerate(self.stream)
        )

    @cached_property
    def keeps(self) -> tuple[float, ...]:
        """By letter, how the bytes that its worker keeps change: at the start of an F, at the end of others."""
        changes: list[float] = []
        for stage in range(self.graph.n_stages):
            activation = at_stage(self.footprint.activation, stage)
            deferred = activation if self.footprint.deferred is None else at_stage(self.footprint.deferred, stage)
            changes += [activation, -activation, deferred - activation, -deferred]
        return tuple(changes)

    @cached_property
    def room(self) -> tuple[float, ...]:
        """By worker, bytes for activations: the limit less what is always there."""
        if self.memory is None:
            return (float("inf"),) * self.n_workers
        static = static_memory(self.footprint, self.placement, self.n_workers)
        return tuple(limit - there for limit, there in zip(self.memory, static, strict=True))

    def words(self, orders: Orders) -> list[Word]:
        """A schedule's orders as words."""
        return [[4 * stage + KINDS.index(kind) for kind, stage, _ in order] for order in orders]

    def orders(self, words: Sequence[Word]) -> Orders:
        """Words as a schedule's orders: micro-batches of a stage first come, first served."""
        orders: list[tuple[Action, ...]] = []
        for word in words:
            done = [0] * (3 * self.graph.n_stages)
            split: dict[int, list[int]] = {}
            order: list[Action] = []
            for letter in word:
                stage, kind = divmod(letter, 4)
                stream = self.stream[letter]
                microbatch = done[stream]
                if kind == I:
                    split.setdefault(stage, []).append(microbatch)
                elif kind == W:
                    microbatch = split[stage][microbatch]
                done[stream] += 1
                order.append(Action(KINDS[kind], stage, microbatch))
            orders.append(tuple(order))
        return tuple(orders)

    def schedule(self, words: Sequence[Word], name: str) -> Schedule:
        """Words as a schedule."""
        return Schedule(name, self.graph, self.placement, self.microbatches, self.orders(words))

    def work(self, word: Word) -> float:
        """Seconds that a worker is busy, with the W of every I, in the word or not."""
        return sum(
            (seconds + self.seconds[letter + W - I] * (letter & 3 == I)) * word.count(letter)
            for letter, seconds in enumerate(self.seconds)
            if letter & 3 != W
        )

    @cached_property
    def reduction(self) -> tuple[float, ...]:
        """By stage, seconds from the end of its last gradient of weights to the end of its step."""
        return tuple(at_stage(self.costs.reduction, stage) for stage in range(self.graph.n_stages))

"""ZB-V: zero bubble with two stages per worker, placed like a V."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.common import SPLIT
from stageflow.schedule.builders.zero_bubble import zb_h1
from stageflow.schedule.costs import Costs
from stageflow.schedule.placement import fold

_NEVER = float("-inf")


def zb_v(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (V-ZB, ZB-V): two stages per worker
    in a V, so that the first worker also has the last stage and backwards start next to where forwards do.

        4 stages on 2 workers, 4 micro-batches, F = I = W
        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    For p workers, F = I = W, c = 0 and m >= 2p-1 micro-batches: span = 2m(F+I+W), no idle time in it; from the first
    start to the last end (p-1)F more. Peak 2p activations of a stage, each half of what a stage of zb_h1 keeps.

    costs: None gives the pattern above. Given times, and at least 2p micro-batches, the order comes from the authors'
        heuristic for measured times: it fills the V while the first micro-batch goes round, then lets every worker do
        a backward and a forward in turn, and puts a W wherever a worker would wait as long as a W takes, or would
        fall further behind than the worst; all that in several variants, of which it keeps the one of least span.
        Same peak. It is made for stages of equal times; where it gets stuck on unequal ones, the pattern stands.

    Any other placement is built as in `zb_h1`, and found by `greedy` unless a worker's stages are neighbours.
    """
    workers = max(placement) + 1
    if placement != fold(2 * workers, workers):
        return zb_h1(graph, placement, microbatches, costs=costs)
    if costs is None or microbatches < 2 * workers:
        return tuple(_pattern(workers, worker, microbatches) for worker in range(workers))
    costs.check(graph.n_stages, graph.edges)
    found = _best_of_variants(graph, microbatches, costs)
    return found or tuple(_pattern(workers, worker, microbatches) for worker in range(workers))


def _pattern(workers: int, worker: int, microbatches: int) -> tuple[Action, ...]:
    """One worker's order in the V; down is its stage on the way from the first worker, up the one on the way back."""
    down, up = worker, 2 * workers - 1 - worker
    behind = workers - worker
    steady: tuple[tuple[Kind, int], ...] = (("F", down), ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    phases: list[tuple[int, tuple[tuple[Kind, int], ...]]] = [
        (2 * behind - 1, (("F", down),)),
        (worker, (("F", up), ("F", down))),
        (behind, (("F", up), ("I", up), ("W", up))),
        (max(0, microbatches - worker - behind), steady),
        (worker, (("I", down), ("I", up))),
        (behind, (("I", down), ("W", down))),
        (microbatches, (("W", up),)),
        (microbatches, (("W", down),)),
    ]
    order: list[Action] = []
    done: dict[tuple[Kind, int], int] = {}
    for times, block in phases:
        for _ in range(times):
            for kind, stage in block:
                count = done.get((kind, stage), 0)
                if count < microbatches:
                    order.append(Action(kind, stage, count))
                    done[kind, stage] = count + 1
    return tuple(order)


def _best_of_variants(graph: StageGraph, microbatches: int, costs: Costs) -> Orders:
    """Fill waits before an F, before the I of an up stage, or not; each again for as long as that helps."""
    best: _Filler | None = None
    for fill_backwards in (True, False):
        for fill_forwards in (True, False):
            allowed: Sequence[float] = [0.0] * graph.n_stages
            least = float("inf")
            while True:
                run = _Filler(graph, microbatches, costs, fill_forwards, fill_backwards, allowed)
                if not run.build() or max(run.idle) >= least:
                    break
                allowed, least = run.idle, max(run.idle)
                if best is None or least < max(best.idle):
                    best = run
    return () if best is None else tuple(map(tuple, best.orders))


class _StuckError(Exception):
    """What the next action needs has not been put anywhere yet, or there is no memory for it."""


class _Filler:
    """One run of the heuristic. Times are those of the simulator: every action as early as the order allows.

    allowed: idle seconds per worker of an earlier run. A worker may idle as long as the worst of now, or as the worst
        of that run had more than it, before a W is put in.
    idle: seconds each worker waited after its first action.
    """

    def __init__(
        self,
        graph: StageGraph,
        microbatches: int,
        costs: Costs,
        fill_forwards: bool,
        fill_backwards: bool,
        allowed: Sequence[float],
    ) -> None:
        self.workers = workers = graph.n_stages // 2
        self.microbatches = microbatches
        self.fill_forwards, self.fill_backwards = fill_forwards, fill_backwards
        self.slack = [max(allowed) - seconds for seconds in allowed]
        self.worst = 0.0
        self.last = 2 * workers - 1
        stages = range(2 * workers)
        self.owner = [min(stage, self.last - stage) for stage in stages]
        self.seconds: dict[tuple[Kind, int], float] = {
            (kind, stage): costs.of(Action(kind, stage, 0)) for kind in SPLIT for stage in stages
        }
        self.hops = [costs.hop_between(*edge) if edge in graph.edges else 0.0 for edge in pairwise(stages)]
        self.room = [2 * workers] * workers
        self.now = [0.0] * workers
        self.idle = [0.0] * workers
        self.orders: list[list[Action]] = [[] for _ in range(workers)]
        self.put_off: list[deque[Action]] = [deque() for _ in range(workers)]
        self.ends: dict[tuple[Kind, int], list[float]] = {each: [] for each in self.seconds}  # by micro-batch

    def build(self) -> bool:
        """Whether it came to an end: with stages of unequal times the heuristic may not."""
        try:
            self._first_round()
            self._level()
            for _ in range(2 * self.microbatches):
                self._backwards()
                self._forwards()
        except _StuckError:
            return False
        for worker in range(self.workers):
            while self.put_off[worker]:
                self._weight(worker)
        return True

    def _first_round(self) -> None:
        """Micro-batch 0 goes down and up; meanwhile workers above start as many more as time and memory allow."""
        for worker in range(self.workers):
            self._put("F", worker)
        for worker in reversed(range(self.workers)):
            up = self.last - worker
            while (
                2 + 2 * worker <= self.room[worker]
                and self.now[worker] + self.seconds["F", worker] <= self._arrival("F", up)
                and self._done("F", worker) < self.microbatches - worker
            ):
                for above in range(worker + 1):
                    self._put("F", above)
            self._put("F", up)

    def _level(self) -> None:
        """Forwards, up and down in turn, until every worker has done as many as the one before it."""
        down = True
        for worker in range(1, self.workers):
            while self._lags(worker):
                for below in reversed(range(worker, self.workers)):
                    stage = below if down else self.last - below
                    if self._done("F", stage) < self.microbatches:
                        self._put("F", stage)
                down = not down

    def _lags(self, worker: int) -> bool:
        down, up = self._done("F", worker), self._done("F", self.last - worker)
        above_down, above_up = self._done("F", worker - 1), self._done("F", self.last - worker + 1)
        return down + up < above_down + above_up or up <= above_up < self.microbatches

    def _backwards(self) -> None:
        """One I on every worker: that of its down stage where there is one to do, from the last worker on."""
        downs = [worker for worker in range(self.workers) if self._can_go_down(worker)]
        for worker in reversed(downs):
            self._fill("I", worker, may_catch_up=True)
            self._put("I", worker)
        for worker in range(self.workers):
            if worker not in downs:
                up = self.last - worker
                self._fill("I", up, may_catch_up=self.fill_backwards)
                self._put("I", up)

    def _can_go_down(self, worker: int) -> bool:
        down, up = self._done("I", worker), self._done("I", self.last - worker)
        if down >= up:
            return False
        return worker == self.workers - 1 or up >= self.microbatches or down < self._done("I", worker + 1)

    def _forwards(self) -> None:
        """One F on every worker, as far as there is one to do."""
        for worker in range(self.workers):
            stage = self._next_forward(worker)
            if stage is not None:
                while not self.room[worker]:
                    if not self.put_off[worker]:
                        raise _StuckError
                    self._weight(worker)
                self._fill("F", stage, may_catch_up=self.fill_forwards)
                self._put("F", stage)

    def _next_forward(self, worker: int) -> int | None:
        down, up = self._done("F", worker), self._done("F", self.last - worker)
        if up >= self.microbatches:
            return None
        if up < down and (worker == self.workers - 1 or up < self._done("F", self.last - worker - 1)):
            return self.last - worker
        if up >= down or (down < self.microbatches and (worker == 0 or down < self._done("F", worker - 1))):
            return worker
        return None

    def _fill(self, kind: Kind, stage: int, *, may_catch_up: bool) -> None:
        """Put W where the worker would wait for the next ``kind`` of the stage."""
        worker = self.owner[stage]
        arrival = self._arrival(kind, stage)
        waiting = self.put_off[worker]
        while waiting and arrival >= self.now[worker] + self.seconds["W", waiting[0].stage]:
            self._weight(worker)
        if waiting and may_catch_up:
            behind = max(self.worst, self.slack[worker]) - self.idle[worker]
            if arrival - self.now[worker] > behind:
                self._weight(worker)

    def _weight(self, worker: int) -> None:
        self._put("W", self.put_off[worker].popleft().stage)

    def _put(self, kind: Kind, stage: int) -> None:
        """The next ``kind`` of the stage comes next on its worker."""
        worker = self.owner[stage]
        start = max(self.now[worker], self._arrival(kind, stage))
        if self.orders[worker]:
            self.idle[worker] += start - self.now[worker]
            self.worst = max(self.worst, self.idle[worker])
        ends = self.ends[kind, stage]
        action = Action(kind, stage, len(ends))
        self.orders[worker].append(action)
        self.now[worker] = end = start + self.seconds[kind, stage]
        ends.append(end)
        if kind == "I":
            self.put_off[worker].append(Action("W", stage, action.microbatch))
        else:
            self.room[worker] += 1 if kind == "W" else -1
            if self.room[worker] < 0:
                raise _StuckError

    def _arrival(self, kind: Kind, stage: int) -> float:
        """When what the next ``kind`` of the stage needs from another worker is here; long ago if it needs nothing."""
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source <= self.last or self.owner[source] == self.owner[stage]:
            return _NEVER
        microbatch, ends = len(self.ends[kind, stage]), self.ends[kind, source]
        if microbatch >= len(ends):
            raise _StuckError
        return ends[microbatch] + self.hops[min(source, stage)]

    def _done(self, kind: Kind, stage: int) -> int:
        return len(self.ends[kind, stage])

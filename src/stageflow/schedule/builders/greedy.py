"""List scheduling: each worker, whenever it is free, takes the best of what could start now.

Finds orders where no closed pattern is known: several stages per worker in any placement, uneven counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind
from stageflow.schedule.builders.common import Orders
from stageflow.schedule.rules import depends_on
from stageflow.schedule.simulate import Costs


def greedy(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    split: bool,
    in_flight: Sequence[int],
    costs: Costs | None = None,
) -> Orders:
    """Backwards first, then forwards, weight gradients when nothing else can start; oldest micro-batch first.

    split: I and W instead of B.
    in_flight: per stage, the most activations it may keep from F to B or W; at least 1 each.
    costs: what the order is made for; by default every F, I and W takes one unit and hops take none.

    Never gets stuck: of the oldest unfinished micro-batch there is always an action that may start, since no older
    one keeps an activation.
    """
    return _ListScheduler(graph, placement, microbatches, split, in_flight, costs or Costs()).run()


class _ListScheduler:
    """One run over simulated time. A heap of (time, worker) says when to look at a worker again."""

    def __init__(
        self,
        graph: StageGraph,
        placement: tuple[int, ...],
        microbatches: int,
        split: bool,
        in_flight: Sequence[int],
        costs: Costs,
    ) -> None:
        self.graph, self.placement, self.microbatches = graph, placement, microbatches
        self.split, self.in_flight, self.costs = split, in_flight, costs
        self.kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
        self.rank = {"B": 0, "I": 0, "F": 1, "W": 2}
        self.next: dict[tuple[Kind, int], int] = {(k, s): 0 for k in self.kinds for s in range(graph.n_stages)}
        self.ended: dict[Action, float] = {}
        workers = max(placement) + 1
        self.local = [[s for s, w in enumerate(placement) if w == worker] for worker in range(workers)]
        self.free = [0.0] * workers
        self.orders: list[list[Action]] = [[] for _ in range(workers)]
        self.looks = [(0.0, worker) for worker in range(workers)]

    def run(self) -> Orders:
        while self.looks:
            now, worker = heapq.heappop(self.looks)
            if now < self.free[worker]:
                continue
            choices = [action for action in self._candidates(worker) if self._ready(action) <= now]
            if choices:
                self._take(min(choices, key=self._order), worker, now)
        return tuple(map(tuple, self.orders))

    def _candidates(self, worker: int) -> Iterator[Action]:
        """The next action of each kind of each local stage, unless its memory is full."""
        for stage in self.local[worker]:
            for kind in self.kinds:
                microbatch = self.next[kind, stage]
                if microbatch == self.microbatches:
                    continue
                if kind == "F" and microbatch - self.next[self.kinds[-1], stage] >= self.in_flight[stage]:
                    continue
                yield Action(kind, stage, microbatch)

    def _order(self, action: Action) -> tuple[int, int, int]:
        return self.rank[action.kind], action.microbatch, action.stage

    def _ready(self, action: Action) -> float:
        """When all it needs is here; infinity while that is not known."""
        ready = 0.0
        for need in depends_on(action, self.graph, lambda *_: not self.split):
            ended = self.ended.get(need)
            if ended is None:
                return float("inf")
            ready = max(ready, ended + self._hop(need.stage, action.stage))
        return ready

    def _hop(self, source: int, target: int) -> float:
        return self.costs.hop_between(source, target) if self.placement[source] != self.placement[target] else 0.0

    def _take(self, action: Action, worker: int, now: float) -> None:
        kind, stage, microbatch = action
        self.next[kind, stage] = microbatch + 1
        self.orders[worker].append(action)
        self.free[worker] = self.ended[action] = end = now + self.costs.of(action)
        heapq.heappush(self.looks, (end, worker))
        fed = self.graph.successors(stage) if kind == "F" else self.graph.predecessors(stage) if kind != "W" else ()
        for other in fed:
            heapq.heappush(self.looks, (end + self._hop(stage, other), self.placement[other]))

"""List scheduling: each worker, whenever it is free, takes the best of what could start now.

Finds orders where no closed pattern is known: several stages per worker in any placement, uneven counts or times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.common import memory_1f1b
from stageflow.schedule.costs import Costs
from stageflow.schedule.placement import local_stages
from stageflow.schedule.rules import depends_on, feeds

_RANK = {"B": 0, "I": 0, "F": 1, "W": 2}
_NEVER = float("inf")


def greedy(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    split: bool = True,
    memory: int | Sequence[int] | None = None,
    costs: Costs | None = None,
) -> Orders:
    """Gradients before forwards, the stage nearest to the output first, weight gradients when nothing else can start.

    split: I and W instead of B.
    memory: the most activations of a stage that a worker may keep, for all or one per worker; at least as many as it
        has stages. Default: what 1F1B keeps, n-s for each local stage s of n.
    costs: times that the order is made for; by default 1 for F, I and W, none for hops.

    Never gets stuck: a worker always leaves room for one activation of each of its stages that holds none, so of the
    oldest unfinished micro-batch some action can always start. With one stage per worker, no split and B = 2F it finds
    1F1B.
    """
    stages = local_stages(placement)
    limits = memory_1f1b(placement) if memory is None else memory
    limits = [limits] * len(stages) if isinstance(limits, int) else list(limits)
    for worker, (limit, local) in enumerate(zip(limits, stages, strict=True)):
        if limit < len(local):
            raise InputError(
                f"memory={limit} is too small for worker {worker}, which has {len(local)} stages: "
                f"it must be able to keep at least {len(local)} activations, one of each"
            )
    costs = costs or Costs()
    costs.check(graph.n_stages, graph.edges)
    return _ListScheduler(graph, placement, microbatches, split, limits, costs).run()


class _ListScheduler:
    """One run over simulated time. A heap of (time, worker) says when to look at a worker again."""

    def __init__(
        self,
        graph: StageGraph,
        placement: tuple[int, ...],
        microbatches: int,
        split: bool,
        memory: Sequence[int],
        costs: Costs,
    ) -> None:
        self.graph, self.placement, self.microbatches = graph, placement, microbatches
        self.split, self.memory, self.costs = split, memory, costs
        self.local = local_stages(placement)
        self.kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
        self.next: dict[tuple[Kind, int], int] = {(k, s): 0 for k in self.kinds for s in range(graph.n_stages)}
        self.ended: dict[Action, float] = {}
        self.ready: dict[Action, float] = {}
        self.free = [0.0] * len(self.local)
        self.orders: list[list[Action]] = [[] for _ in self.local]
        self.looks = [(0.0, worker) for worker in range(len(self.local))]

    def run(self) -> Orders:
        while self.looks:
            now, worker = heapq.heappop(self.looks)
            if now < self.free[worker]:
                continue
            choices = [action for action in self._candidates(worker) if self._ready(action) <= now]
            if choices:
                self._take(min(choices, key=_order), worker, now)
        return tuple(map(tuple, self.orders))

    def _candidates(self, worker: int) -> Iterator[Action]:
        """The next action of each kind of each local stage, as far as there is memory for it."""
        kept = {stage: self.next["F", stage] - self.next[self.kinds[-1], stage] for stage in self.local[worker]}
        spare = self.memory[worker] - sum(kept.values()) - sum(not count for count in kept.values())
        for stage in self.local[worker]:
            for kind in self.kinds:
                microbatch = self.next[kind, stage]
                if microbatch < self.microbatches and (kind != "F" or not kept[stage] or spare > 0):
                    yield Action(kind, stage, microbatch)

    def _ready(self, action: Action) -> float:
        """When all it needs is here; infinity while that is not known."""
        known = self.ready.get(action)
        if known is not None:
            return known
        ready = 0.0
        for need in depends_on(action, self.graph, self._whole_backward):
            ended = self.ended.get(need)
            if ended is None:
                return _NEVER
            ready = max(ready, ended + self._hop(need.stage, action.stage))
        self.ready[action] = ready
        return ready

    def _whole_backward(self, stage: int, microbatch: int) -> bool:
        return not self.split

    def _hop(self, source: int, target: int) -> float:
        return self.costs.hop_between(source, target) if self.placement[source] != self.placement[target] else 0.0

    def _take(self, action: Action, worker: int, now: float) -> None:
        kind, stage, microbatch = action
        self.next[kind, stage] = microbatch + 1
        self.orders[worker].append(action)
        self.free[worker] = self.ended[action] = end = now + self.costs.of(action)
        heapq.heappush(self.looks, (end, worker))
        for other in feeds(action, self.graph):
            heapq.heappush(self.looks, (end + self._hop(stage, other), self.placement[other]))


def _order(action: Action) -> tuple[int, int, int]:
    return _RANK[action.kind], -action.stage, action.microbatch

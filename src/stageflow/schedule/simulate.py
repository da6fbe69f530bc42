"""What a schedule would take, from the time of each action and of each link between workers.

Every worker runs its own actions in order; an action starts as soon as its worker is free and everything it needs has
arrived. A value that crosses to another worker takes its turn on the link between the two, occupies it for
``transfer``, and arrives ``hop`` later; sending keeps neither worker busy. A link has one sender, whose order is given,
so the order of transfers is too: there is nothing to choose, and the times are exact longest paths.

    F of 0.4 and transfers of 1: the second value waits for the link
    worker 0 | 0F0 0F1 .   .   .   .
    link     |     --0F0-- --0F1--
    worker 1 | .   .   .   1F0 .   1F1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stageflow.schedule.actions import KINDS, Action
from stageflow.schedule.costs import Costs, at_stage, check_costs
from stageflow.schedule.rules import feeds
from stageflow.schedule.simulation import Simulation, Times
from stageflow.schedule.walk import walk

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a schedule on paper.

    Raises InputError when the costs don't fit the stages, ScheduleError when the schedule deadlocks.
    """
    check_costs(costs)
    costs.check(schedule.n_stages, schedule.graph.edges)
    placement, stages = schedule.placement, range(schedule.n_stages)
    seconds = {(kind, stage): costs.of(Action(kind, stage, 0)) for kind in KINDS for stage in stages}
    links = _Links(schedule, costs)
    free = [0.0] * schedule.n_workers
    started = [False] * schedule.n_workers
    on_links = [0.0] * schedule.n_workers
    gradients_done: dict[int, float] = {}
    times: dict[Action, Times] = {}
    for worker, action, needs in walk(schedule):
        kind, stage, _ = action
        start = made = free[worker]
        for need in needs:
            end = times[need].end
            if placement[need.stage] != worker:
                if end > made:
                    made = end
                end = links.arrival(need, stage, end)
            if end > start:
                start = end
        if started[worker]:
            on_links[worker] += start - made
        started[worker] = True
        free[worker] = end = start + seconds[kind, stage]
        times[action] = Times(start, end)
        if links.queued:
            links.send(action, worker, end)
        if kind == "B" or kind == "W":
            gradients_done[stage] = end
    reductions = {
        stage: Times(end, end + at_stage(costs.reduction, stage))
        for stage, end in sorted(gradients_done.items())
        if at_stage(costs.reduction, stage)
    }
    return Simulation(times, placement, schedule.n_workers, tuple(on_links), reductions)


class _Links:
    """When values reach other workers. Without transfer times nothing queues, and only the hop counts."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._graph, self._placement = schedule.graph, schedule.placement
        edges = [way for edge in schedule.graph.edges for way in (edge, edge[::-1])]
        self._hop = {way: costs.hop_between(*way) for way in edges}
        self._transfer = {way: costs.transfer_between(*way) for way in edges}
        self.queued = any(self._transfer.values())
        self._free: dict[tuple[int, int], float] = {}
        self._arrivals: dict[tuple[Action, int], float] = {}

    def send(self, action: Action, worker: int, end: float) -> None:
        """Queue what an action made, each value for another worker on its link."""
        stage = action.stage
        for target in feeds(action, self._graph):
            other = self._placement[target]
            if other != worker:
                leaves = max(end, self._free.get((worker, other), 0.0)) + self._transfer[stage, target]
                self._free[worker, other] = leaves
                self._arrivals[action, target] = leaves + self._hop[stage, target]

    def arrival(self, action: Action, target: int, end: float) -> float:
        """When what an action made, at ``end``, is at the worker of stage ``target``."""
        if self.queued:
            return self._arrivals[action, target]
        return end + self._hop[action.stage, target]

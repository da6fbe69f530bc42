"""Follows all workers of a schedule at once, in an order in which nothing runs before what it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stageflow.errors import ScheduleError
from stageflow.schedule.actions import Action
from stageflow.schedule.rules import depends_on

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule


def walk(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Yield (worker, action, the actions it needs) for every action, each after all it needs.

    Each worker's own order is kept. Raises ScheduleError, after all that can run has been yielded, when workers wait
    for each other or for an action that is nowhere; the error names the cycle.
    """
    graph, whole_backward, orders = schedule.graph, schedule.whole_backward, schedule.orders
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    heads = [0] * len(orders)
    ready = deque(range(len(orders)))
    while ready:
        worker = ready.popleft()
        order = orders[worker]
        for position in range(heads[worker], len(order)):
            action = order[position]
            needs = depends_on(action, graph, whole_backward)
            if not done.issuperset(needs):
                missing = next(need for need in needs if need not in done)
                waiting.setdefault(missing, []).append(worker)
                heads[worker] = position
                break
            yield worker, action, needs
            done.add(action)
            if action in waiting:
                ready.extend(waiting.pop(action))
        else:
            heads[worker] = len(order)
    blocked = {worker: missing for missing, workers in waiting.items() for worker in workers}
    if blocked:
        raise ScheduleError(_explain(schedule, heads, blocked))


def _explain(schedule: Schedule, heads: list[int], blocked: dict[int, Action]) -> str:
    """Why nothing moves: follow who waits for whom until an action is nowhere or a worker comes up twice."""
    where = {action: (w, at) for w, order in enumerate(schedule.orders) for at, action in enumerate(order)}

    def waits(worker: int) -> str:
        at = heads[worker]
        return f"worker {worker} at position {at} ({schedule.orders[worker][at]}) waits for {blocked[worker]}"

    worker = min(blocked)
    path: list[int] = []
    while worker not in path:
        path.append(worker)
        if blocked[worker] not in where:
            return f"schedule {schedule.name!r}: {waits(worker)}, which no worker runs"
        worker = where[blocked[worker]][0]
    lines = [f"schedule {schedule.name!r} deadlocks; each waits for the next, the last for the first:"]
    for waiter in path[path.index(worker) :]:
        holder, at = where[blocked[waiter]]
        lines.append(f"  {waits(waiter)} (worker {holder}, position {at})")
    return "\n".join(lines)

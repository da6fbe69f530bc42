"""Adds to each worker's actions the messages that must cross between workers.

An acyclic schedule always has a lowering that can't deadlock, even on a transport where a send blocks until it is
received: put all transfers of all workers into ONE order in which each comes after the action that makes its value
and before the action that uses it, and let every worker meet its own transfers in that order. `lower` takes the order
of a simulated run, so that a worker that must wait for its peer waits little.

    worker 0: 0F0  0F0>1  0F1  0F1>1  0<1B0  0B0  0<1B1  0B1
    worker 1: 1<0F0  1F0  1<0F1  1B0  1B0>0  1F1  1B1  1B1>0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from stageflow.schedule.actions import Action
from stageflow.schedule.rules import depends_on, is_backward
from stageflow.schedule.simulate import Costs, simulate

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule

Value = Literal["F", "B"]


class Send(NamedTuple):
    """Hand a value to another worker.

    value: "F" the values of a forward; "B" gradients, whether a B or an I made them.
    source, target: the stage that made the value, the stage that uses it.
    microbatch: which micro-batch it belongs to.
    peer: the worker of ``target``.
    """

    value: Value
    source: int
    target: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"{self.source}{self.value}{self.microbatch}>{self.target}"


class Recv(NamedTuple):
    """Take a value from another worker; fields as in `Send`, peer is the worker of ``source``."""

    value: Value
    source: int
    target: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"{self.target}<{self.source}{self.value}{self.microbatch}"


Instruction = Action | Send | Recv


def lower(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Each worker's actions with its sends and receives among them, safe under rendezvous.

    Values that stay on their worker give no instruction. Raises ScheduleError if the schedule has a cycle.
    """
    placement = schedule.placement
    times = simulate(schedule, Costs()).times
    # Sorted by time; a transfer happens when its value is there, before an action that starts at that same moment.
    events: list[tuple[float, int, int, list[tuple[int, Instruction]]]] = []
    for serial, action in enumerate(times):
        worker = placement[action.stage]
        events.append((times[action].start, 1, serial, [(worker, action)]))
        for need in depends_on(action, schedule.graph, schedule.whole_backward):
            source = placement[need.stage]
            if source != worker:
                value: Value = "B" if is_backward(need) else "F"
                message = (value, need.stage, action.stage, action.microbatch)
                ends: list[tuple[int, Instruction]] = [
                    (source, Send(*message, worker)),
                    (worker, Recv(*message, source)),
                ]
                events.append((times[need].end, 0, serial, ends))
    events.sort(key=lambda event: event[:3])
    programs: list[list[Instruction]] = [[] for _ in schedule.orders]
    for _, _, _, parts in events:
        for worker, instruction in parts:
            programs[worker].append(instruction)
    return tuple(tuple(program) for program in programs)

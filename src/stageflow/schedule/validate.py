"""Proves, before anything runs, that a schedule will run to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageflow.errors import ScheduleError
from stageflow.schedule.actions import KINDS, Action
from stageflow.schedule.lower import Instruction, Recv, Send, lower
from stageflow.schedule.memory import Footprint, peak_memory
from stageflow.schedule.text import print_actions

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule


@dataclass(frozen=True)
class Report:
    """What is known about a schedule that passed.

    peak_activations: per worker, the most activations of one stage and one micro-batch it ever keeps for a backward,
        each from its F to the end of its B or W. All 0 for a schedule of forwards only, which keeps none.
    actions: how many actions in all.
    messages: how many of their values cross between workers.
    """

    peak_activations: tuple[int, ...]
    actions: int
    messages: int


def validate(schedule: Schedule) -> Report:
    """Check everything; raises ScheduleError with the worker, position and action of the first fault.

    Passing means: every action stands once on its stage's worker, nothing waits for ever even on a transport whose
    sends block until received, and each worker keeps at most the reported number of activations.
    """
    check_complete(schedule)
    programs = lower(schedule)
    check_rendezvous(programs)
    return Report(
        peak_activations=tuple(map(int, peak_memory(schedule, Footprint()))),
        actions=sum(map(len, schedule.orders)),
        messages=sum(isinstance(instruction, Send) for program in programs for instruction in program),
    )


def check_complete(schedule: Schedule) -> None:
    """Each action once, on the worker of its stage, and for each stage and micro-batch either B, or I and W."""
    seen: dict[Action, tuple[int, int]] = {}
    for worker, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            where = f"schedule {schedule.name!r}: worker {worker} at position {position} ({action})"
            _check_named(schedule, action, where)
            if schedule.placement[action.stage] != worker:
                raise ScheduleError(
                    f"{where}: stage {action.stage} is placed on worker {schedule.placement[action.stage]}"
                )
            if action in seen:
                raise ScheduleError(f"{where}: the same action already stands at position {seen[action][1]}")
            seen[action] = (worker, position)
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.microbatches):
            _check_parts(schedule, stage, microbatch, "".join(k for k in KINDS if Action(k, stage, microbatch) in seen))


def _check_named(schedule: Schedule, action: Action, where: str) -> None:
    if action.kind not in KINDS:
        raise ScheduleError(f"{where}: unknown kind {action.kind!r}, expected one of {', '.join(KINDS)}")
    if not 0 <= action.stage < schedule.n_stages:
        raise ScheduleError(f"{where}: there is no stage {action.stage}, the stages are 0 to {schedule.n_stages - 1}")
    if not 0 <= action.microbatch < schedule.microbatches:
        raise ScheduleError(
            f"{where}: there is no micro-batch {action.microbatch}, they are 0 to {schedule.microbatches - 1}"
        )


def _check_parts(schedule: Schedule, stage: int, microbatch: int, parts: str) -> None:
    if parts in (("FB", "FIW") if schedule.has_backward else ("F",)):
        return
    has = print_actions(Action(kind, stage, microbatch) for kind in KINDS if kind in parts) or "nothing"
    needs = "F and B, or F, I and W" if schedule.has_backward else "F"
    raise ScheduleError(
        f"schedule {schedule.name!r}: worker {schedule.placement[stage]} has {has} for stage {stage}, micro-batch "
        f"{microbatch}; it needs {needs}, each once"
    )


def check_rendezvous(programs: Sequence[Sequence[Instruction]]) -> None:
    """Run lowered programs on a transport where a send and its receive each block until the other is reached.

    Raises ScheduleError with the circle of workers when they get stuck.
    """
    heads = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        worker = ready.popleft()
        program = programs[worker]
        while heads[worker] < len(program):
            instruction = program[heads[worker]]
            if isinstance(instruction, Send | Recv):
                peer = instruction.peer
                if heads[peer] >= len(programs[peer]) or not _meet(instruction, programs[peer][heads[peer]], worker):
                    break
                heads[peer] += 1
                ready.append(peer)
            heads[worker] += 1
    stuck = [worker for worker, program in enumerate(programs) if heads[worker] < len(program)]
    if stuck:
        raise ScheduleError(_explain_rendezvous(programs, heads, stuck[0]))


def _meet(mine: Send | Recv, theirs: Instruction, worker: int) -> bool:
    """Whether a send and a receive are two ends of one message."""
    return (
        isinstance(theirs, Send | Recv)
        and type(theirs) is not type(mine)
        and mine[:4] == theirs[:4]
        and theirs.peer == worker
    )


def _explain_rendezvous(programs: Sequence[Sequence[Instruction]], heads: list[int], worker: int) -> str:
    path: list[int] = []
    lines: dict[int, str] = {}
    while worker not in path:
        path.append(worker)
        position = heads[worker]
        instruction = programs[worker][position]
        assert isinstance(instruction, Send | Recv)
        peer = instruction.peer
        lines[worker] = f"  worker {worker} at position {position} ({instruction}) waits for worker {peer}"
        if heads[peer] >= len(programs[peer]):
            return f"the sends and receives do not match:\n{lines[worker]}, which has already ended"
        worker = peer
    cycle = path[path.index(worker) :]
    return "\n".join(
        ["sends that block until received would deadlock, each waits for the next:", *(lines[w] for w in cycle)]
    )

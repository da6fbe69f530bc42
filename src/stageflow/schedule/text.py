"""One notation for schedules, in tests, errors, traces and files: ``2F0`` is stage 2, forward, micro-batch 0.

A whole schedule is a few header lines and one line per worker; `parse_text` gives back exactly what was printed:

    schedule 1f1b
    stages 2 microbatches 2
    edges 0>1
    placement 0 1
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1

The second line goes on with "copies 2" or "versions 2" where a schedule has more than one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

from stageflow.errors import ScheduleError
from stageflow.schedule.actions import KINDS, Action, Kind, Orders

if TYPE_CHECKING:
    from stageflow.schedule.costs import Costs
    from stageflow.schedule.schedule import Schedule

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_LINE = {
    "schedule": re.compile(r"schedule (.*)"),
    "counts": re.compile(r"stages (\d+) microbatches (\d+)(?: copies (\d+))?(?: versions (\d+))?"),
    "edges": re.compile(r"edges((?: \d+>\d+)*)"),
    "placement": re.compile(r"placement((?: \d+)+)"),
}
_ORDER = re.compile(r"(\d+):(.*)")


def parse_action(text: str) -> Action:
    """``parse_action("2F0") == Action("F", 2, 0)``; raises ScheduleError for what is no action."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"{text!r} is no action: expected stage, F, B, I or W, micro-batch, such as 2F0")
    stage, kind, microbatch = match.groups()
    return Action(cast(Kind, kind), int(stage), int(microbatch))


def parse_actions(text: str) -> tuple[Action, ...]:
    """One worker's order, actions separated by blanks: ``parse_actions("0F0 0F1 0B0 0B1")``."""
    return tuple(parse_action(word) for word in text.split())


def as_actions(order: str | Iterable[str | Action]) -> tuple[Action, ...]:
    """One worker's order, in the notation, or as Actions or single ones in the notation."""
    if isinstance(order, str):
        return parse_actions(order)
    try:
        actions = iter(order)
    except TypeError:
        raise ScheduleError(
            f"{order!r} is no order: expected the actions of one worker, such as '0F0 0F1 0B0 0B1'"
        ) from None
    return tuple(action if _is_action(action) else parse_action(str(action)) for action in actions)


def _is_action(value: object) -> TypeGuard[Action]:
    return isinstance(value, Action) and value.kind in KINDS and value.stage >= 0 and value.microbatch >= 0


def print_actions(actions: Iterable[object]) -> str:
    """Actions (or lowered instructions) separated by blanks."""
    return " ".join(map(str, actions))


def print_text(schedule: Schedule) -> str:
    """A whole schedule in the form that `parse_text` reads."""
    counts = f"stages {schedule.n_stages} microbatches {schedule.microbatches}"
    for word, count in (("copies", schedule.copies), ("versions", schedule.versions)):
        counts += f" {word} {count}" if count != 1 else ""
    lines = [
        f"schedule {schedule.name}",
        counts,
        " ".join(["edges", *(f"{producer}>{consumer}" for producer, consumer in sorted(schedule.graph.edges))]),
        " ".join(["placement", *map(str, schedule.placement)]),
        *(f"{worker}: {print_actions(order)}".rstrip() for worker, order in enumerate(schedule.orders)),
    ]
    return "\n".join(lines)


class Parts(NamedTuple):
    """What the text of a schedule says; names as in `Schedule`."""

    name: str
    stages: int
    edges: frozenset[tuple[int, int]]
    placement: tuple[int, ...]
    microbatches: int
    orders: Orders
    copies: int
    versions: int


def parse_text(text: str) -> Parts:
    """Read what `print_text` wrote.

    Raises ScheduleError that names the line which does not fit.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found: dict[str, re.Match[str]] = {}
    for (number, line), (word, pattern) in zip(lines, _LINE.items(), strict=False):
        match = pattern.fullmatch(line)
        if match is None:
            raise ScheduleError(f"line {number} of the schedule, {line!r}, is no {word} line")
        found[word] = match
    if len(found) < len(_LINE):
        raise ScheduleError(f"the schedule ends before its {list(_LINE)[len(found)]} line")
    orders: list[tuple[Action, ...]] = []
    for number, line in lines[len(_LINE) :]:
        match = _ORDER.fullmatch(line)
        if match is None or int(match[1]) != len(orders):
            raise ScheduleError(
                f"line {number} of the schedule, {line!r}, should hold the order of worker {len(orders)}"
            )
        orders.append(parse_actions(match[2]))
    edges = [edge.split(">") for edge in found["edges"][1].split()]
    stages, microbatches, copies, versions = (int(count or 1) for count in found["counts"].groups())
    return Parts(
        found["schedule"][1],
        stages,
        frozenset((int(producer), int(consumer)) for producer, consumer in edges),
        tuple(map(int, found["placement"][1].split())),
        microbatches,
        tuple(orders),
        copies,
        versions,
    )


def placement_of(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Which worker runs which stage, as the actions themselves tell.

    Raises ScheduleError when a stage shows up on two workers or a number is left out.
    """
    owner: dict[int, int] = {}
    for worker, order in enumerate(orders):
        for action in order:
            if owner.setdefault(action.stage, worker) != worker:
                raise ScheduleError(
                    f"{action} is on worker {worker}, but stage {action.stage} also runs on worker "
                    f"{owner[action.stage]}: a stage belongs to one worker"
                )
    missing = sorted(set(range(max(owner, default=0) + 1)) - set(owner))
    if missing:
        raise ScheduleError(f"no worker runs stage {missing[0]}")
    return tuple(owner[stage] for stage in range(len(owner)))


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """A picture in characters: one row per worker, one cell per unit of time; times must be whole numbers.

    costs: default 1 for F, I and W, 2 for B, no time for hops. An action longer than one unit goes on as dashes,
    a dot is an idle unit. The stage is left out where every worker has only one.

    Example, 1f1b with 2 stages and 3 micro-batches::

        0 | F0 F1 .  .  B0 -- F2 .  B1 -- .  .  B2 --
        1 | .  F0 B0 -- F1 B1 -- .  F2 B2 -- .  .  .
    """
    simulation = schedule.simulate(costs)
    short = schedule.n_stages == schedule.n_workers
    end = round(simulation.makespan)
    rows = [["."] * end for _ in schedule.orders]
    for action, times in simulation.times.items():
        start, stop = (round(time) for time in times)
        label = f"{action.kind}{action.microbatch}" if short else str(action)
        rows[schedule.placement[action.stage]][start:stop] = [label] + ["-" * len(label)] * (stop - start - 1)
    width = max((len(cell) for row in rows for cell in row), default=1)
    head = len(str(len(rows) - 1))
    return "\n".join(
        f"{worker:>{head}} | {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip() for worker, row in enumerate(rows)
    )

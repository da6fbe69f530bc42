"""The table that torch.distributed.pipelining's schedule runtime loads and dumps: one row per worker, one cell per
action.

"compute_only" holds what this package calls actions; an empty cell is a pause. "compute_comms" also says where values
cross and when a stage's gradients are complete:

    0F0        stage 0, forward, micro-batch 0; likewise B, I and W
    0SEND_F0   stage 0 sends on what its forward of micro-batch 0 made
    1RECV_F0   stage 1 receives what its forward of micro-batch 0 needs; SEND_B and RECV_B are the way back
    0REDUCE_GRAD   every backward of stage 0 has ended; the runtime divides the gradient here
    0UNSHARD, 0RESHARD   for fully sharded stages; read over, never written
    (0F1;3B0)OVERLAP_F_B   two actions that may overlap; read as one after the other
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from stageflow.errors import InputError, ScheduleError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.lower import Instruction, Send
from stageflow.schedule.text import parse_action

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule

Form = Literal["compute_only", "compute_comms"]
FORMS: tuple[Form, ...] = ("compute_only", "compute_comms")

_MESSAGE = re.compile(r"\d+(SEND|RECV)_[FB]\d+")
_UPKEEP = re.compile(r"\d+(REDUCE_GRAD|UNSHARD|RESHARD)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def print_table(schedule: Schedule, form: Form) -> str:
    """The whole schedule as text.

    Raises InputError for another form, or if values must cross other than from a stage to the next: the runtime knows
    chains only.
    """
    if form not in FORMS:
        raise InputError(f"unknown form {form!r} of a table; known: {', '.join(FORMS)}")
    if form == "compute_only":
        return _write([map(str, order) for order in schedule.orders])
    if schedule.graph != StageGraph.chain(schedule.n_stages):
        raise InputError(
            f"schedule {schedule.name!r} is not for a chain of stages, and torch's runtime sends values to the next "
            'stage only; form="compute_only" can be written'
        )
    return _write([_with_reductions(program) for program in schedule.lower()])


def parse_table(text: str) -> tuple[Orders, tuple[Counter[str], ...]]:
    """The actions of each worker, and the messages it sends or receives: none in a compute-only table.

    Raises ScheduleError for a cell that is nothing of this.
    """
    orders: list[tuple[Action, ...]] = []
    messages: list[Counter[str]] = []
    for row in csv.reader(io.StringIO(text)):
        cells = [cell.strip() for cell in row]
        if cells in ([], [""]):  # a blank line, as at the end of a file, is no worker
            continue
        messages.append(Counter(cell for cell in cells if _MESSAGE.fullmatch(cell)))
        orders.append(tuple(action for cell in cells for action in _actions(cell)))
    return tuple(orders), tuple(messages)


def check_messages(schedule: Schedule, messages: Sequence[Counter[str]]) -> None:
    """Raise ScheduleError unless a table's messages, where it has any, are those that the schedule needs."""
    if not any(messages):
        return
    for worker, (program, found) in enumerate(zip(schedule.lower(), messages, strict=True)):
        needed = Counter(_cell(instruction) for instruction in program if not isinstance(instruction, Action))
        for what, cells in (("lacks", needed - found), ("has, but must not have,", found - needed)):
            if cells:
                raise ScheduleError(f"row {worker} of the table {what} {min(cells)}")


def _actions(cell: str) -> list[Action]:
    if not cell or _MESSAGE.fullmatch(cell) or _UPKEEP.fullmatch(cell):
        return []
    overlap = _OVERLAP.fullmatch(cell)
    return [parse_action(part) for part in (overlap[1].split(";") if overlap else [cell])]


def _cell(instruction: Instruction) -> str:
    if isinstance(instruction, Action):
        return str(instruction)
    if isinstance(instruction, Send):
        return f"{instruction.source}SEND_{instruction.value}{instruction.microbatch}"
    return f"{instruction.target}RECV_{instruction.value}{instruction.microbatch}"


def _with_reductions(program: Sequence[Instruction]) -> list[str]:
    """The cells of a program; a stage's reduction comes after its last backward and what is sent after that."""
    left = Counter(i.stage for i in program if isinstance(i, Action) and i.kind in ("B", "W"))
    cells: list[str] = []
    complete: list[str] = []
    for instruction in program:
        if isinstance(instruction, Action):
            cells += complete
            complete = []
            if instruction.kind in ("B", "W"):
                left[instruction.stage] -= 1
                if not left[instruction.stage]:
                    complete = [f"{instruction.stage}REDUCE_GRAD"]
        cells.append(_cell(instruction))
    return cells + complete


def _write(rows: Iterable[Iterable[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()

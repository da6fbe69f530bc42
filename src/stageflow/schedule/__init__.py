"""Who does what, when: schedules as data, built, checked, simulated and drawn without torch."""

from stageflow.schedule.actions import KINDS, Action, Kind
from stageflow.schedule.build import SCHEDULES, SIMULATED, build_schedule
from stageflow.schedule.costs import Costs
from stageflow.schedule.lower import Instruction, Recv, Send, lower
from stageflow.schedule.memory import Footprint, peak_memory
from stageflow.schedule.rules import depends_on
from stageflow.schedule.schedule import Schedule
from stageflow.schedule.simulate import simulate
from stageflow.schedule.simulation import Idle, Simulation, Times
from stageflow.schedule.text import parse_action, parse_actions
from stageflow.schedule.validate import Report, check_rendezvous, validate

__all__ = [
    "KINDS",
    "SCHEDULES",
    "SIMULATED",
    "Action",
    "Costs",
    "Footprint",
    "Idle",
    "Instruction",
    "Kind",
    "Recv",
    "Report",
    "Schedule",
    "Send",
    "Simulation",
    "Times",
    "build_schedule",
    "check_rendezvous",
    "depends_on",
    "lower",
    "parse_action",
    "parse_actions",
    "peak_memory",
    "simulate",
    "validate",
]

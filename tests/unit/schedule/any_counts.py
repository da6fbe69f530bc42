"""Names to draw schedules from where any number of stages, workers and micro-batches must do."""

from __future__ import annotations

from stageflow.schedule import SCHEDULES
from stageflow.schedule.families import FAMILIES

ANY_COUNTS = tuple(name for name in SCHEDULES if FAMILIES[name].needs.startswith("any"))

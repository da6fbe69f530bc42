"""Measure a model, cut it, choose its schedule, prove how good that is.

    profile     what every block takes, measured or worked out; devices, the accelerators it is worked out for
    partition   blocks become stages
    search      stages become a schedule
    bounds      what no schedule can beat
    plan        all of it together, with what it predicts
    make        from a model to a plan; choose, of cuts, placements and schedules; stages, what those of a cut cost
    advice      what would make a plan better; verdict, when a pipeline is the wrong tool
    page        a plan as a picture

Names are loaded when first used: only measuring needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageflow.plan.make import make_plan
    from stageflow.plan.partition import Block, Device, Tie
    from stageflow.plan.plan import Advice, Plan
    from stageflow.plan.profile import profile_model

_HOMES = {
    "Advice": "stageflow.plan.plan",
    "Block": "stageflow.plan.partition",
    "Device": "stageflow.plan.partition",
    "Plan": "stageflow.plan.plan",
    "Tie": "stageflow.plan.partition",
    "make_plan": "stageflow.plan.make",
    "profile_model": "stageflow.plan.profile",
}

__all__ = ["Advice", "Block", "Device", "Plan", "Tie", "make_plan", "profile_model"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value

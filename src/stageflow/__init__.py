"""Pipeline parallelism for any PyTorch model: split it into stages, run micro-batches through them.

    import stageflow as sf

    with sf.Pipeline(model, stages=4, microbatches=16, loss=loss_fn, optimizer=partial(AdamW, lr=3e-4)) as pipe:
        loss = pipe.train_step(x, target=y)

Names are loaded when first used, so that planning and simulating work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageflow.checkpoint import load_weights
    from stageflow.errors import StageflowError
    from stageflow.graph import StageGraph
    from stageflow.plan import Device, Plan, make_plan, profile_model
    from stageflow.schedule import SCHEDULES, Action, Costs, Schedule, build_schedule
    from stageflow.split import Split, split_model
    from stageflow.train.callbacks import Callback, Evaluate
    from stageflow.train.pipeline import Pipeline

__version__ = "0.1.0"

_HOMES = {
    "Action": "stageflow.schedule",
    "Callback": "stageflow.train.callbacks",
    "Costs": "stageflow.schedule",
    "Device": "stageflow.plan",
    "Evaluate": "stageflow.train.callbacks",
    "Pipeline": "stageflow.train.pipeline",
    "Plan": "stageflow.plan",
    "SCHEDULES": "stageflow.schedule",
    "Schedule": "stageflow.schedule",
    "Split": "stageflow.split",
    "StageGraph": "stageflow.graph",
    "StageflowError": "stageflow.errors",
    "build_schedule": "stageflow.schedule",
    "load_weights": "stageflow.checkpoint",
    "make_plan": "stageflow.plan",
    "profile_model": "stageflow.plan",
    "split_model": "stageflow.split",
}

__all__ = [
    "SCHEDULES",
    "Action",
    "Callback",
    "Costs",
    "Device",
    "Evaluate",
    "Pipeline",
    "Plan",
    "Schedule",
    "Split",
    "StageGraph",
    "StageflowError",
    "build_schedule",
    "load_weights",
    "make_plan",
    "profile_model",
    "split_model",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

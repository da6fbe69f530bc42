"""A plan in words: its stages, its devices, what a step takes, what to change for more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stageflow.plan.words import table

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan


def describe(plan: Plan) -> str:
    """The plan as text."""
    batch = f"a batch of {_count(plan.samples, 'sample')} in " if plan.samples else ""
    head = (
        f"{plan.model}: {_count(len(plan.stages), 'stage')} on {_count(len(plan.devices), 'device')}, "
        f"{batch}{_count(plan.microbatches, 'micro-batch', 'micro-batches')}, schedule {plan.schedule.name}"
    )
    lines = [
        head,
        "",
        *table(_stage_rows(plan), left=2),
        "",
        *table(_device_rows(plan), left=1),
        "",
        step_line(plan),
        gap_line(plan),
    ]
    if plan.warnings:
        lines += ["", "against a pipeline here:", *(f"- {warning}" for warning in plan.warnings)]
    if plan.advice:
        lines += ["", "for more:", *(f"- {advice}" for advice in plan.advice)]
    return "\n".join(lines)


def step_line(plan: Plan) -> str:
    """What a step takes."""
    rate = f", {plan.samples / plan.step:.4g} samples/s" if plan.samples and plan.step and plan.unit is None else ""
    return f"step {plan.time_words(plan.step)}{rate}, bubble {plan.bubble:.1%}"


def gap_line(plan: Plan) -> str:
    """What is proved about all other schedules."""
    if plan.gap < 5e-4:
        proved = "no schedule whatsoever on this split is faster"
    elif math.isinf(plan.gap):
        proved = "nothing is proved about other schedules on this split"
    else:
        proved = f"no schedule whatsoever on this split can be more than {up_percent(plan.gap)} faster"
    return f"{proved} (bound {plan.time_words(plan.bound.seconds)}: {plan.bound.reason})"


def up_percent(share: float) -> str:
    """A share in percent, rounded up: what is claimed must stay true."""
    return f"{math.ceil(share * 1000 - 1e-9) / 10:.1f}%"


def _stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    known = any(stage.parameters for stage in plan.stages)
    rows = [("stage", "blocks", "device", *["parameters"] * known, "time", "memory", "recompute")]
    for number, stage in enumerate(plan.stages):
        rows.append(
            (
                str(number),
                _abridge(stage.blocks),
                str(stage.device),
                *[plan.size_words(stage.parameters)] * known,
                plan.time_words(stage.time),
                plan.size_words(plan.stage_memory[number]),
                "yes" if stage.recompute else "no",
            )
        )
    return rows


def _device_rows(plan: Plan) -> list[tuple[str, ...]]:
    limited = any(not math.isinf(device.memory) for device in plan.devices)
    rows = [("device", "stages", "busy", "peak memory", *["of"] * limited)]
    for number, (device, peak) in enumerate(zip(plan.devices, plan.memory, strict=True)):
        stages = ", ".join(map(str, plan.schedule.stages_of(number)))
        busy = plan.simulation.busy[number] / plan.step if plan.step else 0.0
        of = [plan.size_words(device.memory)] * limited
        rows.append((str(number), stages, f"{busy:.1%}", plan.size_words(peak), *of))
    return rows


def _abridge(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"

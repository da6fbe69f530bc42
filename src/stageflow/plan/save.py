"""A plan as JSON and back, exactly: numbers keep every digit, and a file that was changed is told from a whole one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError, StageflowError
from stageflow.plan.bounds import Bound
from stageflow.plan.partition import Block, Device, Tie
from stageflow.plan.sealed import Kind
from stageflow.schedule import Schedule

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan

KIND = Kind("plan", 1, "Plan.to_json", "make it anew")


def to_json(plan: Plan) -> str:
    """The plan's text; `from_json` gives an equal plan."""
    body = {
        "model": plan.model,
        "samples": plan.samples,
        "unit": plan.unit,
        "ties": [_fields(tie) for tie in plan.ties],
        "blocks": [_fields(block) for block in plan.blocks],
        "devices": [_fields(device) for device in plan.devices],
        "cuts": list(plan.cuts),
        "recompute": list(plan.recompute),
        "schedule": str(plan.schedule).splitlines(),
        "bound": _fields(plan.bound),
        "warnings": list(plan.warnings),
        "advice": [_fields(advice) for advice in plan.advice],
    }
    return KIND.seal(body)


def from_json(source: str | Path) -> Plan:
    """Read what `to_json` wrote, from a file or from the text itself. Raises InputError that names what is wrong."""
    body, where = KIND.open(source)
    try:
        return _plan(body)
    except (KeyError, TypeError, ValueError, StageflowError) as error:
        raise InputError(f"{where} is a damaged plan: {error!r}") from error


def _plan(body: dict[str, Any]) -> Plan:
    from stageflow.plan.plan import Advice, Plan

    return Plan(
        model=body["model"],
        blocks=tuple(Block(**_numbers(each)) for each in body["blocks"]),
        devices=tuple(Device(**_numbers(each)) for each in body["devices"]),
        cuts=tuple(body["cuts"]),
        recompute=tuple(body["recompute"]),
        schedule=Schedule.parse("\n".join(body["schedule"])),
        bound=Bound(**_numbers(body["bound"])),
        samples=body["samples"],
        unit=body["unit"],
        ties=tuple(Tie(**{**each, "blocks": tuple(each["blocks"])}) for each in body["ties"]),
        warnings=tuple(body["warnings"]),
        advice=tuple(Advice(**_numbers(each)) for each in body["advice"]),
    )


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass as JSON has it, which knows no infinity."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _numbers(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(each) for name, each in value.items()}


def _number(value: Any) -> Any:
    if value in ("inf", "-inf"):
        return float(value)
    return _numbers(value) if isinstance(value, dict) else value

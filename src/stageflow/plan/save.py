"""A plan as JSON and back, exactly: numbers keep every digit, and a file that was changed is told from a whole one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError, StageflowError
from stageflow.plan.bounds import Bound
from stageflow.plan.partition import Block, Device, Tie
from stageflow.schedule import Schedule

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan

FORMAT, VERSION = "stageflow plan", 1


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
    return json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}, indent=1) + "\n"


def from_json(source: str | Path) -> Plan:
    """Read what `to_json` wrote, from a file or from the text itself. Raises InputError that names what is wrong."""
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    where = "this text" if is_text else str(source)
    try:
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        read = json.loads(text)
    except OSError as error:
        raise InputError(f"{where} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON, so no plan: {error}") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise InputError(
            f'{where} is no plan: expected a JSON object with "format": "{FORMAT}", as Plan.to_json writes'
        )
    if read.get("version") != VERSION:
        raise InputError(
            f"{where} is a plan of version {read.get('version')!r}; this stageflow reads {VERSION}: make it anew"
        )
    body = {name: value for name, value in read.items() if name not in ("format", "version", "digest")}
    if read.get("digest") != _digest(body):
        raise InputError(f"{where} was changed or cut off since it was written: its digest is not that of its content")
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


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

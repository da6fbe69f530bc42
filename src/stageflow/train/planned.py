"""What a plan says about a pipeline, and the arguments that must not contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError
from stageflow.runtime.stage import Recompute

if TYPE_CHECKING:
    from stageflow.plan import Plan

_COUNTS = ("stages", "microbatches", "workers")


def check_plan(plan: Any) -> Plan | None:
    """Raise InputError for what is no plan."""
    if plan is None:
        return None
    from stageflow.plan import Plan  # only who has a plan needs what makes them

    if isinstance(plan, Plan):
        return plan
    hint = "read it with Plan.from_json first" if isinstance(plan, str) else "make one with make_plan"
    raise InputError(f"plan= must be a stageflow.Plan, got {type(plan).__name__}: {hint}")


def follow(plan: Plan | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Pipeline` as the plan says, or as given without one.

    given: "stages", "microbatches", "schedule", "workers", "boundaries", "recompute", "balance", each at its default
    where the user said nothing. A number that is the plan's own may be given as well; anything else is refused.
    Raises InputError.
    """
    if plan is None:
        return {**given, "schedule": given["schedule"] or "1f1b"}
    says: dict[str, Any] = {
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "workers": len(plan.devices),
        "schedule": plan.schedule,
        "boundaries": plan.boundaries,
        "recompute": recompute_of(plan),
    }
    for name, value in given.items():
        silent = value is None or (name == "stages" and value == "auto") or (name == "balance" and value == "time")
        if silent or (name in _COUNTS and value == says[name]):
            continue
        plans = f"the plan has {says[name]}" if name in _COUNTS else "the plan decides that"
        raise InputError(f"{name}={value!r} beside plan=: {plans}. Leave {name} out, or make a plan for it")
    return {**given, **says}


def recompute_of(plan: Plan) -> tuple[Recompute | None, ...]:
    """Per stage, as the runtime takes it."""
    return tuple("stage" if again else None for again in plan.recompute)

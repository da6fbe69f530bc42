"""What a plan says about a pipeline, and the arguments that must not contradict it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stageflow.errors import InputError
from stageflow.launch.devices import choose_devices
from stageflow.plan.shapes import AUTO
from stageflow.runtime.batch import TARGET, MicroBatch
from stageflow.runtime.loss import takes_target
from stageflow.runtime.stage import Recompute, StageOptions
from stageflow.split.signature import positional_names
from stageflow.train.arguments import Model

if TYPE_CHECKING:
    from stageflow.plan import Plan
    from stageflow.train.blueprint import Blueprint

ROUNDS = 5  # of measuring
SECONDS = 2.0  # of searching
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
        if given["schedule"] == AUTO:
            _check_free(given)
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


def _check_free(given: Mapping[str, Any]) -> None:
    """Raise InputError for what can't be said beside schedule="auto"."""
    if given["boundaries"] is not None or given["balance"] != "time":
        what = "boundaries" if given["boundaries"] is not None else "balance"
        raise InputError(f"{what}={given[what]!r} beside schedule='auto', which cuts the model by what it measures")
    if isinstance(given["recompute"], (list, tuple)):
        raise InputError("recompute= has one entry per stage beside schedule='auto', which decides the stages")


def plan_for(
    model: Model,
    inputs: MicroBatch,
    blueprint: Blueprint,
    splitting: Mapping[str, Any],
    planning: Mapping[str, Any],
    starting: Mapping[str, Any],
    setting_up: Mapping[str, Any],
) -> Plan:
    """Measure the model on a micro-batch, and plan for the pipeline's own workers.

    planning: "batch_dims" and "recompute" as the user gave them. The rest as for `Life`.
    """
    from stageflow.plan import Device, make_plan, profile_model

    options: StageOptions = setting_up["options"]
    devices = choose_devices(blueprint.n_workers, starting["devices"])
    stages = None if blueprint.any_stages else blueprint.stages
    has_loss = inputs.target is not None or options.loss is None or not takes_target(options.loss)
    given = {*positional_names(model)[: len(inputs.args)], *map(str, range(len(inputs.args))), *inputs.kwargs}
    if inputs.target is not None:
        given.add(TARGET)
    recompute = planning["recompute"]
    profile = profile_model(
        model,
        inputs.copied_inputs(),
        target=inputs.target,
        batch_dims={name: dim for name, dim in planning["batch_dims"].items() if name in given},
        loss=options.loss if has_loss else None,
        optimizer=setting_up["optimizer"].optimizer,
        split=splitting["split"],
        at_least=stages or len(devices),
        device=devices[0],
        dtype=setting_up["dtype"],
        autocast=options.autocast,
        threads=starting["threads"],
        rounds=ROUNDS,
    )
    return make_plan(
        profile=profile,
        devices=[Device(memory=_memory_of(name)) for name in devices],
        microbatches=blueprint.microbatches,
        stages=stages,
        recompute="auto" if recompute is None else bool(recompute),
        name=profile.model,
        seconds=SECONDS,
        progress=False,
    )


def _memory_of(device: str) -> float:
    """Bytes of an accelerator; what the CPU has is shared by all workers, and not limited here."""
    if not device.startswith("cuda"):
        return math.inf
    return float(torch.cuda.get_device_properties(device).total_memory)


def recompute_of(plan: Plan) -> tuple[Recompute | None, ...]:
    """Per stage, as the runtime takes it."""
    return tuple("stage" if again else None for again in plan.recompute)

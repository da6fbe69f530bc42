"""Chooses cuts, placement, recomputation, number of micro-batches and schedule together. Pure.

Every shape (a number of micro-batches, of stages per device, and a placement) gets its best cuts by the model of a
step, then a quick search for its schedule. Cuts move by a block, and stages stop recomputing, wherever the simulated
step gets shorter by it. Shapes whose bound with these cuts is no better than the best step found go; the best of the
others share the rest of the time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stageflow.errors import SplitError, StageflowError
from stageflow.plan.advice import advise, moved_cuts
from stageflow.plan.bounds import Bound, lower_bound
from stageflow.plan.drafts import Draft, draft
from stageflow.plan.partition import Device
from stageflow.plan.plan import Plan
from stageflow.plan.search import find_schedule
from stageflow.plan.shapes import AUTO, Shape, Wish, Work, shapes_of
from stageflow.plan.stages import costs_of, footprint_of, plan_stages
from stageflow.plan.verdict import speaks_against
from stageflow.plan.words import size_words
from stageflow.schedule import build_schedule

QUICK, FINAL, ADVICE = 0.35, 0.5, 0.15  # shares of the time: a first look at all shapes, the finalists, advice
FINALISTS = 2
MOVES = 300_000  # actions simulated while cuts move: bounds the time without looking at a clock

Tell = Callable[[str], None]


def choose(works: Sequence[Work], wish: Wish, names: Mapping[str, Any], tell: Tell) -> Plan:
    """The best plan found, with its bound.

    works: one batch, cut into each of the numbers of micro-batches to choose from.
    names: of a `Plan`: model, samples, unit. tell: is told what goes on.
    Raises SplitError where nothing fits into memory, InputError for what can't be.
    """
    drafts, refusals = _drafts(works, wish)
    found: list[Plan] = []
    for number, each in enumerate(drafts):
        tell(f"schedules of {each.shape}")
        try:
            plan = _schedule(each, wish, names, QUICK * wish.seconds / len(drafts), number)
            found.append(_move(plan, wish, MOVES // len(drafts)))
        except StageflowError as error:
            refusals.append((each.shape, error))
    if not found:
        raise _nothing_fits(refusals)
    best = min(found, key=lambda plan: plan.step)
    rivals = sorted((plan for plan in found if plan.bound.seconds < best.step), key=lambda plan: plan.step)[:FINALISTS]
    for plan in rivals:
        tell(f"cuts and schedule of {len(plan.stages)} stages, {plan.microbatches} micro-batches")
        best = min(best, _improve(plan, wish, FINAL * wish.seconds / len(rivals)), key=lambda plan: plan.step)
    return best


def judge(plan: Plan, wish: Wish, tell: Tell) -> Plan:
    """The plan with what speaks against it and what to change for more."""
    tell("what to change for more")
    return dataclasses.replace(plan, warnings=speaks_against(plan), advice=advise(plan, _searcher(wish)))


def _nothing_fits(refusals: Sequence[tuple[Shape, StageflowError]]) -> StageflowError:
    if len(refusals) == 1:
        return refusals[0][1]
    return SplitError("no plan fits:" + "".join(f"\n  {shape}: {error}" for shape, error in refusals))


def _drafts(works: Sequence[Work], wish: Wish) -> tuple[list[Draft], list[tuple[Shape, StageflowError]]]:
    """Every shape with its cuts, each once; and those that don't fit, with the reason."""
    drafts: dict[Draft, None] = {}
    refusals: list[tuple[Shape, StageflowError]] = []
    for work in works:
        for shape in shapes_of(work, wish):
            for overlap in (False, True):
                try:
                    drafts[draft(shape, wish, overlap)] = None
                except StageflowError as error:
                    if not overlap:
                        refusals.append((shape, error))
    return list(drafts), refusals


def _schedule(of: Draft, wish: Wish, names: Mapping[str, Any], seconds: float, number: int) -> Plan:
    """A draft with a schedule. Raises StageflowError where none fits into memory."""
    work, placement = of.shape.work, of.shape.placement
    stages = plan_stages(work.blocks, of.cuts, placement, of.recompute, wish.devices, work.ties)
    costs, footprint = costs_of(stages, wish.devices), footprint_of(stages)
    memory = _limits(wish.devices)
    if wish.schedule == AUTO:
        found = find_schedule(
            stages=len(stages),
            microbatches=work.microbatches,
            costs=costs,
            placement=placement,
            footprint=footprint,
            memory=memory,
            seconds=seconds,
            seed=wish.seed + number,
        )
        schedule, bound = found.schedule, found.bound
    else:
        schedule = build_schedule(
            wish.schedule, stages=len(stages), microbatches=work.microbatches, placement=placement
        )
        bound = lower_bound(costs, placement, work.microbatches, footprint=footprint, memory=memory, split=True)
    plan = Plan(
        blocks=work.blocks,
        devices=wish.devices,
        cuts=of.cuts,
        recompute=of.recompute,
        schedule=schedule,
        bound=bound,
        ties=work.ties,
        **names,
    )
    _check_memory(plan)
    return plan


def _limits(devices: Sequence[Device]) -> list[float] | None:
    """Bytes per worker, or None where there is no limit at all."""
    return None if all(math.isinf(device.memory) for device in devices) else [device.memory for device in devices]


def _check_memory(plan: Plan) -> None:
    for number, (peak, device) in enumerate(zip(plan.memory, plan.devices, strict=True)):
        if peak > device.memory:
            raise SplitError(
                f"schedule {plan.schedule.name!r} needs {size_words(peak)} on device {number}, which has "
                f"{size_words(device.memory)}: take schedule='auto', recompute=True, more micro-batches or devices"
            )


def _improve(plan: Plan, wish: Wish, seconds: float) -> Plan:
    """Better cuts for its orders, then better orders for its cuts."""
    moved = _move(plan, wish, MOVES)
    better = Draft(
        Shape(Work(plan.microbatches, plan.blocks, plan.ties), plan.placement, ""), moved.cuts, moved.recompute
    )
    names = {"model": plan.model, "samples": plan.samples, "unit": plan.unit}
    try:
        return min(moved, _schedule(better, wish, names, seconds, 0), key=lambda plan: plan.step)
    except StageflowError:  # none was found that fits with these cuts: the orders there are do
        return moved


def _move(plan: Plan, wish: Wish, actions: int) -> Plan:
    """Move cuts by a block, and let stages keep what they would recompute, as long as the same orders get faster.

    actions: how many to simulate at most.
    """
    tries = actions // sum(map(len, plan.schedule.orders))
    moved, better = plan, True
    while better:
        better = False
        for changes in _changes(moved, wish)[:tries]:
            other = dataclasses.replace(moved, **changes)
            tries -= 1
            if other.step < moved.step * (1 - 1e-9) and other.fits:
                moved, better = other, True
                break
    return plan if moved is plan else dataclasses.replace(moved, bound=_bound(moved))


def _bound(plan: Plan) -> Bound:
    return lower_bound(
        plan.costs, plan.placement, plan.microbatches, footprint=plan.footprint, memory=_limits(plan.devices)
    )


def _changes(plan: Plan, wish: Wish) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = [{"cuts": cuts} for cuts in moved_cuts(plan.cuts)]
    if wish.recompute == "auto":
        for stage, again in enumerate(plan.recompute):
            if again:
                keeping = tuple(flag and other != stage for other, flag in enumerate(plan.recompute))
                changes.append({"recompute": keeping})
    return changes


def _searcher(wish: Wish) -> Callable[[Plan, int, bool], float]:
    """Steps of other schedules for a plan's stages, see `advice.Search`."""

    def search(plan: Plan, microbatches: int, limited: bool) -> float:
        if plan.schedule.name == wish.schedule:
            built = build_schedule(
                wish.schedule, stages=len(plan.stages), microbatches=microbatches, placement=plan.placement
            )
            if limited:
                _check_memory(dataclasses.replace(plan, schedule=built))
            return built.simulate(plan.costs).makespan
        found = find_schedule(
            stages=len(plan.stages),
            microbatches=microbatches,
            costs=plan.costs,
            placement=plan.placement,
            footprint=plan.footprint,
            memory=_limits(wish.devices) if limited else None,
            seconds=ADVICE * wish.seconds / 2,
            seed=wish.seed,
        )
        return found.simulation.makespan

    return search

"""What to change for more: every change is tried on paper, and told with what it would bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from stageflow.errors import StageflowError
from stageflow.plan.plan import Advice
from stageflow.plan.stages import costs_of, plan_stages

if TYPE_CHECKING:
    from stageflow.plan.partition import Block, Device
    from stageflow.plan.plan import Plan

WORTH = 0.005  # of a sample's time; what brings less is not told
FREE = 0.002  # of a step's time; what costs less counts as free
LIGHTER = 0.5

Search = Callable[["Plan", int, bool], float]
"""Seconds of the best step found for other (micro-batches, memory limited or not) with the plan's stages.

Raises StageflowError where there is none.
"""


def advise(plan: Plan, search: Search) -> tuple[Advice, ...]:
    """All that would bring something, the most first; then what could grow without making a step longer."""
    changes = [
        *_microbatches(plan, search),
        *_more_memory(plan, search),
        *_another_cut(plan),
        *_lighter_head(plan),
        *_narrower_block(plan),
        *_faster_link(plan),
    ]
    worth = sorted((c for c in changes if c.gain >= WORTH), key=lambda change: -change.gain)
    return (*worth, *_wider_block(plan))


@dataclass(frozen=True)
class Variant:
    """The plan's own orders with other blocks, cuts or devices."""

    blocks: Sequence[Block]
    cuts: Sequence[int]
    devices: Sequence[Device]
    recompute: Sequence[bool]

    @classmethod
    def of(cls, plan: Plan) -> Variant:
        return cls(plan.blocks, plan.cuts, plan.devices, plan.recompute)

    def step(self, plan: Plan) -> float:
        """Seconds of a step."""
        stages = plan_stages(self.blocks, self.cuts, plan.placement, self.recompute, self.devices, plan.ties)
        return plan.schedule.simulate(costs_of(stages, self.devices)).makespan


def _gain(plan: Plan, step: float) -> float:
    return 1 - step / plan.step if plan.step else 0.0


def _microbatches(plan: Plan, search: Search) -> Iterator[Advice]:
    """Twice as many of the same size: a batch twice as large, so what counts is the time of a sample."""
    try:
        step = search(plan, 2 * plan.microbatches, True)
    except StageflowError:  # they don't fit into memory
        return
    yield Advice(
        f"{2 * plan.microbatches} micro-batches instead of {plan.microbatches}, each as large as now",
        step,
        _gain(plan, step / 2),
    )


def _more_memory(plan: Plan, search: Search) -> Iterator[Advice]:
    if not any(peak > 0.8 * device.memory for peak, device in zip(plan.memory, plan.devices, strict=True)):
        return
    try:
        step = search(plan, plan.microbatches, False)
    except StageflowError:
        return
    yield Advice("devices with more memory, the same cuts", step, _gain(plan, step))


def _another_cut(plan: Plan) -> Iterator[Advice]:
    """Every cut one block to the left or right, if that fits into memory; the best of them."""
    best: Advice | None = None
    for cuts in moved_cuts(plan.cuts):
        moved = dataclasses.replace(plan, cuts=cuts)
        if moved.fits and (best is None or moved.step < best.step):
            at = next(i for i, (old, new) in enumerate(zip(plan.cuts, cuts, strict=True)) if old != new)
            words = (
                f"stage {at} starts at {plan.blocks[cuts[at]].name!r} instead of {plan.blocks[plan.cuts[at]].name!r}"
            )
            best = Advice(words, moved.step, _gain(plan, moved.step))
    if best is not None:
        yield best


def moved_cuts(cuts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every cut moved by one block, one at a time; no stage gets empty."""
    for at in range(1, len(cuts) - 1):
        for way in (-1, 1):
            moved = (*cuts[:at], cuts[at] + way, *cuts[at + 1 :])
            if all(start < end for start, end in pairwise(moved)):
                yield moved


def _lighter_head(plan: Plan) -> Iterator[Advice]:
    """The last block is what turns into scores or a loss, and what balance often fails at."""
    head = plan.blocks[-1]
    step = dataclasses.replace(Variant.of(plan), blocks=[*plan.blocks[:-1], _scaled(head, LIGHTER)]).step(plan)
    yield Advice(f"a head {head.name!r} of half the work", step, _gain(plan, step))


def _scaled(block: Block, factor: float) -> Block:
    times = ("forward", "backward", "backward_input", "backward_weight")
    changed = {name: getattr(block, name) * factor for name in times}
    return dataclasses.replace(block, recompute=block.again * factor, **changed)


def _narrower_block(plan: Plan) -> Iterator[Advice]:
    """The slowest device's largest block, so far narrowed that its device works no longer than the others."""
    load = device_loads(plan)
    slowest = max(range(len(load)), key=load.__getitem__)
    others = sum(load) - load[slowest]
    if len(load) < 2:
        return
    excess = load[slowest] - others / (len(load) - 1)
    at = _largest_block(plan, slowest)
    time = _block_time(plan, at)
    if excess <= 0 or not time:
        return
    factor = max(0.0, 1 - excess / time)
    blocks = [*plan.blocks[:at], _scaled(plan.blocks[at], factor), *plan.blocks[at + 1 :]]
    step = dataclasses.replace(Variant.of(plan), blocks=blocks).step(plan)
    less = plan.time_words(min(excess, time))
    name = plan.blocks[at].name
    yield Advice(
        f"block {name!r} narrowed from {plan.time_words(time)} by {less}, as device {slowest} works that much "
        "longer per micro-batch than the others",
        step,
        _gain(plan, step),
    )


def device_loads(plan: Plan) -> list[float]:
    """Seconds of work per micro-batch of each device."""
    load = [0.0] * len(plan.devices)
    for stage in plan.stages:
        load[stage.device] += stage.time
    return load


def _largest_block(plan: Plan, device: int) -> int:
    own = [
        block
        for stage, (start, end) in enumerate(pairwise(plan.cuts))
        if plan.placement[stage] == device
        for block in range(start, end)
    ]
    return max(own, key=lambda block: _block_time(plan, block))


def _block_time(plan: Plan, at: int) -> float:
    """Seconds per micro-batch on its device."""
    stage = next(s for s, end in enumerate(plan.cuts[1:]) if at < end)
    block = plan.blocks[at]
    again = block.again if plan.recompute[stage] else 0.0
    return (block.forward + block.backward + again) / plan.devices[plan.placement[stage]].speed


def _faster_link(plan: Plan) -> Iterator[Advice]:
    """Half the latency, twice the bandwidth."""
    devices = [dataclasses.replace(d, latency=d.latency / 2, bandwidth=2 * d.bandwidth) for d in plan.devices]
    step = dataclasses.replace(Variant.of(plan), devices=devices).step(plan)
    yield Advice("links twice as fast", step, _gain(plan, step))


def _wider_block(plan: Plan) -> Iterator[Advice]:
    """The least busy device's largest block may grow until the step gets longer; how far is found by halving."""
    load = device_loads(plan)
    idlest = min(range(len(load)), key=load.__getitem__)
    if load[idlest] >= (1 - 2 * WORTH) * max(load):
        return
    at = _largest_block(plan, idlest)
    time = _block_time(plan, at)

    def step(factor: float) -> float:
        blocks = [*plan.blocks[:at], _scaled(plan.blocks[at], factor), *plan.blocks[at + 1 :]]
        return dataclasses.replace(Variant.of(plan), blocks=blocks).step(plan)

    free, most = 1.0, 1.0 + (max(load) - load[idlest]) / time if time else 1.0
    for _ in range(6):
        middle = (free + most) / 2
        free, most = (middle, most) if step(middle) <= plan.step * (1 + FREE) else (free, middle)
    if free - 1 > WORTH:
        yield Advice(
            f"block {plan.blocks[at].name!r} may take {plan.time_words((free - 1) * time)} more than its "
            f"{plan.time_words(time)} at no cost, as device {idlest} has time to spare",
            step(free),
            0.0,
        )

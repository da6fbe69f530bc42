"""The pictures of a plan that are no timeline: memory of every device over time, and how evenly work is shared out."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from stageflow.observe.picture import LABEL_WIDTH

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan
    from stageflow.plan.stages import PlannedStage

WIDTH, RIGHT = 1000, 12
ROW, GAP = 54, 16
BAR, BAR_GAP, WORDS = 18, 10, 150


def memory_chart(plan: Plan) -> str:
    """Bytes on every device over the step, one row each on one scale, with the limit where there is one near."""
    history = plan.simulation.memory(plan.footprint)
    limits = [device.memory for device in plan.devices]
    top = max(plan.memory) or 1.0
    top = max([top, *(limit for limit in limits if limit <= 2 * top)])
    height = len(history) * (ROW + GAP) + 4
    width = WIDTH - LABEL_WIDTH - RIGHT
    rows: list[str] = []
    for device, steps in enumerate(history):
        base = device * (ROW + GAP) + ROW + 2
        points = [(time, level) for time, level in steps] + [(plan.step, steps[-1][1])]
        path = [f"M{LABEL_WIDTH} {base}"]
        for (time, level), (until, _) in pairwise(points):
            y = base - ROW * level / top
            path.append(f"L{_x(time, plan, width):.1f} {y:.1f}L{_x(until, plan, width):.1f} {y:.1f}")
        path.append(f"L{_x(plan.step, plan, width):.1f} {base}Z")
        peak, of = plan.size_words(plan.memory[device]), ""
        if not math.isinf(limits[device]):
            of = f"of {plan.size_words(limits[device])}"
        rows.append(
            f'<g><title>device {device}: at most {peak} {of}</title><path class="memory" d="{"".join(path)}"/>'
            f"{_limit(limits[device], top, base)}"
            f'<text class="name" x="2" y="{base - ROW + 12}">device {device}</text>'
            f'<text class="held" x="2" y="{base - ROW + 28}">{peak}</text>'
            f'<text class="held" x="2" y="{base - ROW + 43}">{of}</text></g>'
        )
    return _svg("Memory of every device over the step", height, rows)


def _x(time: float, plan: Plan, width: float) -> float:
    return LABEL_WIDTH + (time / plan.step if plan.step else 0.0) * width


def _limit(limit: float, top: float, base: float) -> str:
    if limit > top:
        return ""
    y = base - ROW * limit / top
    return f'<line class="limit" x1="{LABEL_WIDTH}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def balance_chart(plan: Plan) -> str:
    """Work of every stage per micro-batch, by kind, as bars on one scale."""
    longest = max(stage.time for stage in plan.stages) or 1.0
    scale = (WIDTH - LABEL_WIDTH - WORDS - RIGHT) / longest
    rows: list[str] = []
    for number, stage in enumerate(plan.stages):
        y = number * (BAR + BAR_GAP) + 2
        parts, x = [], float(LABEL_WIDTH)
        for kind, name, seconds in _parts(plan, number, stage):
            words = f"stage {number}, {name}: {plan.time_words(seconds)}"
            parts.append(
                f'<g class="ev {kind}"><title>{escape(words)}</title>'
                f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{BAR}"/></g>'
            )
            x += seconds * scale
        middle = y + BAR / 2
        total = f"{plan.time_words(stage.time)}, {stage.time / longest:.0%}"
        rows.append(
            f'<text class="name" x="2" y="{middle}">stage {number}</text>{"".join(parts)}'
            f'<text class="held" x="{x + 8:.1f}" y="{middle}">{total}</text>'
        )
    return _svg("Work of every stage per micro-batch", len(rows) * (BAR + BAR_GAP) + 2, rows)


def _parts(plan: Plan, number: int, stage: PlannedStage) -> list[tuple[str, str, float]]:
    """Kind, words, seconds of what a stage does for a micro-batch."""
    parts = [("F", "forward", stage.forward)]
    if stage.again:
        parts.append(("F later", "forward again, for the backward", stage.again))
    if plan.schedule.splits_backward(number):
        parts.append(("I", "gradient of the inputs", stage.backward_input))
        return [*parts, ("W", "gradient of the weights", stage.backward_weight)]
    return [*parts, ("B", "backward", stage.backward)]


def _svg(title: str, height: float, rows: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stageflow-timeline chart" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="{escape(title)}">{"".join(rows)}</svg>'
    )

"""A plan as one HTML page that loads nothing: the step as a timeline, memory over time, balance, what to change."""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from stageflow.observe.picture import render_svg
from stageflow.plan.charts import balance_chart, memory_chart
from stageflow.plan.table import gap_line, up_percent

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan

_STYLE = """
.chart { display: block; width: 100%; min-width: 640px; height: auto; }
.chart .memory { fill: var(--F); fill-opacity: 0.55; stroke: var(--F); stroke-width: 1; }
.chart .limit { stroke: var(--I); stroke-width: 1.2; stroke-dasharray: 5 4; }
.advice { max-width: 90ch; padding-left: 18px; }
.advice li { margin: 3px 0; }
.proof { margin: -6px 0 18px; max-width: 90ch; }
td.words { text-align: left; }
"""


def render_page(plan: Plan) -> str:
    """The page's text. Pictures stand beside their numbers, and all of it reads without its script."""
    title = f"Plan of {plan.model}"
    steps = render_svg(plan.simulation.events(), workers=len(plan.devices), title=title, unit=plan.unit)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_asset("page.css")}{_STYLE}</style>
<style id="dim"></style>
</head>
<body>
<h1>{escape(title)}</h1>
{_figures(plan)}
<p class="proof">{escape(gap_line(plan).capitalize())}.</p>
{_list("Against a pipeline here", plan.warnings)}
<div class="stage">
{steps}
<div class="tools" hidden><button value="in">zoom in</button><button value="out">zoom out</button>\
<button value="all">whole step</button><span>wheel to zoom, drag to move, point at a block to follow its \
micro-batch</span></div>
</div>
<h2>Memory of every device over the step</h2>
<div class="wide">{memory_chart(plan)}</div>
<h2>Work of every stage per micro-batch</h2>
<div class="wide">{balance_chart(plan)}</div>
<h2>Stages</h2>
{_table(plan)}
{_list("For more", [str(advice) for advice in plan.advice])}
<div id="tip" hidden></div>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    """The pages of a measured step and of a plan look and zoom alike."""
    return files("stageflow.observe").joinpath(name).read_text(encoding="utf-8")


def _figures(plan: Plan) -> str:
    cells = [
        (plan.time_words(plan.step), "step"),
        (f"{plan.bubble:.1%}", "bubble"),
        ("unknown" if math.isinf(plan.gap) else up_percent(plan.gap), "gap to the bound"),
        (plan.size_words(max(plan.memory)), "largest peak of memory"),
        (str(len(plan.devices)), "devices"),
        (str(len(plan.stages)), "stages"),
        (str(plan.microbatches), "micro-batches"),
        (plan.schedule.name, "schedule"),
    ]
    items = "".join(f"<li><b>{escape(value)}</b><span>{words}</span></li>" for value, words in cells)
    return f'<ul class="figures">{items}</ul>'


def _table(plan: Plan) -> str:
    head = ("stage", "blocks", "device", "parameters", "time", "memory", "recompute")
    rows: list[str] = []
    for number, stage in enumerate(plan.stages):
        first, last = escape(stage.blocks[0]), escape(stage.blocks[-1])
        cells = (
            str(stage.device),
            plan.size_words(stage.parameters),
            plan.time_words(stage.time),
            plan.size_words(plan.stage_memory[number]),
            "yes" if stage.recompute else "no",
        )
        blocks = first if len(stage.blocks) == 1 else f"{first} … {last} <small>({len(stage.blocks)})</small>"
        rows.append(
            f'<tr><td>{number}</td><td class="words">{blocks}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        )
    return (
        f'<div class="wide"><table><thead><tr>{"".join(f"<th>{word}</th>" for word in head)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _list(title: str, lines: tuple[str, ...] | list[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>{title}</h2><ul class="advice">{items}</ul>'

"""A step as a page or as text: what each worker did when, beside what was predicted, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from stageflow.observe.events import COMPUTE_KINDS, Event
from stageflow.observe.metrics import CAUSES, Summary, step_span, summarize
from stageflow.observe.picture import Scale, render_svg

_COLUMNS = {
    "fill": "fill",
    "activations": "waiting for activations",
    "gradients": "waiting for gradients",
    "send": "sending",
    "overhead": "overhead",
    "drain": "drain",
}


def render_html(
    events: Sequence[Event],
    *,
    title: str,
    workers: int,
    predicted: Sequence[Event] | None = None,
    unit: str | None = None,
) -> str:
    """One step as one self-contained HTML page: it loads nothing and opens from a file.

    Wheel, drag, the keys + - 0 and the arrows zoom and pan; a block under the pointer says what it is and dims every
    other micro-batch.

    events: of one step, measured or simulated.
    workers: how many lanes.
    predicted: events of a simulation, drawn as a thin lane under each worker's own.
    unit: what one second of the events' clock is called; None for real seconds, told in s, ms or µs.
    Raises InputError when there is no action among the events, or one is of a worker that isn't there.
    """
    measured = summarize(events, workers)
    expected = summarize(predicted, workers) if predicted else None
    scale = Scale.fit(0.0, measured.span, 1.0, unit)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_asset("page.css")}</style>
<style id="dim"></style>
</head>
<body>
<h1>{escape(title)}</h1>
{_figures(measured, expected, scale, workers)}
<div class="stage">
{render_svg(events, workers=workers, predicted=predicted, title=title, unit=unit)}
<div class="tools" hidden><button value="in">zoom in</button><button value="out">zoom out</button>\
<button value="all">whole step</button><span>wheel to zoom, drag to move, point at a block to follow its \
micro-batch</span></div>
</div>
{_table(measured, expected, scale)}
<div id="tip" hidden></div>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def render_text(events: Sequence[Event], width: int = 100, *, workers: int | None = None) -> str:
    """One step as plain text, one line per worker and one cell per slice of time.

    Each cell shows the kind (F, B, I, W) of its slice, ``.`` where the worker was idle. Where a block has room, its
    micro-batch's number follows the letter, and on a worker with several stages its stage comes before: ``F0--F1--``,
    ``2F0-2F1-``.

    width: of the whole line, in characters.
    workers: how many lines; by default the highest worker seen, plus one.
    """
    start, end = step_span(events)
    count = max(event.worker for event in events) + 1 if workers is None else workers
    figures = summarize(events, count)
    name = len(f"worker {count - 1} ")
    cells = max(10, width - name - len(" 100%"))
    lines: list[str] = []
    for worker in range(count):
        actions = [event for event in events if event.worker == worker and event.kind in COMPUTE_KINDS]
        row = _text_row(actions, start, (end - start) / cells or 1.0, cells)
        lines.append(f"{f'worker {worker}':<{name}}{row} {figures.busy_share[worker]:4.0%}")
    lines.append(f"{'':<{name}}bubble {figures.bubble:.1%}")
    return "\n".join(lines)


def _text_row(actions: Iterable[Event], start: float, slice_: float, cells: int) -> str:
    row = ["."] * cells
    ordered = sorted(actions, key=lambda action: action.start)
    one_stage = len({action.stage for action in ordered}) == 1
    for event in ordered:
        first = round((event.start - start) / slice_)
        last = max(first + 1, round((event.end - start) / slice_))
        words = f"{event.kind}{event.microbatch}" if one_stage else str(event)
        block = words.ljust(last - first, "-") if len(words) <= last - first else event.kind * (last - first)
        row[first:last] = block
    return "".join(row[:cells])


def _asset(name: str) -> str:
    return files("stageflow.observe").joinpath(name).read_text(encoding="utf-8")


def _figures(measured: Summary, expected: Summary | None, scale: Scale, workers: int) -> str:
    """The row of large numbers on top."""
    cells = [(scale.words(measured.span), "step" if expected is None else "step measured")]
    if expected is not None:
        cells.append((scale.words(expected.span), "step predicted"))
    cells.append((f"{measured.bubble:.1%}", "bubble" if expected is None else "bubble measured"))
    if expected is not None:
        cells.append((f"{expected.bubble:.1%}", "bubble predicted"))
    cells += [(str(workers), "workers"), (str(measured.microbatches), "micro-batches")]
    items = "".join(f"<li><b>{escape(value)}</b><span>{words}</span></li>" for value, words in cells)
    return f'<ul class="figures">{items}</ul>'


def _table(measured: Summary, expected: Summary | None, scale: Scale) -> str:
    """Busy share and idle time by cause, a row per worker."""
    causes = [cause for cause in CAUSES if any(idle[cause] > 0 for idle in measured.idle)]
    head = ["worker", "busy", *(["busy, predicted"] if expected else []), *(_COLUMNS[cause] for cause in causes)]
    rows: list[str] = []
    for worker, idle in enumerate(measured.idle):
        share = measured.busy_share[worker]
        cells = [f"<td>worker {worker}</td>", f'<td class="share">{_bar(share)}{share:.1%}</td>']
        if expected:
            cells.append(f"<td>{expected.busy_share[worker]:.1%}</td>")
        cells += [_cell(idle[cause], measured.span, scale) for cause in causes]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    notes = "; ".join(f"<b>{_COLUMNS[cause]}</b>: {CAUSES[cause]}" for cause in causes)
    return (
        '<h2>Where the time went</h2><div class="wide"><table><thead><tr>'
        + "".join(f"<th>{words}</th>" for words in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        + f'<p class="note">The span runs from the first action to the end of the last one on any worker; busy time '
        f"and idle time of a row add up to it. {notes}.</p>"
    )


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width:{share:.1%}"></i></span>'


def _cell(seconds: float, span: float, scale: Scale) -> str:
    if seconds <= 0 or seconds / span < 5e-5:
        return '<td class="nil">0</td>'
    return f"<td>{scale.length_words(seconds)} <small>{seconds / span:.1%}</small></td>"

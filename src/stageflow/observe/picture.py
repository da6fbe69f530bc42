"""One step as an SVG: a lane per worker, a block per action.

The picture stands alone (no fonts, scripts or files from elsewhere), follows the reader's light or dark theme, and
carries each block's times in data attributes, which the page of `timeline` uses to zoom.

    worker 0   |F0 F1 F2 F3      B0   B1   B2   B3|
    worker 1   |   F0 B0  F1 B1  F2 B2   F3 B3    |
                0 ms      10 ms      20 ms
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from stageflow.errors import InputError
from stageflow.observe.events import COMPUTE_KINDS, KIND_WORDS, Event
from stageflow.observe.metrics import step_span

LABEL_WIDTH = 92
LANE_HEIGHT = 28
GHOST_HEIGHT = 13
LANE_GAP = 9
AXIS_HEIGHT = 26
LEGEND_HEIGHT = 30

_KEYS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradients",
    "W": "W weight gradients",
    "wait": "waiting",
    "send": "sending",
    "reduce": "reduction",
    "update": "optimizer",
}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class Scale(NamedTuple):
    """How times become words and places: zero point, length, and the unit they are told in."""

    start: float
    length: float
    factor: float
    unit: str
    width: float

    @classmethod
    def fit(cls, start: float, end: float, width: float, unit: str | None) -> Scale:
        """unit: None to choose among s, ms and µs; otherwise the name of what the times count."""
        length = (end - start) or 1.0
        if unit is not None:
            return cls(start, length, 1.0, unit, width)
        factor, name = next((u for u in UNITS if length >= 2 * u[0]), UNITS[-1])
        return cls(start, length, factor, name, width)

    def x(self, time: float) -> float:
        """Place of a time on the plot, in pixels from its left edge."""
        return (time - self.start) / self.length * self.width

    def words(self, seconds: float) -> str:
        """A time on this scale with its unit, to three digits: ``12.5 ms``."""
        number = seconds / self.factor
        return f"{number:{'.0f' if abs(number) >= 100 else '.3g'}} {self.unit}".rstrip()

    def length_words(self, seconds: float) -> str:
        """A length of time in the unit that suits it, whatever that of the scale."""
        if (self.factor, self.unit) not in UNITS:
            return self.words(seconds)
        return Scale.fit(0.0, 2 * seconds, 1.0, None).words(seconds) if seconds else "0"

    def ticks(self, about: int = 10) -> list[float]:
        """Round times (1, 2 or 5 times a power of ten), about this many, relative to the start."""
        span = self.length / self.factor
        rough = span / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
        return [i * step * self.factor for i in range(int(span / step + 1e-9) + 1)]


def render_svg(
    events: Sequence[Event],
    *,
    workers: int,
    predicted: Sequence[Event] | None = None,
    title: str = "timeline",
    unit: str | None = None,
    width: int = 1000,
) -> str:
    """Draw events as one self-contained SVG element.

    workers: how many lanes.
    predicted: events of a simulation, drawn as a thin lane under each worker's own; both start at zero.
    title: for screen readers.
    unit: what one second of the events' clock is called; None for real seconds, told in s, ms or µs.
    width: of the whole picture in pixels; it scales to the place it is put in.
    """
    ghosts = _from_zero(predicted) if predicted else []
    shown = _from_zero(events)
    end = max(step_span(drawn)[1] for drawn in (shown, ghosts) if drawn)
    scale = Scale.fit(0.0, max([end, *(event.end for event in shown)]), width - LABEL_WIDTH - 12, unit)
    chunks = stages_by_worker([*shown, *ghosts], workers)
    pitch = LANE_HEIGHT + LANE_GAP + (GHOST_HEIGHT + 1 if ghosts else 0)
    plot_height = workers * pitch
    notes = _notes(chunks, bool(ghosts))
    top = LEGEND_HEIGHT + (18 if notes else 0)
    height = top + plot_height + AXIS_HEIGHT
    lanes = [_lane(shown, worker, worker * pitch, LANE_HEIGHT, scale, chunks, "") for worker in range(workers)]
    if ghosts:
        below = LANE_HEIGHT + 1
        lanes += [
            _lane(ghosts, worker, worker * pitch + below, GHOST_HEIGHT, scale, chunks, "predicted: ")
            for worker in range(workers)
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stageflow-timeline" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" data-length="{scale.length!r}" data-factor="{scale.factor!r}" '
        f'data-unit="{escape(scale.unit)}"><style>{style_sheet()}</style>'
    )
    plot = (
        f'<svg class="plot" x="{LABEL_WIDTH}" y="{top}" width="{scale.width:g}" height="{plot_height + AXIS_HEIGHT}">'
    )
    legend = _legend([*shown, *ghosts], notes)
    labels = [_label(worker, chunks[worker], top + worker * pitch) for worker in range(workers)]
    return "\n".join([head, legend, *labels, plot, _axis(scale, plot_height), *lanes, "</svg>", "</svg>"])


def style_sheet() -> str:
    """The CSS of the picture: colours per kind, for light and dark."""
    return files("stageflow.observe").joinpath("picture.css").read_text(encoding="utf-8")


def stages_by_worker(events: Iterable[Event], workers: int) -> list[list[int]]:
    """The stages seen on each worker, ascending. Raises InputError for an event of a worker that isn't there."""
    seen: list[set[int]] = [set() for _ in range(workers)]
    for event in events:
        if not 0 <= event.worker < workers:
            raise InputError(f"event {event} is of worker {event.worker}, but the timeline has {workers} workers")
        if event.kind in COMPUTE_KINDS:
            seen[event.worker].add(event.stage)
    return [sorted(stages) for stages in seen]


def _from_zero(events: Sequence[Event]) -> list[Event]:
    """Shift events so that the first action starts at zero; drop what ended before."""
    start, _ = step_span(events)
    return [
        event._replace(start=max(0.0, event.start - start), end=event.end - start)
        for event in events
        if event.end > start
    ]


def _lane(
    events: Sequence[Event], worker: int, y: float, height: int, scale: Scale, chunks: list[list[int]], prefix: str
) -> str:
    """The blocks of one worker; what is no work is drawn first and thinner."""
    own = sorted((event for event in events if event.worker == worker), key=lambda e: e.kind in COMPUTE_KINDS)
    blocks = [_block(event, y, height, scale, chunks[worker], prefix) for event in own]
    rail = f'<rect class="rail" x="0" y="{y:g}" width="100%" height="{height}"/>'
    return "\n".join([f'<g class="lane{" ghost" if prefix else ""}">', rail, *blocks, "</g>"])


def _block(event: Event, y: float, height: int, scale: Scale, stages: list[int], prefix: str) -> str:
    """One event: a rectangle, its micro-batch's number where there is room, and words for the pointer."""
    work = event.kind in COMPUTE_KINDS
    left, size = scale.x(event.start), max(0.6, scale.x(event.end) - scale.x(event.start))
    top, tall = (y, height) if work or event.kind == "update" else (y + height / 2 - 2, 4)
    shade = " later" if work and stages.index(event.stage) % 2 else ""
    words = f"{prefix}{_describe(event)}\n{scale.words(event.start)} to {scale.words(event.end)}, "
    words += scale.length_words(event.duration)
    number = str(event.microbatch) if work else ""
    font = digit_size(size, len(number))
    hidden = "" if font else ' display="none"'
    text = (
        f'<text x="{left + size / 2:.2f}" y="{y + height / 2:g}" font-size="{font:g}"{hidden}>{number}</text>'
        if number and height >= LANE_HEIGHT
        else ""
    )
    return (
        f'<g class="ev {event.kind}{shade}" data-m="{event.microbatch}" data-s="{event.start:.9g}" '
        f'data-e="{event.end:.9g}"><title>{escape(words)}</title>'
        f'<rect x="{left:.2f}" y="{top:g}" width="{size:.2f}" height="{tall}"/>{text}</g>'
    )


def digit_size(room: float, digits: int) -> float:
    """Font size, in pixels, of a number in a block this wide; 0 where it could not be read."""
    size = min(11.5, (room - 1.5) / (0.62 * digits or 1))
    return round(size, 1) if size >= 6.5 else 0


def _describe(event: Event) -> str:
    stage = f"stage {event.stage}" if event.stage >= 0 else "all stages"
    of = f", micro-batch {event.microbatch}" if event.microbatch >= 0 else ""
    return f"{event}: {KIND_WORDS.get(event.kind, event.kind)}\nworker {event.worker}, {stage}{of}"


def _label(worker: int, stages: list[int], y: float) -> str:
    """The name of a lane: worker and the stages it holds."""
    listed = ", ".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]} … {stages[-1]}"
    held = f"{'stage' if len(stages) == 1 else 'stages'} {listed}" if stages else "no stage"
    middle = y + LANE_HEIGHT / 2
    return (
        f'<text class="name" x="2" y="{middle - 6.5:g}">worker {worker}</text>'
        f'<text class="held" x="2" y="{middle + 7:g}">{held}</text>'
    )


def _axis(scale: Scale, plot_height: float) -> str:
    """Ticks below the lanes, with a faint line through them."""
    marks: list[str] = []
    for tick in scale.ticks():
        x = scale.x(tick)
        anchor = ' class="first"' if x < 12 else ' class="last"' if x > scale.width - 24 else ""
        marks.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{plot_height + 4:g}"/>'
            f'<text x="{x:.2f}" y="{plot_height + 16:g}"{anchor}>{scale.words(tick)}</text>'
        )
    return f'<g class="axis" data-y="{plot_height:g}">{"".join(marks)}</g>'


def _notes(chunks: list[list[int]], ghosts: bool) -> list[str]:
    shaded = any(len(stages) > 1 for stages in chunks)
    return ["paler blocks: every other stage of a worker"] * shaded + ["thin lanes: predicted"] * ghosts


def _legend(events: Sequence[Event], notes: Sequence[str]) -> str:
    """What the colours mean, for the kinds that occur; notes go into a second line."""
    kinds = {event.kind for event in events}
    x = float(LABEL_WIDTH)
    parts: list[str] = []
    for kind, words in _KEYS.items():
        if kind not in kinds:
            continue
        tall, top = (12, 3) if kind in COMPUTE_KINDS or kind == "update" else (4, 7)
        parts.append(
            f'<g class="ev {kind}"><rect x="{x:g}" y="{top}" width="16" height="{tall}"/></g>'
            f'<text class="key" x="{x + 22:g}" y="9">{words}</text>'
        )
        x += 22 + 6.2 * len(words) + 16
    if notes:
        parts.append(f'<text class="key" x="{LABEL_WIDTH}" y="27">{"; ".join(notes)}</text>')
    return f'<g class="legend">{"".join(parts)}</g>'

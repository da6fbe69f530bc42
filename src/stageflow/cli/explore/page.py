"""The page on which schedules can be tried out, put together from its parts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from stageflow.errors import InputError

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zb_v",
    "v_half",
    "v_min",
    "greedy",
)
"""The schedules that the page builds."""

MODEL = ("schedules.js", "greedy.js", "catalogue.js", "simulate.js")
"""The scripts that build and simulate; they touch no document, so they run outside a browser too."""

VIEW = ("describe.js", "timeline.js", "panels.js", "lessons.js", "controls.js")
"""The scripts that show it."""


def render_page(start: Mapping[str, str | int | float]) -> str:
    """The whole page as HTML.

    start: settings to open with: ``schedule``, and the names of `sliders`; what is left out has its default.
    Raises InputError for a name or a value that the page does not have.
    """
    _check(start)
    parts = {
        "style": read("style.css"),
        "sliders": json.dumps(sliders()),
        "start": json.dumps(dict(start)),
        "script": "\n".join(map(read, MODEL + VIEW)),
    }
    page = read("page.html")
    for name, text in parts.items():
        page = page.replace(f"{{{name}}}", text)
    return page


def read(name: str) -> str:
    """One of the files that the page is made of."""
    return files("stageflow.cli.explore").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def sliders() -> dict[str, dict[str, Any]]:
    """The numbers that can be set: name -> words, least, most, by (the step), start."""
    return json.loads(read("settings.json"))


def _check(start: Mapping[str, str | int | float]) -> None:
    for name, value in start.items():
        if name == "schedule":
            if value not in SCHEDULES:
                raise InputError(f"the page has no schedule {value!r}; it has {', '.join(SCHEDULES)}")
            continue
        slider = sliders().get(name)
        if slider is None:
            raise InputError(f"the page has no setting {name!r}; it has schedule, {', '.join(sliders())}")
        if not isinstance(value, int | float) or not slider["least"] <= value <= slider["most"]:
            raise InputError(f"{name} is {value}: the page goes from {slider['least']} to {slider['most']}")

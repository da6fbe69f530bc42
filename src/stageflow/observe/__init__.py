"""What happened on the workers: events, their recorder, figures, traces and pictures. No torch."""

from stageflow.observe.chrome import write_chrome_trace
from stageflow.observe.events import Event
from stageflow.observe.metrics import Summary, bubble, busy_share, idle_by_cause, summarize
from stageflow.observe.picture import render_svg
from stageflow.observe.recorder import Recorder
from stageflow.observe.timeline import render_html, render_text

__all__ = [
    "Event",
    "Recorder",
    "Summary",
    "bubble",
    "busy_share",
    "idle_by_cause",
    "render_html",
    "render_svg",
    "render_text",
    "summarize",
    "write_chrome_trace",
]

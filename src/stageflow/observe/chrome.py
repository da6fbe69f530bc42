"""Events as a trace file for ui.perfetto.dev and chrome://tracing.

One process per pipeline, one thread per worker, an arrow from each stage's forward (and backward) to the next one's.
Format: "Trace Event Format", JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stageflow.observe.events import COMPUTE_KINDS, KIND_WORDS, Event

_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "I": "thread_state_uninterruptible",
    "W": "thread_state_runnable",
}


def chrome_trace(
    events: Sequence[Event], *, name: str = "stageflow", edges: Iterable[tuple[int, int]] | None = None, pid: int = 1
) -> dict[str, Any]:
    """The trace as plain data, times in microseconds from the first event.

    name: of the process, as shown.
    edges: (producer, consumer) of the stage graph, for the arrows; None draws a chain.
    pid: number of the process, to put several pipelines into one file.
    """
    if not events:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    zero = min(event.start for event in events)
    workers = sorted({event.worker for event in events})
    entries = [_metadata(pid, 0, "process_name", name)]
    entries += [_metadata(pid, worker, "thread_name", f"worker {worker}") for worker in workers]
    entries += [_slice(pid, event, zero) for event in sorted(events, key=lambda event: (event.worker, event.start))]
    entries += _arrows(pid, events, zero, edges)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: str | Path,
    events: Sequence[Event],
    *,
    name: str = "stageflow",
    edges: Iterable[tuple[int, int]] | None = None,
) -> None:
    """Write `chrome_trace` to a file; open it at ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(events, name=name, edges=edges)), encoding="utf-8")


def _metadata(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _slice(pid: int, event: Event, zero: float) -> dict[str, Any]:
    entry = {
        "ph": "X",
        "pid": pid,
        "tid": event.worker,
        "name": str(event) if event.kind in COMPUTE_KINDS else event.kind,
        "cat": KIND_WORDS.get(event.kind, event.kind),
        "ts": (event.start - zero) * 1e6,
        "dur": event.duration * 1e6,
        "args": {"stage": event.stage, "microbatch": event.microbatch, "kind": event.kind},
    }
    if event.kind in _COLOURS:
        entry["cname"] = _COLOURS[event.kind]
    return entry


def _arrows(
    pid: int, events: Iterable[Event], zero: float, edges: Iterable[tuple[int, int]] | None
) -> list[dict[str, Any]]:
    """Pairs of flow events, from the end of the producing slice to the start of the consuming one."""
    forward: dict[tuple[int, int], Event] = {}
    backward: dict[tuple[int, int], Event] = {}
    for event in events:
        if event.kind == "F":
            forward[event.stage, event.microbatch] = event
        elif event.kind in ("B", "I"):
            backward[event.stage, event.microbatch] = event
    stages = {stage for stage, _ in forward} | {stage for stage, _ in backward}
    pairs = [(s, s + 1) for s in sorted(stages)] if edges is None else sorted(edges)
    entries: list[dict[str, Any]] = []
    for low, high in pairs:
        for done, word, source, target in ((forward, "activations", low, high), (backward, "gradients", high, low)):
            for stage, microbatch in sorted(done):
                to = done.get((target, microbatch))
                if stage == source and to is not None:
                    entries += _arrow(pid, word, len(entries), done[source, microbatch], to, zero)
    return entries


def _arrow(pid: int, word: str, number: int, source: Event, target: Event, zero: float) -> list[dict[str, Any]]:
    common = {"pid": pid, "cat": word, "name": word, "id": pid * 1_000_000 + number}
    # A flow event belongs to the slice that encloses its time on its thread, so it must lie inside, not at the edge.
    leave = (source.start + source.end) / 2
    arrive = target.start + target.duration * 1e-3
    return [
        {**common, "ph": "s", "tid": source.worker, "ts": (leave - zero) * 1e6},
        {**common, "ph": "f", "bp": "e", "tid": target.worker, "ts": (arrive - zero) * 1e6},
    ]

"""Show what a schedule would take, from the time of each action; needs no torch and runs nothing.

stageflow simulate --schedule zb_h1 --stages 4 --microbatches 8
stageflow simulate --schedule 1f1b --stages 4 --microbatches 16 --f 5 --i 5 --w 4 --hop 0.5 --timeline step.html
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError
from stageflow.observe import render_html, render_text, write_chrome_trace

if TYPE_CHECKING:
    from stageflow.schedule import Report, Schedule, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    from stageflow.schedule import SCHEDULES

    what = parser.add_argument_group("the schedule")
    what.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"one of {', '.join(SCHEDULES)} (1f1b)")
    what.add_argument("--stages", type=int, default=4, metavar="N", help="number of stages (4)")
    what.add_argument("--microbatches", type=int, default=8, metavar="N", help="number of micro-batches (8)")
    what.add_argument("--workers", type=int, metavar="N", help="number of workers (what the schedule usually has)")
    what.add_argument("--file", type=Path, metavar="PATH", help="a schedule of your own, text form or .csv, instead")
    times = parser.add_argument_group("times, in any unit")
    times.add_argument("--f", type=times_of, default=1.0, metavar="T", help="forward (1); one, or one per stage: 1,1,2")
    times.add_argument("--i", type=times_of, default=1.0, metavar="T", help="gradient of the inputs (1)")
    times.add_argument("--w", type=times_of, default=1.0, metavar="T", help="gradient of the weights (1)")
    times.add_argument("--b", type=times_of, metavar="T", help="whole backward (I plus W)")
    times.add_argument("--hop", type=float, default=0.0, metavar="T", help="from one worker to the next (0)")
    output = parser.add_argument_group("output")
    output.add_argument("--timeline", type=Path, metavar="PATH", help="write the picture as an HTML page")
    output.add_argument("--trace", type=Path, metavar="PATH", help="write a trace for ui.perfetto.dev")
    output.add_argument("--csv", type=Path, metavar="PATH", help="write the orders as torch's schedule table")
    output.add_argument("--text", action="store_true", help="print the schedule's text form instead of the picture")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Build, validate and simulate the schedule; print and write what was asked for."""
    from stageflow.schedule import Costs

    schedule = _schedule(args)
    report = schedule.validate()
    costs = Costs(forward=args.f, backward_input=args.i, backward_weight=args.w, backward=args.b, hop=args.hop)
    simulation = schedule.simulate(costs)
    events = simulation.events()
    title = f"{schedule.name}: {schedule.n_stages} stages, {schedule.microbatches} micro-batches"
    if args.timeline:
        args.timeline.write_text(
            render_html(events, title=title, workers=schedule.n_workers, unit=""), encoding="utf-8"
        )
    if args.trace:
        write_chrome_trace(args.trace, events, name=title, edges=schedule.graph.edges)
    if args.csv:
        schedule.to_csv(args.csv)
    if args.json:
        print(json.dumps(_figures(schedule, report, simulation)))
    elif args.text:
        print(str(schedule).rstrip())
    else:
        print(title)
        print(render_text(events, shutil.get_terminal_size().columns, workers=schedule.n_workers))
        print(_table(report, simulation))
    return 0


def times_of(text: str) -> float | list[float]:
    """``"2"`` is one time for all stages, ``"1,1,2"`` one per stage."""
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: expected a number, or one per stage as 1,1,2") from None
    return times[0] if len(times) == 1 else times


def _schedule(args: argparse.Namespace) -> Schedule:
    from stageflow.schedule import Schedule, build_schedule

    if args.file is None:
        return build_schedule(args.schedule, stages=args.stages, microbatches=args.microbatches, workers=args.workers)
    if not args.file.is_file():
        raise InputError(f"--file {args.file}: there is no such file")
    try:
        if args.file.suffix == ".csv":
            return Schedule.from_csv(args.file, name=args.file.stem)
        return Schedule.parse(args.file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"--file {args.file}: this is no text: {error}") from error


def _figures(schedule: Schedule, report: Report, simulation: Simulation) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.n_stages,
        "workers": schedule.n_workers,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "busy": list(simulation.busy),
        "peak_activations": list(report.peak_activations),
        "actions": report.actions,
        "messages": report.messages,
    }


def _table(report: Report, simulation: Simulation) -> str:
    rows: list[tuple[str, ...]] = [("worker", "work", "fill", "waiting", "drain", "activations kept")]
    for worker, (busy, idle) in enumerate(zip(simulation.busy, simulation.idle, strict=True)):
        peak = str(report.peak_activations[worker])
        rows.append((str(worker), *(f"{time:g}" for time in (busy, *idle)), peak))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    total = f"step {simulation.makespan:g}, bubble {simulation.bubble:.1%}, {report.messages} messages"
    return "\n".join(["", *lines, "", total])

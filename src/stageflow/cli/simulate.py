"""Show what a schedule would take, from the time of each action; needs no torch and runs nothing.

stageflow simulate --schedule zb_h1 --stages 4 --microbatches 8
stageflow simulate --schedule 1f1b --stages 4 --microbatches 16 --f 5 --i 5 --w 4 --hop 0.5 --timeline step.html
stageflow simulate --schedule all --stages 8 --microbatches 32 --f 1 --b 1 --w 1 --memory 8
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.cli.compare import ALL, bound_of, build, compare
from stageflow.cli.costs import Sizes, add_sizes, add_times, costs_from, costs_words
from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.observe import render_html, render_text, write_chrome_trace

if TYPE_CHECKING:
    from stageflow.schedule import Costs, Report, Schedule, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    from stageflow.schedule import SCHEDULES, SIMULATED

    what = parser.add_argument_group("the schedule")
    names = ", ".join((*SCHEDULES, *SIMULATED))
    what.add_argument("--schedule", metavar="NAME", help=f"{ALL}: compare all; or one of {names} (1f1b)")
    what.add_argument("--stages", type=int, metavar="N", help="number of stages (4)")
    what.add_argument("--microbatches", type=int, metavar="N", help="number of micro-batches (8)")
    what.add_argument("--workers", type=int, metavar="N", help="number of workers (what the schedule usually has)")
    what.add_argument("--file", type=Path, metavar="PATH", help="a schedule of your own, text form or .csv, instead")
    add_times(parser)
    add_sizes(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--timeline", type=Path, metavar="PATH", help="write the picture as an HTML page")
    output.add_argument("--trace", type=Path, metavar="PATH", help="write a trace for ui.perfetto.dev")
    output.add_argument("--csv", type=Path, metavar="PATH", help="write the orders as torch's schedule table")
    output.add_argument("--text", action="store_true", help="print the schedule's text form instead of the picture")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Build, validate and simulate the schedule; print and write what was asked for."""
    costs, sizes = costs_from(args), Sizes.of(args)
    stages, microbatches = args.stages or 4, args.microbatches or 8
    for name in ("stages", "microbatches", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} {getattr(args, name)}: at least 1 is needed")
    if args.file is None:
        costs.check(stages, StageGraph.chain(stages).edges)
        sizes.footprint.check(stages)
    if args.schedule == ALL and args.file is None:
        for name in ("timeline", "trace", "csv", "text"):
            if getattr(args, name):
                raise InputError(f"--{name} is for one schedule, not for --schedule {ALL}: choose one by its name")
        comparison = compare(stages, microbatches, args.workers or stages, costs, sizes)
        print(json.dumps(comparison.figures()) if args.json else comparison)
        return 0
    if args.file is None:
        name = args.schedule or "1f1b"
        schedule, costs, sizes = build(name, stages, microbatches, args.workers, costs, sizes)
    else:
        schedule = _read(args)
    report, simulation = schedule.validate(), schedule.simulate(costs)
    _write(args, schedule, simulation)
    if args.json:
        print(json.dumps(_figures(schedule, report, simulation, costs, sizes)))
    elif args.text:
        print(str(schedule).rstrip())
    else:
        print(_title(schedule))
        print(render_text(simulation.events(), shutil.get_terminal_size().columns, workers=schedule.n_workers))
        print(_table(schedule, report, simulation, costs, sizes))
    return 0


def _read(args: argparse.Namespace) -> Schedule:
    """The schedule of a file."""
    from stageflow.schedule import Schedule

    path: Path = args.file
    for name in ("schedule", "stages", "microbatches", "workers"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name} is for a schedule by its name: that of --file {path} is what the file says")
    if path.is_dir():
        raise InputError(
            f"--file {path} is a folder: give the file of a schedule, in text form or as .csv; for the model in a "
            f"folder there is `stageflow plan {path}`"
        )
    if not path.is_file():
        raise InputError(f"--file {path}: there is no such file")
    try:
        if path.suffix == ".csv":
            return Schedule.from_csv(path, name=path.stem)
        return Schedule.parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"--file {path}: this is no text: {error}") from error


def _write(args: argparse.Namespace, schedule: Schedule, simulation: Simulation) -> None:
    events = simulation.events()
    if args.timeline:
        page = render_html(events, title=_title(schedule), workers=schedule.n_workers, unit="")
        args.timeline.write_text(page, encoding="utf-8")
    if args.trace:
        write_chrome_trace(args.trace, events, name=_title(schedule), edges=schedule.graph.edges)
    if args.csv:
        schedule.to_csv(args.csv)


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}: {schedule.n_stages} stages, {schedule.microbatches} micro-batches"


def _figures(schedule: Schedule, report: Report, simulation: Simulation, costs: Costs, sizes: Sizes) -> dict[str, Any]:
    from stageflow.schedule import peak_memory

    bound = bound_of(schedule, costs, sizes)
    peaks = peak_memory(schedule, sizes.footprint)
    return {
        "schedule": schedule.name,
        "stages": schedule.n_stages,
        "workers": schedule.n_workers,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble": simulation.bubble,
        "bound": bound and bound.seconds,
        "bound_reason": bound and bound.reason,
        "busy": list(simulation.busy),
        "idle": [idle._asdict() for idle in simulation.idle],
        "peak_activations": list(report.peak_activations),
        "peak_memory": list(peaks),
        "fits": sizes.fits(peaks),
        "actions": report.actions,
        "messages": report.messages,
    }


def _table(schedule: Schedule, report: Report, simulation: Simulation, costs: Costs, sizes: Sizes) -> str:
    from stageflow.plan.words import table
    from stageflow.schedule import peak_memory

    heads = ("worker", "work", "warm-up", "waiting", "transfer", "drain", "activations", "memory")
    peaks = peak_memory(schedule, sizes.footprint)
    rows: list[tuple[str, ...]] = [heads]
    for worker, (busy, idle) in enumerate(zip(simulation.busy, simulation.idle, strict=True)):
        over = "" if sizes.fits(peaks[worker : worker + 1]) else " over"
        kept = (str(report.peak_activations[worker]), f"{sizes.words(peaks[worker])}{over}")
        rows.append((str(worker), *(f"{round(time, 9):g}" for time in (busy, *idle)), *kept))
    step = f"step {simulation.makespan:g}, span {simulation.span:g}, bubble {simulation.bubble:.1%}"
    total = [costs_words(costs), f"{step}, {report.messages} messages"]
    bound = bound_of(schedule, costs, sizes)
    if bound is not None:
        within = "" if sizes.memory is None or not sizes.fits(peaks) else " within this memory"
        gap = simulation.makespan / bound.seconds - 1 if bound.seconds else 0.0
        stands = "as this one does" if gap < 5e-4 else f"this one is {gap:.1%} above"
        told = f"any schedule on this placement{within} takes at least {bound.seconds:g}, {stands}: {bound.reason}"
        total.append(textwrap.fill(told, shutil.get_terminal_size().columns))
    return "\n".join(["", *table(rows, 0), "", *total])

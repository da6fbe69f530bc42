"""Plan a pipeline: where to cut a model, who holds what, in which order it runs, and what a step will take.

stageflow plan my_model.py:build --devices 2                      measured here; build() gives (model, example)
stageflow plan path/to/Llama-3-8B --devices 8xh100 --batch 64     a Hugging Face directory; only config.json is read
stageflow plan profile.json --devices 4 --memory 40GiB            what profile_model measured elsewhere
stageflow plan --stages 8 --microbatches 32 --f 1 --b 2           bare numbers, in any unit
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.cli.costs import B_MEANS, backward_times, times_of
from stageflow.errors import InputError

if TYPE_CHECKING:
    from stageflow.plan import Block, Device, Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    what = parser.add_argument_group("what to plan")
    what.add_argument("model", nargs="?", metavar="MODEL", help="FILE.py:FUNCTION, a directory, or a profile's JSON")
    what.add_argument("--batch", type=int, metavar="N", help="samples of a batch, for a directory (32)")
    what.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a sample, for a directory (1024)")
    where = parser.add_argument_group("what for")
    where.add_argument("--devices", metavar="N|NAMES", help="how many, or names as 8xh100 or a100,h100 (one per stage)")
    where.add_argument("--memory", metavar="SIZE", help="of each device, as 40GiB; with bare numbers: activations")
    where.add_argument("--latency", type=float, metavar="S", help="of a link between devices, seconds")
    where.add_argument("--bandwidth", metavar="SIZE", help="of a link, per second, as 25GB")
    how = parser.add_argument_group("what is decided already")
    how.add_argument("--microbatches", type=int, metavar="N", help="parts of a batch (chosen)")
    how.add_argument("--stages", type=int, metavar="N", help="number of stages (chosen: one or two per device)")
    how.add_argument("--schedule", default="auto", metavar="NAME", help="one by name (auto: searched for)")
    how.add_argument(
        "--recompute", choices=("auto", "yes", "no"), default="auto", help="activations (auto: if it must)"
    )
    times = parser.add_argument_group("bare numbers: times of a stage, one or one per stage as 1,1,2")
    times.add_argument("--f", type=times_of, metavar="T", help="forward (1)")
    times.add_argument("--i", type=times_of, metavar="T", help="gradient of the inputs (1, or half of --b)")
    times.add_argument("--w", type=times_of, metavar="T", help="gradient of the weights (1, or half of --b)")
    times.add_argument("--b", type=times_of, metavar="T", help=B_MEANS)
    times.add_argument("--hop", type=float, metavar="T", help="from one device to the next (0)")
    output = parser.add_argument_group("search and output")
    output.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of searching, about (10)")
    output.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")
    output.add_argument("--save", type=Path, metavar="PATH", help="write the plan, for Plan.from_json")
    output.add_argument("--page", type=Path, metavar="PATH", help="write the plan as an HTML page")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Make the plan; print and write what was asked for."""
    plan = _bare_plan(args) if args.model is None else _model_plan(args)
    if args.save:
        plan.to_json(args.save)
    if args.page:
        plan.page(args.page)
    print(json.dumps(_figures(plan)) if args.json else plan.describe())
    return 0


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "microbatches": args.microbatches,
        "stages": args.stages,
        "schedule": args.schedule,
        "recompute": {"auto": "auto", "yes": True, "no": False}[args.recompute],
        "seconds": args.seconds,
        "seed": args.seed,
    }


def _bare_plan(args: argparse.Namespace) -> Plan:
    """A plan from numbers alone: every stage is one block, and memory counts activations of a stage."""
    from stageflow.plan import make_plan

    _refuse(args, ("batch", "sequence_length", "latency", "bandwidth"), "for a model; bare numbers have --hop")
    stages = args.stages or _count(args.devices)
    if stages is None:
        raise InputError("give a MODEL to plan, or bare numbers: --stages 8 --microbatches 32 --f 1 --b 2")
    workers = stages if args.devices is None else _count(args.devices)
    if workers is None:
        raise InputError(f"--devices {args.devices}: bare numbers take a number of devices")
    memory = None if args.memory is None else _number(args.memory, "--memory")
    link = None if args.hop is None else (args.hop, float("inf"))
    options: dict[str, Any] = {**_shared(args), "stages": stages}
    return make_plan(
        devices=workers,
        memory=memory,
        link=link,
        profile=_blocks(args, stages),
        name="bare numbers",
        unit="",
        **options,
    )


def _blocks(args: argparse.Namespace, stages: int) -> list[Block]:
    """One block per stage, of one activation each."""
    from stageflow.plan import Block

    i, w, b = backward_times(args.i, args.w, args.b)
    given = {"f": 1.0 if args.f is None else args.f, "i": i, "w": w, "b": b}
    f, i, w, b = (_per_stage(times, name, stages) for name, times in given.items())
    blocks: list[Block] = []
    for stage in range(stages):
        times = {"forward": f[stage], "backward_input": i[stage], "backward_weight": w[stage]}
        blocks.append(Block(f"stage {stage}", **times, backward=b[stage], activation=1, deferred=1, output=1))
    return blocks


def _per_stage(times: float | Sequence[float], name: str, stages: int) -> Sequence[float]:
    listed = [times] * stages if isinstance(times, (int, float)) else times
    if len(listed) != stages:
        raise InputError(f"--{name} has {len(listed)} times for {stages} stages: give one, or one per stage")
    return listed


def _model_plan(args: argparse.Namespace) -> Plan:
    """A plan for a profile, a function's model, or a directory's."""
    from stageflow.plan import make_plan

    _refuse(args, ("f", "i", "w", "b", "hop"), "for bare numbers, without a MODEL")
    if args.devices is None:
        raise InputError("--devices is missing: how many, as --devices 8, or which, as --devices 8xh100")
    options = _shared(args) | {"devices": devices_of(args.devices), "memory": args.memory}
    if args.latency is not None or args.bandwidth is not None:
        options["link"] = (args.latency or 0.0, float("inf") if args.bandwidth is None else args.bandwidth)
    path, _, function = args.model.partition(":")
    if Path(args.model).is_dir():
        from stageflow.cli.models import from_directory

        if isinstance(options["devices"], int):
            raise InputError(
                f"--devices {args.devices}: a directory is counted, not run, so name what for: {args.devices}xh100"
            )
        model, example = from_directory(Path(args.model), args.batch or 32, args.sequence_length or 1024)
        return make_plan(model, example, name=Path(args.model).resolve().name, **options)
    _refuse(args, ("batch", "sequence_length"), "for a directory")
    if function:
        from stageflow.cli.models import from_function

        model, example = from_function(Path(path), function)
        return make_plan(model, example, **options)
    if Path(args.model).is_file():
        return make_plan(profile=Path(args.model), name=Path(args.model).stem, **options)
    raise InputError(
        f"{args.model}: no such directory or file; expected FILE.py:FUNCTION, a directory, or a profile's JSON"
    )


def devices_of(text: str) -> int | list[Device | str]:
    """``"8"`` is a number of equal devices, ``"2xa100,h100"`` a list of names."""
    count = _count(text)
    if count is not None:
        return count
    names: list[Device | str] = []
    for word in text.split(","):
        times, times_sign, name = word.strip().partition("x")
        if times_sign and times.isdigit():
            names += [name] * int(times)
        else:
            names.append(word.strip())
    return names


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{flag} {text}: bare numbers take a number here") from None


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """A flag that would do nothing is a mistake."""
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is {why}")


def _figures(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: what `Plan.to_json` keeps, and what follows from it."""
    stages = [
        {
            "blocks": list(stage.blocks),
            "device": stage.device,
            "parameters": stage.parameters,
            "time": stage.time,
            "memory": memory,
            "recompute": stage.recompute,
        }
        for stage, memory in zip(plan.stages, plan.stage_memory, strict=True)
    ]
    return {
        "model": plan.model,
        "schedule": plan.schedule.name,
        "microbatches": plan.microbatches,
        "stages": stages,
        "step": plan.step,
        "bubble": plan.bubble,
        "memory": list(plan.memory),
        "bound": plan.bound.seconds,
        "bound_reason": plan.bound.reason,
        "gap": None if math.isinf(plan.gap) else plan.gap,
        "warnings": list(plan.warnings),
        "advice": [{"change": a.change, "step": a.step, "gain": a.gain} for a in plan.advice],
    }

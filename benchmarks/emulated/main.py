"""What does a pipeline of eight devices lose to schedule, runtime and transport? Stages that sleep, on few cores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import stageflow as sf
from benchmarks import common, contestants, models
from benchmarks.common import Turn

DEVICES, MICROBATCHES = 8, 32
# seconds of a device's share of the model: (F, B)
SETTINGS = [(0.005, 0.010), (0.001, 0.002)]
AIMS = {0.005: 1.05, 0.001: 1.25}
OURS = contestants.stageflow_schedules(DEVICES)
TORCH = {
    "torch GPipe": contestants.TorchPlan("ScheduleGPipe", DEVICES),
    "torch 1F1B": contestants.TorchPlan("Schedule1F1B", DEVICES),
}


def task_of(stages: int, forward: float, backward: float) -> contestants.Task:
    """The same total for any number of stages; a backward is half gradient of the input, half of the weight."""
    part = DEVICES / stages
    build = partial(models.sleepers, stages, part * forward, part * backward / 2, part * backward / 2)
    x = torch.randn(MICROBATCHES, 16)
    return contestants.Task(build, x, torch.randn_like(x), MICROBATCHES)


def measure(forward: float, backward: float, rounds: int, peers: contestants.Workers) -> dict[str, tuple[float, float]]:
    """Per contestant seconds of a step, and what its schedule would take if nothing but the sleeps took time."""
    times: dict[str, tuple[float, float]] = {}
    classic = (MICROBATCHES + DEVICES - 1) * (forward + backward)
    for name in OURS:
        stages = OURS[name]
        task = task_of(stages, forward, backward)
        part = DEVICES / stages
        costs = sf.Costs(part * forward, part * backward / 2, part * backward / 2)
        ideal = sf.build_schedule(name, stages=stages, microbatches=MICROBATCHES, workers=DEVICES)
        with contestants.stageflow_pipeline(task, name, stages, workers=DEVICES) as pipe:
            field = {name: contestants.stageflow_step(pipe, task)}
            times[f"stageflow {name}"] = (_seconds(field, rounds), ideal.simulate(costs).makespan)
    for name in TORCH:
        step = partial(peers.step, _job(name, forward))
        times[name] = (_seconds({name: step}, rounds), classic)
    return times


def _job(name: str, forward: float) -> str:
    return f"{name}, F {forward} s"


def _seconds(field: dict[str, Callable[[], Turn]], rounds: int) -> float:
    (turns,) = common.in_turn(field, rounds, warm_up=2).values()
    return common.median_seconds(turns)


def report(forward: float, backward: float, times: dict[str, tuple[float, float]]) -> str:
    classic = (MICROBATCHES + DEVICES - 1) * (forward + backward)
    rows = [
        [name, f"{1000 * seconds:.0f}", f"{seconds / classic:.2f}", f"{seconds / ideal:.2f}"]
        for name, (seconds, ideal) in times.items()
    ]
    title = (
        f"**F {1000 * forward:g} ms, B {1000 * backward:g} ms**; (m+p-1)(F+B) = {1000 * classic:.0f} ms; aim for 1f1b "
        f"{AIMS[forward]}."
    )
    head = ["", "step, ms", "over (m+p-1)(F+B)", "over its schedule's own ideal"]
    return f"{title}\n\n{common.table(head, rows)}"


def main() -> None:
    options = common.parser(__doc__, rounds=5).parse_args()
    found = common.environment()
    results = {}
    parts = []
    jobs = {
        _job(name, forward): (task_of(DEVICES, forward, backward), plan)
        for name, plan in TORCH.items()
        for forward, backward in SETTINGS
    }
    with contestants.torch_workers(DEVICES, jobs) as peers:
        for forward, backward in SETTINGS:
            times = measure(forward, backward, options.rounds, peers)
            results[f"F {forward} s, B {backward} s"] = {
                name: {"seconds": seconds, "ideal": ideal} for name, (seconds, ideal) in times.items()
            }
            parts.append(report(forward, backward, times))
    common.publish(options, __file__, found, results, "\n\n".join(parts))


if __name__ == "__main__":
    main()

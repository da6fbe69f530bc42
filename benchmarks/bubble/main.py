"""Is the bubble that is measured the one that was predicted? Every schedule, on emulated devices."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import stageflow as sf
from benchmarks import common, contestants, models

DEVICES, MICROBATCHES = 4, 16
ACTION = 0.010  # seconds of each of F, I and W of a device's share of the model
AIM = 0.05
OURS = contestants.stageflow_schedules(DEVICES)


def measure(name: str, rounds: int) -> dict[str, float]:
    """Bubbles of one schedule, 0 to 1: predicted from the sleeps and from the times that actions took, and measured."""
    stages = OURS[name]
    action = ACTION * DEVICES / stages
    x = torch.randn(MICROBATCHES, 16)
    task = contestants.Task(partial(models.sleepers, stages, *3 * [action]), x, torch.randn_like(x), MICROBATCHES)
    measured, from_times = [], []
    with contestants.stageflow_pipeline(task, name, stages, workers=DEVICES) as pipe:
        step = contestants.stageflow_step(pipe, task)
        for number in range(-1, rounds):
            step()
            if number >= 0:
                measured.append(pipe.last_step.measured.bubble)
                from_times.append(pipe.last_step.predicted.bubble)
        simulation = pipe.schedule.simulate(sf.Costs(action, action, action))
    return {
        "predicted": simulation.bubble,
        "predicted from measured actions": statistics.median(from_times),
        "measured": statistics.median(measured),
    }


def main() -> None:
    options = common.parser(__doc__, rounds=5).parse_args()
    found = common.environment()
    results = {name: measure(name, options.rounds) for name in OURS}
    rows = []
    for name, bubbles in results.items():
        predicted, from_times, measured = bubbles.values()
        difference = measured - predicted
        rows.append(
            [
                name,
                f"{predicted:.1%}",
                f"{from_times:.1%}",
                f"{measured:.1%}",
                f"{100 * difference:+.1f}",
                f"{difference / predicted:+.0%}",
            ]
        )
    head = ["", "predicted", "predicted from measured actions", "measured", "points apart", "relative"]
    worst = max(abs(bubbles["measured"] - bubbles["predicted"]) for bubbles in results.values())
    markdown = f"{common.table(head, rows)}\n\nAt most {100 * worst:.1f} points apart (aim {100 * AIM:g})."
    common.publish(options, __file__, found, results, markdown)


if __name__ == "__main__":
    main()

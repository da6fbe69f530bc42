"""How much faster are two cores in two stages than one process? stageflow against torch.distributed.pipelining."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import common, contestants, models
from benchmarks.common import Turn

ALONE = "one process, one thread"
APART = "two processes apart"
OURS = {"1f1b": 2, "zb_h1": 2, "zb_h2": 2, "zb_v": 4}  # stages
TORCH = {
    "torch GPipe": contestants.TorchPlan("ScheduleGPipe", 2),
    "torch 1F1B": contestants.TorchPlan("Schedule1F1B", 2),
    "torch InterleavedZeroBubble": contestants.TorchPlan("ScheduleInterleavedZeroBubble", 4),
    "torch ZBVZeroBubble": contestants.TorchPlan("ScheduleZBVZeroBubble", 4, fold=True),
}
LAYERS, LENGTH, BATCH = 8, 128, 16
# (width, micro-batches, steps per turn)
SETTINGS = [(256, 8, 1), (64, 16, 4)]
AIMS = {256: (1.05, 1.12), 64: (1.15, 1.25)}  # 1f1b over torch's, best over torch's best


def measure(width: int, microbatches: int, steps: int, rounds: int) -> dict[str, list[Turn]]:
    """All contestants' turns at one width. Raises SystemExit when they don't compute the same."""
    torch.manual_seed(1)
    shape = (BATCH, LENGTH, width)
    task = contestants.Task(
        partial(models.transformer, LAYERS, width), torch.randn(shape), torch.randn(shape), microbatches
    )
    with contextlib.ExitStack() as stack:
        field: dict[str, Callable[[], Turn]] = {ALONE: contestants.one_process(task)}
        for name, stages in OURS.items():
            pipe = stack.enter_context(contestants.stageflow_pipeline(task, name, stages, workers=2))
            field[f"stageflow {name}"] = contestants.stageflow_step(pipe, task)
        peers = stack.enter_context(contestants.torch_workers(2, {name: (task, plan) for name, plan in TORCH.items()}))
        field |= {name: partial(peers.step, name) for name in TORCH}
        field[APART] = partial(stack.enter_context(contestants.apart(2, task)).step, "share")
        turns = common.in_turn(field, rounds, warm_up=2, steps=steps)
    want = turns[ALONE][-1].loss
    for name, taken in turns.items():
        if abs(taken[-1].loss - want) > 1e-5 * abs(want):
            raise SystemExit(f"{name} has the loss {taken[-1].loss}, one process has {want}: not the same work")
    return turns


def judge(turns: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """Per contestant the median step in seconds, and the median of the speed-ups over one process round by round."""
    alone = [turn.seconds for turn in turns[ALONE]]
    judged = {}
    for name, taken in turns.items():
        ratios = sorted(one / turn.seconds for one, turn in zip(alone, taken, strict=True))
        judged[name] = {
            "seconds": common.median_seconds(taken),
            "speedup": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
        }
    return judged


def report(width: int, microbatches: int, judged: dict[str, dict[str, float]]) -> str:
    best_torch = max(judged[name]["speedup"] for name in TORCH)
    rows = [
        [
            name,
            f"{1000 * figures['seconds']:.0f}",
            f"{figures['speedup']:.2f} ({figures['lowest']:.2f} to {figures['highest']:.2f})",
            f"{figures['speedup'] / best_torch:.2f}",
        ]
        for name, figures in judged.items()
    ]
    plain = judged["stageflow 1f1b"]["speedup"] / judged["torch 1F1B"]["speedup"]
    best = max((judged[f"stageflow {name}"]["speedup"], name) for name in OURS)
    aim_plain, aim_best = AIMS[width]
    title = (
        f"**Width {width}, {microbatches} micro-batches.** Ideal without split backward: "
        f"{2 * microbatches / (microbatches + 1):.2f}; with it: 2.00."
    )
    figures = common.table(["", "step, ms", "speed-up (lowest to highest)", "over torch's best"], rows)
    verdict = (
        f"stageflow 1f1b is {plain:.2f} times torch's 1F1B (aim {aim_plain}); stageflow's best, {best[1]}, is "
        f"{best[0] / best_torch:.2f} times torch's best (aim {aim_best}) and {best[0] / judged[APART]['speedup']:.2f} "
        "times what two processes reach that share nothing."
    )
    return f"{title}\n\n{figures}\n\n{verdict}"


def main() -> None:
    parser = common.parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, choices=[width for width, _, _ in SETTINGS], help="only this one")
    options = parser.parse_args()
    found = common.environment()
    results: dict[str, Any] = {}
    parts = []
    for width, microbatches, steps in SETTINGS:
        if options.width in (None, width):
            judged = judge(measure(width, microbatches, steps, options.rounds))
            results[f"width {width}"] = judged
            parts.append(report(width, microbatches, judged))
    common.publish(options, __file__, found, results, "\n\n".join(parts))


if __name__ == "__main__":
    main()

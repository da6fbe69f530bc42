"""How much faster are searched schedules than named ones, and how far from the best possible? 300 random pipelines."""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from stageflow.errors import StageflowError
from stageflow.plan.search import find_schedule
from stageflow.schedule import SCHEDULES, Costs, Footprint, build_schedule, peak_memory
from stageflow.schedule.costs import at_stage
from stageflow.schedule.placement import PLACEMENTS, place

CASES = 300
SHARES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Case:
    """A chain of unequal stages; memory in activations of the average stage; None: no limit."""

    placement: str
    workers: int
    stages: int
    microbatches: int
    costs: Costs
    footprint: Footprint
    memory: float | None


def draw(random: Random) -> Case:
    """Two to eight workers with one or two stages each; stages, links and memory differ from case to case."""
    workers, chunks = random.choice((2, 3, 4, 6, 8)), random.choice((1, 2))
    stages = workers * chunks
    placement = random.choice(("loop", "fold")) if chunks == 2 else "contiguous"
    spread = random.choice((0.0, 0.1, 0.3))

    def times(mean: float) -> list[float]:
        return [round(mean / chunks * random.uniform(1 - spread, 1 + spread), 2) for _ in range(stages)]

    forward = times(10)
    inputs, weights = times(random.uniform(8, 14)), times(random.uniform(5, 11))
    costs = Costs(
        forward,
        inputs,
        weights,
        backward=[round(random.choice((0.9, 1.0)) * (i + w), 2) for i, w in zip(inputs, weights, strict=True)],
        hop=random.choice((0.0, 0.1, 1.0, 3.0)),
        transfer=random.choice((0.0, 0.0, 1.0, 4.0)),
    )
    activation = [round(random.uniform(1 - spread, 1 + spread) / chunks, 3) for _ in range(stages)]
    deferred = random.choice((None, [round(a * random.uniform(0.3, 0.9), 3) for a in activation]))
    # From what the fullest worker needs for one micro-batch, over 1F1B's memory, to twice that; or no limit.
    share = random.choice((0.3, 0.5, 0.75, 1.0, 1.0, 1.5, 2.0, math.inf))
    least = max(
        sum(a for a, w in zip(activation, place(placement, stages, workers), strict=True) if w == worker)
        for worker in range(workers)
    )
    memory = None if math.isinf(share) else max(least, share * workers * (1 + spread))
    microbatches = random.choice((workers, 2 * workers, 3 * workers, 4 * workers))
    return Case(placement, workers, stages, microbatches, costs, Footprint(0, activation, deferred), memory)


def best_named(case: Case) -> tuple[float, str] | None:
    """The fastest named schedule on the placement that fits: its defaults, or made for the case's costs or memory."""
    found: list[tuple[float, str]] = []
    placed = place(case.placement, case.stages, case.workers)
    choices: list[dict[str, Any]] = [{}, {"costs": case.costs}]
    if case.memory is not None:
        largest = max(at_stage(case.footprint.activation, stage) for stage in range(case.stages))
        choices += [{"memory": int(case.memory / largest), **options} for options in choices]
    for name in SCHEDULES:
        for options in choices:
            try:
                schedule = build_schedule(
                    name, stages=case.stages, microbatches=case.microbatches, placement=placed, **options
                )
            except StageflowError:
                continue  # refuses the counts, or takes no such option
            peaks = peak_memory(schedule, case.footprint)
            if schedule.has_backward and (case.memory is None or max(peaks) <= case.memory):
                found.append((schedule.simulate(case.costs).makespan, name))
    return min(found, default=None)


def measure(case: Case, seconds: float, seed: int) -> dict[str, float | str | None]:
    named = best_named(case)
    begin = time.process_time()
    found = find_schedule(
        stages=case.stages,
        microbatches=case.microbatches,
        workers=case.workers,
        placement=case.placement,
        costs=case.costs,
        footprint=case.footprint,
        memory=case.memory,
        seconds=seconds,
        seed=seed,
    )
    return {
        "kind": case.placement,
        "named": named[1] if named else None,
        "gain": named[0] / found.seconds - 1 if named else None,
        "gap of named": named[0] / found.bound.seconds - 1 if named else None,
        "gap": found.gap,
        "seconds": time.process_time() - begin,
    }


def row(name: str, values: list[float]) -> list[str]:
    """Quantiles, the most, and how many are nothing."""
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    shown = [f"{max(0, 100 * cuts[int(10 * share) - 1]):.1f}%" for share in SHARES]
    zero = sum(value <= 1e-9 for value in values)
    return [name, str(len(values)), f"{zero}", *shown, f"{100 * max(values):.1f}%"]


def main() -> None:
    parser = common.parser(__doc__, rounds=1)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seconds", type=float, default=0.5, help="of searching per case, on a slow core")
    options = parser.parse_args()
    found = common.environment()
    random = Random("search")
    results = []
    for number in range(options.cases):
        results.append(measure(draw(random), options.seconds, number))
        if number % 25 == 24:
            common.say(f"{number + 1} of {options.cases}")
    gains = [result["gain"] for result in results if result["gain"] is not None]
    head = ["", "cases", "of them 0", *(f"{share:.0%}" for share in SHARES), "most"]
    rows = [row("faster than the best named schedule", gains)]
    rows.append(
        row("best named above the bound", [r["gap of named"] for r in results if r["gap of named"] is not None])
    )
    rows.append(row("searched above the bound", [r["gap"] for r in results]))
    for kind in PLACEMENTS:
        rows.append(row(f"searched above the bound, {kind}", [r["gap"] for r in results if r["kind"] == kind]))
    worse = sum(gain < -1e-9 for gain in gains)
    spent = [result["seconds"] for result in results]
    markdown = (
        f"{common.table(head, rows)}\n\n"
        f"Slower than the best named schedule: {worse} of {len(gains)} (aim 0). No named schedule fits into memory: "
        f"{len(results) - len(gains)}, and one was found for each. Searching took {statistics.median(spent):.1f} s of "
        f"processor time in the median, {max(spent):.1f} s at most."
    )
    common.publish(options, __file__, found, results, markdown)


if __name__ == "__main__":
    main()

"""How much is an exact split worth? Against published ways of cutting a chain, on random instances of three kinds."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.partition.splitters import SPLITTERS
from stageflow.errors import SplitError
from stageflow.plan.partition import Block, Device, Partition, split_chain, split_graph

INSTANCES = 150
MICROBATCHES = 32
# ratio of the slowest stage to the best possible, mean and worst of 150 instances, of the libraries themselves
QUOTED = {
    ("block partition (torchgpipe)", "uniform"): (1.046, 1.215),
    ("block partition (torchgpipe)", "lognormal"): (1.139, 1.504),
    ("block partition (torchgpipe)", "heavy head"): (1.289, 1.744),
    ("binary search (DeepSpeed)", "uniform"): (1.002, 1.091),
    ("binary search (DeepSpeed)", "lognormal"): (1.004, 1.161),
    ("binary search (DeepSpeed)", "heavy head"): (1.000, 1.000),
}


def uniform(rng: random.Random, n: int) -> list[float]:
    return [rng.random() for _ in range(n)]


def lognormal(rng: random.Random, n: int) -> list[float]:
    return [rng.lognormvariate(0.0, 1.0) for _ in range(n)]


def heavy_head(rng: random.Random, n: int) -> list[float]:
    """A language model: a light embedding, equal blocks, and a head as heavy as a few of them."""
    return [0.05, *(rng.uniform(0.98, 1.02) for _ in range(n - 2)), rng.uniform(2.0, 6.0)]


KINDS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "heavy head": heavy_head,
}


def slowest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise(bounds))


def exact(costs: Sequence[float], stages: int) -> list[int]:
    """The smallest slowest stage there is: with very many micro-batches nothing else counts."""
    blocks = [Block(str(i), forward=cost) for i, cost in enumerate(costs)]
    return list(split_chain(blocks, [Device()] * stages, microbatches=1_000_000).cuts)


def by_time(kind: str) -> dict[str, tuple[float, float]]:
    """Mean and worst ratio of the slowest stage to the exact one, per splitter."""
    rng = random.Random(kind)
    ratios: dict[str, list[float]] = {name: [] for name in SPLITTERS}
    for _ in range(INSTANCES):
        stages = rng.choice([2, 4, 8, 16])
        costs = KINDS[kind](rng, rng.randint(2 * stages, 6 * stages))
        best = slowest(costs, exact(costs, stages))
        for name, cut in SPLITTERS.items():
            ratios[name].append(slowest(costs, cut(costs, stages)) / best)
    return {name: (statistics.mean(each), max(each)) for name, each in ratios.items()}


def at_given_cuts(blocks: Sequence[Block], devices: Sequence[Device], bounds: Sequence[int]) -> Partition | None:
    """What the model says of somebody else's cuts, with recomputation where it is needed; None where they don't fit."""
    if any(start == end for start, end in pairwise(bounds)):
        return None
    merged = [_merge(blocks[start:end]) for start, end in pairwise(bounds)]
    try:
        return split_chain(merged, devices, microbatches=MICROBATCHES)
    except SplitError:
        return None


def _merge(blocks: Sequence[Block]) -> Block:
    names = ("forward", "backward", "activation", "parameters", "gradients", "optimizer")
    sums: dict[str, Any] = {name: sum(getattr(block, name) for block in blocks) for name in names}
    return Block(blocks[0].name, boundary=blocks[0].boundary, output=blocks[-1].output, **sums)


def with_memory_and_links(kind: str) -> dict[str, tuple[float, float, float]]:
    """Per splitter: share of instances that don't fit, mean and worst ratio of the step of those that do."""
    rng = random.Random(f"{kind} with memory")
    ratios: dict[str, list[float]] = {name: [] for name in SPLITTERS}
    unfit = dict.fromkeys(SPLITTERS, 0)
    solved = 0
    while solved < INSTANCES:
        stages = rng.choice([2, 4, 8])
        costs = KINDS[kind](rng, rng.randint(2 * stages, 6 * stages))
        width = [rng.choice([1.0, 2.0, 4.0]) for _ in costs]
        blocks = [
            Block(
                str(i),
                forward=cost / 3,
                backward=2 * cost / 3,
                activation=4.0 * cost,
                boundary=width[i - 1] if i else 0.0,
                parameters=rng.uniform(1.0, 3.0),
                output=width[i],
            )
            for i, cost in enumerate(costs)
        ]
        need = sum(block.activation + block.parameters for block in blocks) / stages
        memory = need * rng.uniform(1.2, 2.5)
        devices = [Device(rng.choice([1.0, 1.0, 1.5]), memory, bandwidth=rng.choice([10.0, 100.0]))] * stages
        try:
            best = split_chain(blocks, devices, microbatches=MICROBATCHES)
        except SplitError:
            continue
        solved += 1
        for name, cut in SPLITTERS.items():
            found = at_given_cuts(blocks, devices, cut(costs, stages))
            if found is None:
                unfit[name] += 1
            else:
                ratios[name].append(found.step / best.step)
    return {name: (unfit[name] / solved, statistics.mean(r), max(r)) for name, r in ratios.items()}


def sizes(rounds: int) -> dict[str, float]:
    """Median seconds that large instances take."""
    rng = random.Random(0)
    blocks = [
        Block(
            str(i),
            forward=rng.lognormvariate(0, 0.5),
            backward=rng.lognormvariate(0.7, 0.5),
            activation=rng.randint(1, 100),
            boundary=rng.randint(1, 20),
            parameters=rng.randint(1, 50),
            output=rng.randint(1, 30),
        )
        for i in range(1000)
    ]
    equal = [Device(memory=3e4, latency=0.01, bandwidth=100.0)] * 64
    unequal = [Device(rng.uniform(0.5, 2), 3e4, 0.01, 100.0) for _ in range(64)]
    ladder = [(i, i + 2) for i in range(58)]
    return {
        "1,000 blocks, 64 equal devices": _seconds(lambda: split_chain(blocks, equal, microbatches=128), rounds),
        "1,000 blocks, 64 unequal devices": _seconds(lambda: split_chain(blocks, unequal, microbatches=128), rounds),
        "DAG of two chains of 30 blocks, 8 devices": _seconds(
            lambda: split_graph(blocks[:60], ladder, equal[:8], microbatches=32), rounds
        ),
    }


def _seconds(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    options = common.parser(__doc__, rounds=3).parse_args()
    found = common.environment()
    times = {kind: by_time(kind) for kind in KINDS}
    memory = {kind: with_memory_and_links(kind) for kind in KINDS}
    rows = []
    for name in SPLITTERS:
        for kind in KINDS:
            mean, worst = times[kind][name]
            quoted = QUOTED.get((name, kind))
            unfit, step_mean, step_worst = memory[kind][name]
            rows.append(
                [
                    f"{name}, {kind}",
                    f"{mean:.3f} / {worst:.3f}",
                    f"{quoted[0]:.3f} / {quoted[1]:.3f}" if quoted else "",
                    f"{unfit:.0%}",
                    f"{step_mean:.3f} / {step_worst:.3f}",
                ]
            )
    head = ["", "slowest stage", "the library itself", "does not fit", "step, of those that fit"]
    large = sizes(options.rounds)
    lines = [[what, f"{seconds:.2f}"] for what, seconds in large.items()]
    markdown = f"{common.table(head, rows)}\n\n{common.table(['', 'seconds'], lines)}"
    results = {"slowest stage": times, "memory and links": memory, "seconds": large}
    common.publish(options, __file__, found, results, markdown)


if __name__ == "__main__":
    main()

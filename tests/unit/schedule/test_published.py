"""Figures that others published, reached to their last digit; and the order in which real runs came out."""

from __future__ import annotations

import itertools

import pytest

from stageflow.schedule import Action, Costs, Footprint, Schedule, Times, build_schedule, peak_memory
from stageflow.schedule.walk import walk

NAMES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")

# Bubble is (cost - work) / cost, cost the longest span of a worker: from its first start to its last end. Times are
# microseconds; B here is the gradient of the inputs alone, our I; a hop is one way between neighbours.
#
# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024: the profiled settings in the authors' public scheduler.
# workers, micro-batches, times (F, I, W) of a worker's share, hop, stages per worker when interleaved, bubbles (NAMES)
ICLR = [
    (
        8,
        24,
        (18522, 18086, 9337),
        601,
        3,
        (0.2431, 0.1055, 0.1585, 0.1083),
    ),
    (
        8,
        64,
        (18546, 18097, 9321),
        762,
        3,
        (0.124, 0.0443, 0.0674, 0.0444),
    ),
    (
        8,
        24,
        (29718, 29444, 19927),
        527,
        4,
        (0.2347, 0.0808, 0.1323, 0.0698),
    ),
    (
        8,
        64,
        (29935, 29621, 19388),
        535,
        4,
        (0.1091, 0.032, 0.0554, 0.0294),
    ),
    (
        16,
        48,
        (11347, 11248, 8132),
        377,
        3,
        (0.2552, 0.1104, 0.1397, 0.0672),
    ),
    (
        16,
        128,
        (11325, 11308, 8109),
        378,
        3,
        (0.1251, 0.0445, 0.0576, 0.0266),
    ),
    (
        32,
        96,
        (10419, 10207, 7715),
        408,
        2,
        (0.2646, 0.1493, 0.1421, 0.0641),
    ),
    (
        32,
        256,
        (10402, 10248, 7698),
        460,
        2,
        (0.1352, 0.0624, 0.0594, 0.0257),
    ),
]

# Qi et al., "Pipeline Parallelism with Controllable Memory", 2024: the profiled settings in the authors' public
# generator. workers, micro-batches, times of half a worker's share, hop, bubbles; interleaved has two stages per worker
CONTROLLABLE = [
    (
        16,
        48,
        (14407, 14380, 9676),
        1610,
        (0.2668, 0.1499, 0.1536, 0.0823, 0.0697),
    ),
    (
        16,
        128,
        (14316, 14306, 9639),
        1619,
        (0.139, 0.0621, 0.0637, 0.0325, 0.0274),
    ),
    (
        24,
        96,
        (6783, 6984, 5259),
        758,
        (0.2229, 0.1184, 0.1121, 0.048, 0.0483),
    ),
    (
        32,
        96,
        (9458, 9748, 7288),
        879,
        (0.2676, 0.1509, 0.1429, 0.0629, 0.0593),
    ),
    (
        32,
        256,
        (9447, 9644, 7193),
        887,
        (0.1362, 0.0626, 0.0593, 0.0251, 0.0236),
    ),
]

Triple = tuple[float, float, float]
ROWS: list[tuple[int, int, Triple, float, int, dict[str, float]]] = [
    (p, m, times, hop, v, dict(zip(NAMES, bubbles, strict=False))) for p, m, times, hop, v, bubbles in ICLR
] + [
    (p, m, (2 * f, 2 * i, 2 * w), hop, 2, dict(zip(NAMES, bubbles, strict=True)))
    for p, m, (f, i, w), hop, bubbles in CONTROLLABLE
]
IDS = [f"{p}-{m}-{v}" for p, m, _, _, v, _ in ROWS]


def costs_of(times: Triple, hop: float, v: int = 1) -> Costs:
    """Times of one of v stages that share a worker's work."""
    forward, backward_input, backward_weight = (seconds / v for seconds in times)
    return Costs(forward, backward_input, backward_weight, hop=hop)


@pytest.mark.parametrize(("p", "m", "times", "hop", "v", "bubbles"), ROWS, ids=IDS)
def test_one_stage_per_worker(p: int, m: int, times: Triple, hop: float, v: int, bubbles: dict[str, float]) -> None:
    for name in ("1f1b", "zb_h1", "zb_h2"):
        found = build_schedule(name, stages=p, microbatches=m).simulate(costs_of(times, hop)).span_bubble
        assert round(found, 4) == bubbles[name], name


@pytest.mark.parametrize(("p", "m", "times", "hop", "v", "bubbles"), ROWS[len(ICLR) :], ids=IDS[len(ICLR) :])
def test_zb_v(p: int, m: int, times: Triple, hop: float, v: int, bubbles: dict[str, float]) -> None:
    costs = costs_of(times, hop, v)
    schedule = build_schedule("zb_v", stages=v * p, microbatches=m, costs=costs)
    assert round(schedule.simulate(costs).span_bubble, 4) == bubbles["zb_v"]
    assert max(peak_memory(schedule, Footprint())) == 2 * p


def span_with_lax_wraps(schedule: Schedule, costs: Costs) -> float:
    """The longest span if, on the way between the last worker and the first, only the first micro-batch of each group
    of p has to wait for its values. The authors' scheduler counts so; no run can."""
    placement, p = schedule.placement, schedule.n_workers
    free = [0.0] * p
    first: dict[int, float] = {}
    times: dict[Action, Times] = {}
    for worker, action, needs in walk(schedule):
        start = free[worker]
        for need in needs:
            wraps = abs(placement[need.stage] - worker) == p - 1
            if not wraps or action.microbatch % p == 0:
                hop = costs.hop_between(need.stage, action.stage) if placement[need.stage] != worker else 0.0
                start = max(start, times[need].end + hop)
        first.setdefault(worker, start)
        free[worker] = start + costs.of(action)
        times[action] = Times(start, free[worker])
    return max(free[worker] - first[worker] for worker in range(p))


@pytest.mark.parametrize(("p", "m", "times", "hop", "v", "bubbles"), ROWS, ids=IDS)
def test_interleaved(p: int, m: int, times: Triple, hop: float, v: int, bubbles: dict[str, float]) -> None:
    """The order is the authors': with their lax wraps the figure is theirs. What it really takes is p hops more, which
    the last micro-batch of a group spends on its way back through the last but one stage of each worker."""
    costs, work = costs_of(times, hop, v), m * sum(times)
    schedule = build_schedule("interleaved_1f1b", stages=p * v, workers=p, microbatches=m)
    lax, real = span_with_lax_wraps(schedule, costs), schedule.simulate(costs).span
    assert round((lax - work) / lax, 4) == bubbles["interleaved_1f1b"]
    assert lax == pytest.approx(work + (p - 1) * sum(times) / v + (p * (2 * v - 1) - 2) * hop)
    assert real == pytest.approx(lax + p * hop)


# Speed on n devices with m micro-batches, relative to (2, 1): torchgpipe docs/benchmarks.rst, AmoebaNet-D on Tesla P40;
# the same figure of the GPipe paper, as quoted there.
GRID = [(n, m) for n in (2, 4, 8) for m in (1, 4, 32)]
SPEEDUPS = {
    "torchgpipe": [1, 1.539, 1.773, 1.004, 1.666, 2.709, 0.932, 2.621, 4.953],
    "GPipe": [1, 1.07, 1.21, 1.13, 1.26, 1.84, 1.38, 1.72, 3.48],
}


@pytest.mark.parametrize("source", SPEEDUPS)
def test_gpipe_runs_come_out_in_this_order(source: str) -> None:
    """More micro-batches on as many devices, and more devices for as many micro-batches, are faster; no run beats what
    the simulation has as its limit. A single micro-batch runs nowhere at the same time, and is left out."""
    measured = dict(zip(GRID, SPEEDUPS[source], strict=True))
    simulated = {(n, m): n * (1 - build_schedule("gpipe", stages=n, microbatches=m).simulate().bubble) for n, m in GRID}
    for one, other in itertools.permutations(GRID, 2):
        if (one[0] == other[0] or one[1] == other[1]) and 1 not in (one[1], other[1]):
            assert (measured[one] < measured[other]) == (simulated[one] < simulated[other]), (one, other)
    for n, m in GRID:
        assert m == 1 or measured[n, m] <= simulated[n, m]


def test_more_partitions_are_faster_but_no_wonder() -> None:
    """torchgpipe docs, ResNet-101, images per second: without it, then in 2, 4 and 8 partitions."""
    plain, measured = 95.862, {2: 135.539, 4: 265.958, 8: 411.662}
    simulated = {n: n * (1 - build_schedule("gpipe", stages=n, microbatches=32).simulate().bubble) for n in measured}
    assert sorted(measured, key=measured.__getitem__) == sorted(simulated, key=simulated.__getitem__)
    assert all(measured[n] / plain <= n for n in measured)


def test_interleaving_is_faster() -> None:
    """torchtitan benchmarks, Llama 3.1 405B on 512 H100, pipelines of 8: tokens per second and GPU 100 with 1F1B, 128
    interleaved."""
    plain = build_schedule("1f1b", stages=8, microbatches=8).simulate(Costs(2, 2, 2)).makespan
    split = build_schedule("interleaved_1f1b", stages=16, workers=8, microbatches=8).simulate(Costs(1, 1, 1)).makespan
    assert split < plain
    assert plain / split >= 128 / 100  # with as many micro-batches as workers, where interleaving gains most

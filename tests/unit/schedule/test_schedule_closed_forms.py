"""What is known of each schedule in numbers: idle time and peak activations, exact over a grid of counts and times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from stageflow.schedule import Action, Costs, Footprint, Schedule, build_schedule, depends_on, peak_memory

# F, I, W: all equal, the usual order of a transformer, I longer than F, W long, W short.
TIMES = [(5, 5, 5), (10, 9, 6), (5, 7, 4), (6, 6, 6), (9, 5, 1), (8, 8, 7)]


def grid(least: int = 1, most: int = 6, *, rounds: int = 3) -> Iterator[tuple[int, int]]:
    """Workers p, and micro-batches m from p on, multiples and in between."""
    for p in range(least, most + 1):
        for m in sorted({p, p + 1, 2 * p - 1, 2 * p, rounds * p}):
            if m >= p:
                yield p, m


def span_idle(schedule: Schedule, costs: Costs) -> float:
    """Idle seconds between first start and last end of the worker where that is longest."""
    simulation = schedule.simulate(costs)
    return simulation.span - max(simulation.busy)


def peaks(schedule: Schedule) -> tuple[float, ...]:
    """Most activations of a stage per worker."""
    return peak_memory(schedule, Footprint())


def assert_everybody_idles(schedule: Schedule, costs: Costs, seconds: float) -> None:
    """Every worker idles this long from the first start to the last end over all workers."""
    assert {sum(idle) for idle in schedule.simulate(costs).idle} == {seconds}


@pytest.mark.parametrize("times", TIMES)
def test_one_stage_per_worker_without_split(times: tuple[int, int, int]) -> None:
    costs, total = Costs(*times), sum(times)
    for p, m in grid():
        kept = {
            "gpipe": (m,) * p,
            "1f1b": tuple(min(m, p - d) for d in range(p)),
            "eager_1f1b": tuple(min(m, 2 * (p - 1 - d) + 1) for d in range(p)),
            "pipedream_2bw": tuple(min(m, p - d) for d in range(p)),
        }
        for name, most in kept.items():
            schedule = build_schedule(name, stages=p, microbatches=m)
            assert peaks(schedule) == most, (name, p, m)
            assert_everybody_idles(schedule, costs, (p - 1) * total)
            assert span_idle(schedule, costs) == (p - 1) * total


def test_fewer_micro_batches_than_workers_keep_all() -> None:
    for name in ("gpipe", "1f1b", "eager_1f1b"):
        for p, m in itertools.product(range(1, 7), range(1, 6)):
            if m <= p:
                schedule = build_schedule(name, stages=p, microbatches=m)
                assert peaks(schedule)[0] == m
                assert_everybody_idles(schedule, Costs(2, 3, 4), (p - 1) * 9)


def test_eager_1f1b_pays_each_hop_once() -> None:
    for (p, m), (f, b, c) in itertools.product(grid(), [(5, 5, 0), (5, 9, 5), (7, 5, 4), (6, 12, 3)]):
        eager = build_schedule("eager_1f1b", stages=p, microbatches=m)
        simulation = eager.simulate(Costs(f, backward=b, hop=c))
        assert simulation.makespan == m * (f + b) + (p - 1) * (f + b + 2 * c)


def test_pipedream_2bw_idles_once_for_all_steps() -> None:
    for p, steps in itertools.product(range(1, 6), range(1, 5)):
        schedule = build_schedule("pipedream_2bw", stages=p, microbatches=p + 1, steps=steps)
        assert schedule.microbatches == steps * (p + 1)
        assert max(peaks(schedule)) == p
        assert_everybody_idles(schedule, Costs(2, 3, 4), (p - 1) * 9)


@pytest.mark.parametrize("times", TIMES[:4])
@pytest.mark.parametrize("v", [1, 3])
def test_loops(v: int, times: tuple[int, int, int]) -> None:
    costs, total = Costs(*times), sum(times)
    for p, m in grid(most=4):
        counts = {"stages": p * v, "workers": p, "microbatches": m}
        breadth = build_schedule("looped_bfs", **counts)
        assert peaks(breadth) == (m * v,) * p
        assert_everybody_idles(breadth, costs, (p - 1) * total)
        for wider in (0, 1, 3):
            group = p + wider
            depth = build_schedule("interleaved_1f1b", group=group, **counts)
            largest = -(-m // max(1, m // group))
            assert peaks(depth) == tuple(min(m * v, (v - 1) * largest + 2 * (p - 1 - d) + 1) for d in range(p))
            assert_everybody_idles(depth, costs, (p - 1) * total)
            split = build_schedule("interleaved_zb", group=group, **counts)
            assert peaks(split) == (min(m * v, (v - 1) * largest + p),) * p
        if m % p == 0:
            f, i, w = times
            split = build_schedule("interleaved_zb", **counts)
            assert span_idle(split, costs) == (p - 1) * (f + i - w)


@pytest.mark.parametrize("times", TIMES)
def test_zero_bubble_with_one_stage_per_worker(times: tuple[int, int, int]) -> None:
    costs = Costs(*times)
    f, i, w = times
    for p, m in grid(most=8):
        h1 = build_schedule("zb_h1", stages=p, microbatches=m)
        assert peaks(h1) == (p,) * p
        assert span_idle(h1, costs) == (p - 1) * (f + i - w)
        if m >= 2 * p:
            h2 = build_schedule("zb_h2", stages=p, microbatches=m)
            assert peaks(h2) == (2 * p - 1,) * p
            assert span_idle(h2, costs) == (p - 1) * (f + i - 2 * w)
            assert f + i - 2 * w or h2.simulate(costs).makespan == m * (f + i + w) + (p - 1) * f


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_hops(p: int) -> None:
    """Spans that Qi et al. 2024 give, with short hops of c."""
    f, i, w, c, m = 20, 22, 18, 2, 3 * p
    total, costs = f + i + w, Costs(f, i, w, hop=c)
    spans = {
        name: build_schedule(name, stages=p, microbatches=m).simulate(costs).span for name in ("1f1b", "zb_h1", "zb_h2")
    }
    assert spans["1f1b"] == (m + p - 1) * total + (c * (2 * (p - 1) * m // p + 2 * (p - 2)) if p > 1 else 0)
    assert spans["zb_h1"] == m * total + (p - 1) * (f + i - w + 4 * c)
    assert spans["zb_h2"] == m * total + (p - 1) * (f + i - 2 * w + 2 * c)
    for v in (2, 3):
        interleaved = build_schedule("interleaved_1f1b", stages=p * v, workers=p, microbatches=m)
        rounds = 2 * p * v - 2 if p > 1 else 0
        assert interleaved.simulate(costs).span == (m * v + p - 1) * total + c * rounds


def test_zb_v() -> None:
    for p, more in itertools.product(range(1, 9), (0, 1, 7)):
        m = 2 * p - 1 + more
        schedule = build_schedule("zb_v", stages=2 * p, microbatches=m)
        assert max(peaks(schedule)) == 2 * p
        simulation = schedule.simulate()
        assert (simulation.span, simulation.makespan) == (6 * m, 6 * m + p - 1)


def test_v_half_and_v_min() -> None:
    for p, m in grid(most=9):
        half = build_schedule("v_half", stages=2 * p, microbatches=m)
        assert span_idle(half, Costs(2, 2, 2)) == 7 * (p - 1) + (0 if p % 2 else 3)
        least = build_schedule("v_min", stages=2 * p, microbatches=m)
        assert span_idle(least, Costs()) == (4 * p - 5 + (0 if p % 3 else 2) if p > 1 else 0)
        for schedule, most in ((half, (p + 2) // 2), (least, (p + 4) // 3)):
            assert max(peaks(schedule)) == 2 * most


def test_v_half_does_not_idle_more_for_more_micro_batches() -> None:
    """Where W + 2I >= 2F and W + 2F >= 2I, as its paper says; outside it does."""
    for p in (2, 3, 4, 7):
        for times, same in (((4, 3, 2), True), ((3, 4, 3), True), ((6, 2, 1), False), ((2, 6, 1), False)):
            idle = {
                span_idle(build_schedule("v_half", stages=2 * p, microbatches=m), Costs(*times))
                for m in (4 * p, 6 * p, 8 * p)
            }
            assert (len(idle) == 1) == same, (p, times, idle)


def span_idle_in_pairs(schedule: Schedule, costs: Costs) -> float:
    """As `span_idle` if a forward and the whole backward after it start and end together, as overlapping ones do."""
    pairs = {
        action: (action, after)
        for order in schedule.orders
        for action, after in itertools.pairwise(order)
        if (action.kind, after.kind) == ("F", "B")
    }
    ended: dict[Action, float] = {}
    queues = [list(order) for order in schedule.orders]
    free, first = [0.0] * len(queues), [0.0] * len(queues)
    while any(queues):
        for worker, queue in enumerate(queues):
            while queue:
                together = pairs.get(queue[0], (queue[0],))
                needs = [n for a in together for n in depends_on(a, schedule.graph, schedule.whole_backward)]
                if not all(need in ended for need in needs):
                    break
                start = max([free[worker], *(ended[need] for need in needs)])
                if len(queue) == len(schedule.orders[worker]):
                    first[worker] = start
                free[worker] = start + sum(costs.of(action) for action in together)
                ended.update(dict.fromkeys(together, free[worker]))
                del queue[: len(together)]
    spans = [end - start for start, end in zip(first, free, strict=True)]
    return max(spans) - max(schedule.simulate(costs).busy)


@pytest.mark.parametrize("times", [(5, 5, 5), (8, 8, 7), (4, 4, 1), (3, 3, 2)])
def test_dualpipe_formula_of_its_authors(times: tuple[int, int, int]) -> None:
    """(p/2-1)(F&B + B - 3W), F&B a forward and a backward that overlap: here both are done in the time of both. The
    formula takes an F to be as long as an I."""
    f, i, w = times
    for half in range(1, 5):
        for name, counts in (("dualpipe", (2 * half, 4 * half + 2)), ("dualpipe_v", (2 * half, 2 * half + 3))):
            schedule = build_schedule(name, stages=counts[0], microbatches=counts[1])
            assert span_idle_in_pairs(schedule, Costs(*times)) == (half - 1) * ((f + i + w) + (i + w) - 3 * w), name


@pytest.mark.parametrize("times", [(5, 5, 5), (10, 9, 6), (8, 8, 7), (6, 4, 3)])
def test_dualpipe_and_its_v(times: tuple[int, int, int]) -> None:
    costs = Costs(*times)
    f, i, w = times
    for p, more in itertools.product(range(1, 7), (0, 1, 5)):
        folded = build_schedule("dualpipe_v", stages=2 * p, microbatches=2 * p + more)
        assert peaks(folded) == (2 * p + 1,) * p
        assert span_idle(folded, costs) == (p - 1) * (f + i - w)
        both = build_schedule("dualpipe", stages=2 * p, microbatches=4 * p + 2 * more)
        assert peaks(both) == (2 * p + 1,) * 2 * p
        assert span_idle(both, costs) == (p - 1) * (f + i - w)
        # Half of one, folded, is the other: stage s of the second copy becomes stage s of the V.
        half = [[a if a.stage < p else a._replace(stage=a.stage - 2 * p) for a in order] for order in both.orders[:p]]
        assert half == [list(order) for order in folded.orders]


def test_chimera() -> None:
    costs = Costs(2, 1, 1)  # a backward as long as a forward
    for p, units in itertools.product(range(2, 13, 2), (1, 2, 5)):
        m = units * p
        schedule = build_schedule("chimera", stages=p, microbatches=m)
        assert peaks(schedule) == tuple(p // 2 + 1 + min(d, p - 1 - d) for d in range(p))
        simulation = schedule.simulate(costs)
        assert_everybody_idles(schedule, costs, (p - 2) * 2)
        assert simulation.bubble == pytest.approx((p - 2) / (2 * m + p - 2))


def test_two_copies_take_half_of_the_micro_batches_each() -> None:
    for name in ("dualpipe", "chimera"):
        schedule = build_schedule(name, stages=4, microbatches=8)
        assert (schedule.n_stages, schedule.n_workers, schedule.microbatches, schedule.copies) == (8, 4, 4, 2)
        assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
        assert (3, 4) not in schedule.graph.edges

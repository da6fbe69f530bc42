"""Every builder: its picture, its closed forms, and that any counts give a schedule that validates."""

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule import SCHEDULES, Action, Costs, Schedule, build_schedule
from stageflow.schedule.builders.forward_only import forward_only
from stageflow.schedule.builders.gpipe import gpipe
from stageflow.schedule.builders.interleaved import interleaved_1f1b
from stageflow.schedule.builders.one_f_one_b import one_f_one_b
from stageflow.schedule.builders.zero_bubble import zb_h1, zb_h2, zb_v

PICTURES: list[tuple[Callable[..., object], str, int, int, str]] = [
    (
        gpipe,
        "gpipe",
        3,
        2,
        """
        0 | F0 F1 .  .  .  .  .  .  B0 -- B1 --
        1 | .  F0 F1 .  .  .  B0 -- B1 -- .  .
        2 | .  .  F0 F1 B0 -- B1 -- .  .  .  .
        """,
    ),
    (
        one_f_one_b,
        "1f1b",
        3,
        4,
        """
        0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
        """,
    ),
    (
        interleaved_1f1b,
        "interleaved_1f1b",
        4,
        2,
        """
        0 | 0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---
        1 | .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- .   .
        """,
    ),
    (
        zb_h1,
        "zb_h1",
        3,
        4,
        """
        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    (
        zb_h2,
        "zb_h2",
        3,
        5,
        """
        0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
        """,
    ),
    (
        zb_v,
        "zb_v",
        4,
        4,
        """
        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        """,
    ),
    (
        forward_only,
        "forward_only",
        3,
        3,
        """
        0 | F0 F1 F2 .  .
        1 | .  F0 F1 F2 .
        2 | .  .  F0 F1 F2
        """,
    ),
]


@pytest.mark.parametrize(
    ("builder", "name", "stages", "microbatches", "picture"), PICTURES, ids=[p[1] for p in PICTURES]
)
def test_picture(builder: Callable[..., object], name: str, stages: int, microbatches: int, picture: str) -> None:
    drawn = build_schedule(name, stages=stages, microbatches=microbatches).draw()
    assert drawn == inspect.cleandoc(picture)
    documented = {line.strip() for line in (builder.__doc__ or "").splitlines()}
    assert set(drawn.splitlines()) <= documented, "the docstring shows another picture"


counts = {
    "stages": st.integers(1, 8),
    "workers": st.integers(1, 8),
    "microbatches": st.integers(1, 17),
}


@given(name=st.sampled_from(SCHEDULES), data=st.data(), **counts)
def test_any_counts_in_any_placement_validate(
    name: str, data: st.DataObject, stages: int, workers: int, microbatches: int
) -> None:
    workers = min(workers, stages)
    free = st.permutations([*range(workers), *(s % workers for s in range(stages - workers))])
    placement = data.draw(st.one_of(st.none(), st.sampled_from(["loop", "fold", "contiguous"]), free))
    edges = data.draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))))
    graph = data.draw(st.sampled_from([None, StageGraph(stages, frozenset((a, b) for a, b in edges if a < b))]))
    schedule = build_schedule(
        name, stages=stages, microbatches=microbatches, workers=workers, placement=placement, graph=graph
    )
    schedule.validate()
    assert schedule.has_backward == (name != "forward_only")


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_gpipe_closed_forms(p: int, m: int) -> None:
    schedule = build_schedule("gpipe", stages=p, microbatches=m)
    assert schedule.validate().peak_activations == (m,) * p
    assert_idle(schedule, Costs(2, 3, 4), (p - 1) * 9)


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_1f1b_closed_forms(p: int, m: int) -> None:
    schedule = build_schedule("1f1b", stages=p, microbatches=m)
    assert schedule.validate().peak_activations == tuple(min(m, p - d) for d in range(p))
    assert_idle(schedule, Costs(2, 3, 4), (p - 1) * 9)


@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 30), wider=st.integers(0, 3))
def test_interleaved_closed_forms(p: int, v: int, m: int, wider: int) -> None:
    group = p + wider
    schedule = build_schedule("interleaved_1f1b", stages=p * v, workers=p, microbatches=m, group=group)
    largest = -(-m // max(1, m // group))
    peaks = tuple(min(m * v, (v - 1) * largest + 2 * (p - 1 - d) + 1) for d in range(p))
    assert schedule.validate().peak_activations == peaks
    if m >= p:
        assert_idle(schedule, Costs(2, 3, 4), (p - 1) * 9)


@settings(max_examples=40)
@given(p=st.integers(1, 8), extra=st.integers(0, 12))
def test_zb_h1_closed_forms(p: int, extra: int) -> None:
    m = p + extra
    schedule = build_schedule("zb_h1", stages=p, microbatches=m)
    assert schedule.validate().peak_activations == (p,) * p
    assert schedule.simulate(Costs(5, 5, 5)).span == m * 15 + (p - 1) * 5
    assert schedule.simulate(Costs(5, 6, 4)).span == m * 15 + (p - 1) * 7


@settings(max_examples=40)
@given(p=st.integers(1, 8), extra=st.integers(0, 12))
def test_zb_h2_closed_forms(p: int, extra: int) -> None:
    m = 2 * p + extra
    schedule = build_schedule("zb_h2", stages=p, microbatches=m)
    assert schedule.validate().peak_activations == (2 * p - 1,) * p
    simulation = schedule.simulate()
    assert (simulation.span, simulation.makespan) == (3 * m, 3 * m + p - 1)


@settings(max_examples=40)
@given(p=st.integers(1, 8), extra=st.integers(0, 12))
def test_zb_v_closed_forms(p: int, extra: int) -> None:
    m = 2 * p - 1 + extra
    schedule = build_schedule("zb_v", stages=2 * p, microbatches=m)
    assert max(schedule.validate().peak_activations) <= 2 * p
    simulation = schedule.simulate()
    assert (simulation.span, simulation.makespan) == (6 * m, 6 * m + p - 1)


@given(p=st.integers(1, 8), m=st.integers(1, 20), memory=st.integers(1, 18))
def test_zb_h1_keeps_to_the_memory_it_is_given(p: int, m: int, memory: int) -> None:
    schedule = build_schedule("zb_h1", stages=p, microbatches=m, memory=memory)
    assert max(schedule.validate().peak_activations) <= memory


# Optima proven with a constraint solver (OR-Tools CP-SAT): 4 stages, 8 micro-batches, an activation kept from the
# start of F to the end of W, makespan by the most activations a worker may keep; (F, I, W, hop).
OPTIMA = [
    ((10, 14, 8, 1), {4: 316, 5: 302, 6: 294, 7: 289}),
    ((10, 12, 12, 1), {4: 314, 5: 305, 6: 305, 7: 305}),
    ((10, 10, 10, 0), {4: 270}),
]


@pytest.mark.parametrize(("times", "optima"), OPTIMA)
def test_zb_reaches_the_proven_optimum_for_its_memory(times: tuple[int, ...], optima: dict[int, int]) -> None:
    forward, backward_input, backward_weight, hop = times
    costs = Costs(forward, backward_input, backward_weight, hop=hop)
    found = {
        memory: build_schedule("zb_h1", stages=4, microbatches=8, memory=memory).simulate(costs).makespan
        for memory in optima
    }
    assert found == optima


def test_1f1b_is_the_proven_optimum_for_its_memory() -> None:
    # Same source; F 10, whole backward 22, hop 1, at most 4 activations.
    schedule = build_schedule("1f1b", stages=4, microbatches=8)
    assert schedule.simulate(Costs(10, 11, 11, hop=1)).makespan == 368


@given(
    stages=st.integers(2, 7), workers=st.integers(2, 4), m=st.integers(1, 9), name=st.sampled_from(["1f1b", "zb_h1"])
)
def test_uneven_placements_keep_the_memory_bound_of_1f1b(stages: int, workers: int, m: int, name: str) -> None:
    workers = min(workers, stages)
    schedule = build_schedule(name, stages=stages, workers=workers, microbatches=m, placement="loop")
    bounds = [sum(stages - s for s in schedule.stages_of(worker)) for worker in range(workers)]
    if name == "zb_h1":
        bounds = [max(bounds)] * workers
    assert all(peak <= bound for peak, bound in zip(schedule.validate().peak_activations, bounds, strict=True))


def test_neighbouring_stages_act_as_one() -> None:
    three = build_schedule("1f1b", stages=3, workers=2, microbatches=2)
    assert [" ".join(map(str, order)) for order in three.orders] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
        "2F0 2B0 2F1 2B1",
    ]


@given(p=st.integers(1, 6), m=st.integers(1, 15))
def test_greedy_finds_1f1b(p: int, m: int) -> None:
    found = build_schedule("greedy", stages=p, microbatches=m, split=False)
    assert found.orders == build_schedule("1f1b", stages=p, microbatches=m).orders


@settings(max_examples=30)
@given(data=st.data(), stages=st.integers(1, 6), workers=st.integers(1, 4), m=st.integers(1, 8), split=st.booleans())
def test_greedy_keeps_to_its_memory(data: st.DataObject, stages: int, workers: int, m: int, split: bool) -> None:
    workers = min(workers, stages)
    placement = data.draw(st.permutations([*range(workers), *(s % workers for s in range(stages - workers))]))
    memory = [placement.count(w) + data.draw(st.integers(0, 3)) for w in range(workers)]
    times = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    costs = Costs(times, times[::-1], 3, hop=data.draw(st.integers(0, 5)))
    schedule = build_schedule(
        "greedy", stages=stages, microbatches=m, placement=placement, memory=memory, costs=costs, split=split
    )
    peaks = schedule.validate().peak_activations
    assert all(peak <= limit for peak, limit in zip(peaks, memory, strict=True))


def test_greedy_in_a_loop_reaches_the_least_possible_time() -> None:
    """The last worker can't start before (p-1)(F+c), and then has all its work to do."""
    costs = Costs(5, 5, 5, hop=1)
    schedule = build_schedule("greedy", stages=8, workers=4, microbatches=24, placement="loop", memory=12, costs=costs)
    assert schedule.simulate(costs).makespan == 3 * (5 + 1) + 24 * 2 * 15


def test_forward_only_sends_groups_round_a_loop() -> None:
    schedule = build_schedule("forward_only", stages=4, workers=2, microbatches=4, placement="loop")
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    ]
    assert schedule.simulate().bubble == pytest.approx(1 / 9)


def test_default_workers_and_placement() -> None:
    defaults = {name: build_schedule(name, stages=4, microbatches=2).placement for name in SCHEDULES}
    assert defaults.pop("interleaved_1f1b") == (0, 1, 0, 1)
    assert defaults.pop("zb_v") == (0, 1, 1, 0)
    assert set(defaults.values()) == {(0, 1, 2, 3)}
    assert build_schedule("zb_v", stages=3, microbatches=2).placement == (0, 1, 1)
    assert build_schedule("gpipe", stages=3, microbatches=2, placement=[1, 0, 1]).n_workers == 2


def test_split_is_told_per_stage() -> None:
    assert build_schedule("zb_h1", stages=2, microbatches=1).splits_backward(1)
    assert not build_schedule("1f1b", stages=2, microbatches=1).splits_backward(1)
    mixed = Schedule.from_orders(["0F0 0B0", "1F0 1I0 1W0"])
    assert [mixed.splits_backward(stage) for stage in (0, 1)] == [False, True]
    assert mixed.whole_backward(0, 0)
    assert not mixed.whole_backward(1, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "2f2b"}, "unknown schedule '2f2b'; known: gpipe, 1f1b, interleaved_1f1b, zb_h1"),
        ({"stages": 0}, "needs stages >= 1, got 0"),
        ({"microbatches": 0}, "needs microbatches >= 1, got 0"),
        ({"workers": 3}, "3 workers for 2 stages.*choose from 1 to 2 workers"),
        ({"graph": StageGraph.chain(3)}, "the graph has 3 stages, but stages=2"),
        ({"memory": 3}, "'1f1b' has no option 'memory'; its options: costs"),
        ({"name": "gpipe", "group": 3}, "'gpipe' has no option 'group'; its options: none"),
        ({"name": "zb_h1", "memory": 0}, "memory=0 is too small for worker 0"),
        ({"name": "zb_h1", "stages": 4, "workers": 2, "memory": 1}, "has 2 stages: it must be able to keep at least 2"),
        ({"name": "greedy", "memory": 0}, "memory=0 is too small for worker 0"),
        ({"name": "greedy", "costs": Costs([1, 2, 3])}, "costs.forward has 3 times for 2 stages"),
        ({"name": "interleaved_1f1b", "stages": 4, "group": 1}, "use a group of at least 2"),
    ],
)
def test_impossible_requests_are_refused_with_what_would_work(arguments: dict[str, object], says: str) -> None:
    request: dict[str, object] = {"name": "1f1b", "stages": 2, "microbatches": 2} | arguments
    with pytest.raises(InputError, match=says):
        build_schedule(str(request.pop("name")), **request)  # type: ignore[arg-type]


def assert_idle(schedule: Schedule, costs: Costs, seconds: float) -> None:
    """Every worker idles this long from the first start to the last end over all workers."""
    assert {sum(idle) for idle in schedule.simulate(costs).idle} == {seconds}


def test_actions_are_small_tuples() -> None:
    assert build_schedule("gpipe", stages=1, microbatches=1).orders == ((Action("F", 0, 0), Action("B", 0, 0)),)

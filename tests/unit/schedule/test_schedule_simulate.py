"""The simulator against hand-computed times and published figures."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule import SCHEDULES, Action, Costs, Schedule, build_schedule

# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024: the profiled settings in the authors' public scheduler, with
# the bubbles it gives: stages, micro-batches, (F, I, W, hop in microseconds), bubble of 1f1b, zb_h1, zb_h2.
ICLR_2024 = [
    (8, 24, (18522, 18086, 9337, 601), (0.2431, 0.1585, 0.1083)),
    (8, 64, (18546, 18097, 9321, 762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29718, 29444, 19927, 527), (0.2347, 0.1323, 0.0698)),
    (8, 64, (29935, 29621, 19388, 535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11347, 11248, 8132, 377), (0.2552, 0.1397, 0.0672)),
    (16, 128, (11325, 11308, 8109, 378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10419, 10207, 7715, 408), (0.2646, 0.1421, 0.0641)),
    (32, 256, (10402, 10248, 7698, 460), (0.1352, 0.0594, 0.0257)),
]

# Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, from the authors' public generator; times per half
# of a one-chunk stage; bubble of 1f1b, zb_h1, zb_h2, and of its own search for zb_v.
CONTROLLABLE_MEMORY = [
    (16, 48, (14407, 14380, 9676, 1610), (0.2668, 0.1536, 0.0823), 0.0697),
    (16, 128, (14316, 14306, 9639, 1619), (0.1390, 0.0637, 0.0325), 0.0274),
    (24, 96, (6783, 6984, 5259, 758), (0.2229, 0.1121, 0.0480), 0.0483),
    (32, 96, (9458, 9748, 7288, 879), (0.2676, 0.1429, 0.0629), 0.0593),
]


@pytest.mark.parametrize(("stages", "microbatches", "times", "bubbles"), ICLR_2024)
def test_published_bubbles(stages: int, microbatches: int, times: tuple[int, ...], bubbles: tuple[float, ...]) -> None:
    forward, backward_input, backward_weight, hop = times
    costs = Costs(forward, backward_input, backward_weight, hop=hop)
    found = tuple(
        round(build_schedule(name, stages=stages, microbatches=microbatches).simulate(costs).span_bubble, 4)
        for name in ("1f1b", "zb_h1", "zb_h2")
    )
    assert found == bubbles


@pytest.mark.parametrize(("workers", "microbatches", "times", "bubbles", "zb_v"), CONTROLLABLE_MEMORY)
def test_published_bubbles_beside_zb_v(
    workers: int, microbatches: int, times: tuple[int, ...], bubbles: tuple[float, ...], zb_v: float
) -> None:
    forward, backward_input, backward_weight, hop = times
    twice = Costs(2 * forward, 2 * backward_input, 2 * backward_weight, hop=hop)
    found = tuple(
        round(build_schedule(name, stages=workers, microbatches=microbatches).simulate(twice).span_bubble, 4)
        for name in ("1f1b", "zb_h1", "zb_h2")
    )
    assert found == bubbles
    half = Costs(forward, backward_input, backward_weight, hop=hop)
    folded = build_schedule("zb_v", stages=2 * workers, microbatches=microbatches).simulate(half)
    assert folded.span_bubble == pytest.approx(zb_v, abs=0.002)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_closed_forms_with_hops(p: int) -> None:
    """Spans that Qi et al. 2024 give; c is one hop."""
    f, i, w, c = 20, 22, 18, 2
    m = 3 * p
    total = f + i + w
    costs = Costs(f, i, w, hop=c)
    spans = {name: build_schedule(name, stages=p, microbatches=m).simulate(costs).span for name in SCHEDULES}
    assert spans["1f1b"] == (m + p - 1) * total + c * (2 * (p - 1) * m // p + 2 * (p - 2))
    assert spans["zb_h1"] == m * total + (p - 1) * (f + i - w + 4 * c)
    assert spans["zb_h2"] == m * total + (p - 1) * (f + i - 2 * w + 2 * c)


@settings(max_examples=60)
@given(
    p=st.integers(1, 6),
    extra=st.integers(0, 8),
    w=st.integers(6, 20),
    over=st.integers(0, 8),
    i=st.integers(6, 24),
    c=st.integers(0, 3),
)
def test_closed_forms_of_zero_bubble_where_they_hold(p: int, extra: int, w: int, over: int, i: int, c: int) -> None:
    f, m = w + over, 2 * p + extra
    costs = Costs(f, i, w, hop=c)
    h1 = build_schedule("zb_h1", stages=p, microbatches=m).simulate(costs)
    h2 = build_schedule("zb_h2", stages=p, microbatches=m).simulate(costs)
    work = m * (f + i + w)
    assert h1.span == work + (p - 1) * (f + i - w + 4 * c)
    if f + i + 2 * c >= 2 * w:
        assert h2.span == work + (p - 1) * (f + i - 2 * w + 2 * c)
    if i + c <= 2 * w:
        assert h2.makespan == work + (p - 1) * (f + c)


def test_times_by_hand() -> None:
    """Two stages, one micro-batch; the stages differ, B is not I + W."""
    schedule = build_schedule("gpipe", stages=2, microbatches=1)
    simulation = schedule.simulate(Costs(forward=[1, 2], backward=[3, 5], hop=0.5))
    assert simulation.times == {
        Action("F", 0, 0): (0, 1),
        Action("F", 1, 0): (1.5, 3.5),
        Action("B", 1, 0): (3.5, 8.5),
        Action("B", 0, 0): (9, 12),
    }
    assert simulation.makespan == 12
    assert simulation.busy == (4, 7)
    assert simulation.spans == (12, 7)
    assert simulation.span_bubble == pytest.approx(5 / 12)
    assert simulation.bubble == pytest.approx(1 - 11 / 24)
    assert simulation.bubbles == pytest.approx((8 / 12, 5 / 12))
    assert simulation.idle == ((0, 8, 0), (1.5, 0, 3.5))


def test_a_hop_keeps_nobody_busy_and_is_free_on_one_worker() -> None:
    apart = Schedule.from_orders(["0F0 0F1", "1F0 1F1"])
    assert apart.simulate(Costs(hop=10)).times[Action("F", 1, 1)] == (12, 13)
    together = Schedule.from_orders(["0F0 0F1 1F0 1F1"])
    assert together.simulate(Costs(hop=10)).makespan == 4


def test_hops_may_differ_between_edges() -> None:
    graph = StageGraph(3, frozenset({(0, 1), (0, 2), (1, 2)}))
    schedule = Schedule.from_orders(["0F0 0B0", "1F0 1B0", "2F0 2B0"], graph=graph)
    times = schedule.simulate(Costs(hop={(0, 1): 1, (0, 2): 9, (1, 2): 2})).times
    assert times[Action("F", 2, 0)].start == 10
    assert times[Action("B", 1, 0)].start == 15
    assert times[Action("B", 0, 0)].start == 22


@given(
    name=st.sampled_from(SCHEDULES),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 8),
    times=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    hop=st.integers(0, 5),
)
def test_time_is_accounted_for(name: str, stages: int, microbatches: int, times: list[int], hop: int) -> None:
    schedule = build_schedule(name, stages=stages, microbatches=microbatches)
    simulation = schedule.simulate(Costs(times[:stages], times[:stages], hop=hop))
    for busy, idle in zip(simulation.busy, simulation.idle, strict=True):
        assert busy + sum(idle) == pytest.approx(simulation.makespan)
        assert min(idle) >= 0
    assert 0 <= simulation.bubble < 1
    last = [0.0] * schedule.n_workers
    for event in sorted(simulation.events(), key=lambda event: (event.worker, event.start, event.end)):
        assert event.start >= last[event.worker], "two actions of one worker overlap"
        last[event.worker] = event.end


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs(forward=[1, 2, 3]), "costs.forward has 3 times for 2 stages"),
        (Costs(backward_weight=[1, -2]), "costs.backward_weight has a time that is negative"),
        (Costs(forward=float("nan")), "costs.forward has a time that is negative or not finite"),
        (Costs(backward=float("inf")), "costs.backward has a time that is negative or not finite"),
        (Costs(hop=-1), "costs.hop has a time that is negative"),
        (Costs(hop={(0, 1): float("nan")}), "costs.hop has a time that is negative or not finite"),
        (Costs(hop={(0, 2): 1}), r"costs.hop has no time for the edges \[\(0, 1\)\]"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_schedule("gpipe", stages=2, microbatches=1).simulate(costs)


def test_big_schedules_are_simulated_in_seconds() -> None:
    schedule = build_schedule("interleaved_1f1b", stages=256, workers=64, microbatches=128)
    begin = time.process_time()
    simulation = schedule.simulate()
    assert time.process_time() - begin < 5
    assert simulation.makespan == 4 * 128 * 3 + 63 * 3


def test_timeline_is_one_page(tmp_path) -> None:
    schedule = build_schedule("zb_v", stages=4, microbatches=2)
    schedule.timeline(tmp_path / "units.html")
    page = (tmp_path / "units.html").read_text(encoding="utf-8")
    assert "zb_v: 4 stages, 2 workers, 2 micro-batches" in page
    assert "3W1" in page
    schedule.timeline(tmp_path / "seconds.html", Costs(0.01, 0.01, 0.01))
    assert (tmp_path / "seconds.html").read_text(encoding="utf-8") != page

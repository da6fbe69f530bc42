"""The simulator against hand-computed times, closed forms and brute force."""

import functools
import time
from dataclasses import fields, replace

import pytest
from any_counts import ANY_COUNTS
from hypothesis import given, settings
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.observe import render_svg
from stageflow.schedule import Action, Costs, Schedule, build_schedule, depends_on


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
    assert simulation.idle == ((0, 7.5, 0.5, 0), (1.5, 0, 0, 3.5))


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


def test_recomputation_comes_before_b_and_i() -> None:
    again = Costs(1, 2, 3, recompute=[10, 20])
    assert [again.of(Action(kind, 1, 0)) for kind in "FBIW"] == [1, 25, 22, 3]
    assert [Costs(1, 2, 3, backward=9, recompute=[10, 20]).of(Action(kind, 0, 0)) for kind in "FBIW"] == [1, 19, 12, 3]


def test_a_link_carries_one_value_at_a_time() -> None:
    """F takes 1, a transfer 3, a hop 1.

    worker 0 | F0 F1 F2
    link     |    000 111 222
    worker 1 |         F0  F1  F2     each a hop after its transfer
    """
    schedule = Schedule.from_orders(["0F0 0F1 0F2", "1F0 1F1 1F2"])
    simulation = schedule.simulate(Costs(hop=1, transfer=3))
    assert [simulation.times[Action("F", 1, m)].start for m in range(3)] == [5, 8, 11]
    assert simulation.makespan == 12
    assert simulation.idle == ((0, 0, 0, 9), (5, 0, 4, 0))


def test_the_two_ways_of_a_link_are_two_links() -> None:
    """Value of micro-batch 1 and gradient of micro-batch 0 cross at the same time."""
    schedule = Schedule.from_orders(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    times = schedule.simulate(Costs(forward=2, backward=2, transfer=4)).times
    assert times[Action("F", 1, 0)] == (6, 8)
    assert times[Action("B", 1, 0)] == (8, 10)
    assert times[Action("F", 1, 1)] == (10, 12), "it left at 6, when the first had arrived"
    assert times[Action("B", 0, 0)] == (14, 16)
    assert times[Action("B", 0, 1)] == (18, 20)


def test_values_for_several_stages_of_a_worker_share_its_link() -> None:
    graph = StageGraph(3, frozenset({(0, 1), (0, 2), (1, 2)}))
    schedule = Schedule.from_orders(["0F0", "1F0 2F0"], graph=graph)
    times = schedule.simulate(Costs(transfer={(0, 1): 2, (0, 2): 5, (1, 2): 50})).times
    assert times[Action("F", 1, 0)].start == 3
    assert times[Action("F", 2, 0)].start == 8


def test_a_reduction_ends_the_step_and_keeps_nobody_busy() -> None:
    schedule = build_schedule("gpipe", stages=2, microbatches=1)
    simulation = schedule.simulate(Costs(forward=1, backward=2, reduction=[1, 9]))
    assert simulation.reductions == {0: (6, 7), 1: (4, 13)}
    assert simulation.makespan == 13
    assert simulation.spans == (7, 12)
    assert simulation.busy == (3, 3)
    assert simulation.idle == ((0, 4 - 1, 0, 13 - 6), (1, 0, 0, 13 - 4))
    assert [str(event) for event in simulation.events()[-2:]] == ["reduce(0,-1)", "reduce(1,-1)"]
    assert '<g class="ev reduce"' in render_svg(simulation.events(), workers=2)
    split = build_schedule("zb_h1", stages=2, microbatches=1).simulate(Costs(reduction=2))
    assert {stage: times.start for stage, times in split.reductions.items()} == {
        stage: split.times[Action("W", stage, 0)].end for stage in (0, 1)
    }
    assert build_schedule("forward_only", stages=2, microbatches=1).simulate(Costs(reduction=2)).reductions == {}


@st.composite
def steps(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A schedule and whole-number costs of every kind."""
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    schedule = build_schedule(draw(st.sampled_from(ANY_COUNTS)), stages=stages, microbatches=microbatches)
    each = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    link = st.fixed_dictionaries({edge: st.integers(0, 5) for edge in schedule.graph.edges})
    return schedule, Costs(
        draw(each),
        draw(each),
        draw(each),
        backward=draw(st.none() | each),
        hop=draw(link),
        recompute=draw(each),
        transfer=draw(st.just(0) | link),
        reduction=draw(st.just(0) | each),
    )


@given(steps())
def test_time_is_accounted_for(step: tuple[Schedule, Costs]) -> None:
    schedule, costs = step
    simulation = schedule.simulate(costs)
    for busy, idle in zip(simulation.busy, simulation.idle, strict=True):
        assert busy + sum(idle) == pytest.approx(simulation.makespan)
        assert min(idle) >= 0
    assert 0 <= simulation.bubble <= 1
    assert max(simulation.span, max(simulation.busy)) <= simulation.makespan
    last = [0.0] * schedule.n_workers
    actions = [event for event in simulation.events() if event.kind != "reduce"]
    for event in sorted(actions, key=lambda event: (event.worker, event.start, event.end)):
        assert event.start >= last[event.worker], "two actions of one worker overlap"
        last[event.worker] = event.end


def longest_path(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """When each action ends, by the rule alone: the longest way there, over the worker's order and what it needs."""
    before = {action: order[at - 1] for order in schedule.orders for at, action in enumerate(order) if at}

    @functools.cache
    def end(action: Action) -> float:
        worker = schedule.placement[action.stage]
        start = end(before[action]) if action in before else 0
        for need in depends_on(action, schedule.graph, schedule.whole_backward):
            apart = schedule.placement[need.stage] != worker
            start = max(start, end(need) + (costs.hop_between(need.stage, action.stage) if apart else 0))
        return start + costs.of(action)

    return {action: end(action) for order in schedule.orders for action in order}


@given(steps())
def test_without_transfers_times_are_longest_paths(step: tuple[Schedule, Costs]) -> None:
    schedule, costs = step
    times = schedule.simulate(replace(costs, transfer=0)).times
    assert {action: end for action, (_, end) in times.items()} == longest_path(schedule, costs)


@given(steps(), st.data())
def test_nothing_ends_sooner_when_something_takes_longer(step: tuple[Schedule, Costs], data: st.DataObject) -> None:
    schedule, costs = step
    name = data.draw(st.sampled_from([field.name for field in fields(Costs)]))
    given = getattr(costs, name)
    more = st.integers(0, 5)
    if isinstance(given, dict):
        longer = {edge: time + data.draw(more) for edge, time in given.items()}
    elif isinstance(given, list):
        longer = [time + data.draw(more) for time in given]
    else:
        longer = None if given is None else given + data.draw(more)
    slower = schedule.simulate(replace(costs, **{name: longer}))
    simulation = schedule.simulate(costs)
    assert all(slower.times[action].end >= times.end for action, times in simulation.times.items())
    assert slower.makespan >= simulation.makespan


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs(forward=[1, 2, 3]), "costs.forward has 3 times for 2 stages"),
        (Costs(backward_weight=[1, -2]), "costs.backward_weight has a time that is negative"),
        (Costs(forward=float("nan")), "costs.forward has a time that is negative or not finite"),
        (Costs(backward=float("inf")), "costs.backward has a time that is negative or not finite"),
        (Costs(recompute=[1]), "costs.recompute has 1 times for 2 stages"),
        (Costs(reduction=-1), "costs.reduction has a time that is negative"),
        (Costs(transfer={}), r"costs.transfer has no time for the edges \[\(0, 1\)\]"),
        (Costs(transfer=float("inf")), "costs.transfer has a time that is negative or not finite"),
        (Costs(hop=-1), "costs.hop has a time that is negative"),
        (Costs(hop={(0, 1): float("nan")}), "costs.hop has a time that is negative or not finite"),
        (Costs(hop={(0, 2): 1}), r"costs.hop has no time for the edges \[\(0, 1\)\]"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_schedule("gpipe", stages=2, microbatches=1).simulate(costs)


@pytest.mark.parametrize("costs", [Costs(hop=0.1), Costs(hop=0.1, transfer=0.2)])
def test_big_schedules_are_built_and_simulated_in_seconds(costs: Costs) -> None:
    """64 workers, 512 micro-batches, 4 chunks on each worker; an eighth of them here, in an eighth of the time."""
    begin = time.process_time()
    schedule = build_schedule("interleaved_1f1b", stages=256, workers=64, microbatches=64)
    simulation = schedule.simulate(costs)
    assert time.process_time() - begin < 5 / 8 * 2, "twice the time, for a machine that is busy with other things"
    assert simulation.makespan > 4 * 64 * 3


def test_timeline_is_one_page(tmp_path) -> None:
    schedule = build_schedule("zb_v", stages=4, microbatches=2)
    schedule.timeline(tmp_path / "units.html")
    page = (tmp_path / "units.html").read_text(encoding="utf-8")
    assert "zb_v: 4 stages, 2 workers, 2 micro-batches" in page
    assert "3W1" in page
    schedule.timeline(tmp_path / "seconds.html", Costs(0.01, 0.01, 0.01))
    assert (tmp_path / "seconds.html").read_text(encoding="utf-8") != page

import re

import pytest
from any_counts import ANY_COUNTS
from hypothesis import given
from hypothesis import strategies as st

from stageflow.errors import ScheduleError
from stageflow.graph import StageGraph
from stageflow.schedule import SCHEDULES, SIMULATED, Action, Schedule, build_schedule, parse_action, parse_actions

TWO = """\
schedule 1f1b
stages 2 microbatches 2
edges 0>1
placement 0 1
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1"""


def test_an_action_is_stage_kind_microbatch() -> None:
    assert str(Action("F", 2, 0)) == "2F0"
    assert parse_action("12W345") == Action("W", 12, 345)
    assert parse_actions("0F0  1I2\n") == (Action("F", 0, 0), Action("I", 1, 2))


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2f0", "2F0x"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        parse_action(text)


def test_text_of_a_schedule() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=2)
    assert str(schedule) == TWO
    assert Schedule.parse(TWO) == schedule


@given(
    name=st.sampled_from(ANY_COUNTS),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 5),
    placement=st.sampled_from(["loop", "fold", "contiguous"]),
)
def test_text_round_trip_is_exact(name: str, stages: int, microbatches: int, placement: str) -> None:
    graph = StageGraph(stages, frozenset((s, t) for t in range(stages) for s in range(t) if (s + t) % 3))
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, placement=placement, graph=graph)
    assert Schedule.parse(str(schedule)) == schedule


def test_a_worker_without_actions_and_a_name_with_blanks_survive() -> None:
    schedule = Schedule("my own", StageGraph.chain(2), (0, 1), 1, ((), parse_actions("1F0 1B0")))
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ends before its schedule line"),
        ("schedule x\nstages 2 microbatches 2", "ends before its edges line"),
        (TWO.replace("edges", "edge"), "line 3 of the schedule, 'edge 0>1', is no edges line"),
        (TWO.replace("1: 1F0", "2: 1F0"), "line 6 .* should hold the order of worker 1"),
        (TWO.replace("1B1", "1C1"), "'1C1' is no action"),
        (TWO.replace("placement 0 1", "placement 0 2"), "outside 0..1"),
        (TWO.replace("placement 0 1", "placement 0"), "names a worker for 1 stages, the graph has 2"),
        (TWO.replace("microbatches 2", "microbatches 0"), "at least one micro-batch"),
    ],
)
def test_text_that_does_not_fit_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Schedule.parse(text)


def test_copies_and_versions_survive() -> None:
    for name in SIMULATED:
        schedule = build_schedule(name, stages=4, microbatches=8)
        assert (schedule.copies, schedule.versions) in ((2, 1), (1, 2))
        assert Schedule.parse(str(schedule)) == schedule
    assert str(schedule).splitlines()[1] == "stages 4 microbatches 8 versions 2"


def test_what_cannot_run_says_why_and_what_to_take() -> None:
    assert [build_schedule(name, stages=4, microbatches=8).refusal for name in SCHEDULES] == [None] * len(SCHEDULES)
    says = {"dualpipe": "2 copies.*dualpipe_v", "chimera": "2 copies.*zb_v", "pipedream_2bw": "a step old.*1f1b"}
    for name, reason in says.items():
        assert re.search(f"'{name}'.*{reason}", build_schedule(name, stages=4, microbatches=8).refusal or "")


def test_copies_must_be_equal() -> None:
    with pytest.raises(ScheduleError, match="3 stages can't be 2 equal copies"):
        Schedule("odd", StageGraph(3, frozenset()), (0, 1, 2), 1, ((), (), ()), copies=2)


def test_from_orders_reads_placement_and_counts_off_the_actions() -> None:
    schedule = Schedule.from_orders(["0F0 2F0 2B0 0B0", "1F0 1B0"])
    assert (schedule.placement, schedule.microbatches, schedule.n_workers) == ((0, 1, 0), 1, 2)
    schedule.validate()


def test_from_orders_refuses_a_stage_on_two_workers_or_left_out() -> None:
    with pytest.raises(ScheduleError, match="0B0 is on worker 1, but stage 0 also runs on worker 0"):
        Schedule.from_orders(["0F0", "0B0"])
    with pytest.raises(ScheduleError, match="no worker runs stage 1"):
        Schedule.from_orders(["0F0 0B0", "2F0 2B0"])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ("0F0 0B0", "orders is one text, '0F0 0B0'; expected a list with one for each worker"),
        ([3], "3 is no order: expected the actions of one worker"),
        ([[3]], "'3' is no action"),
        ([[Action("X", 0, 0)]], "'0X0' is no action"),
        ([[Action("F", -1, 0)]], "'-1F0' is no action"),
    ],
)
def test_what_is_no_order_is_refused(orders, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_orders(orders)


def test_single_actions_may_be_in_the_notation():
    assert Schedule.from_orders([["0F0", Action("B", 0, 0)]]).orders == Schedule.from_orders(["0F0 0B0"]).orders

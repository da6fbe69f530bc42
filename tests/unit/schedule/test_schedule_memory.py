"""What workers keep, counted by hand and against the simulated step."""

import itertools

import pytest
from any_counts import ANY_COUNTS
from hypothesis import given
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.schedule import Costs, Footprint, Schedule, build_schedule, peak_memory


def test_counts_of_activations() -> None:
    assert peak_memory(build_schedule("gpipe", stages=4, microbatches=8), Footprint()) == (8, 8, 8, 8)
    assert peak_memory(build_schedule("1f1b", stages=4, microbatches=8), Footprint()) == (4, 3, 2, 1)
    assert peak_memory(build_schedule("zb_h2", stages=4, microbatches=8), Footprint()) == (7, 7, 7, 7)


def test_bytes_by_hand() -> None:
    """Worker 0 keeps 100, then 10 a micro-batch, 4 of which stay from I to W."""
    schedule = Schedule.from_orders(["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1B0 1F1 1B1"])
    footprint = Footprint(static=[100, 200], activation=[10, 20], deferred=[4, 0])
    assert peak_memory(schedule, footprint) == (120, 220)
    history = schedule.simulate(Costs(backward=2)).memory(footprint)
    assert history[0] == ((0, 110), (1, 120), (5, 114), (8, 108), (9, 104), (10, 100))
    assert history[1] == ((0, 200), (1, 220), (7, 200)), "in 4 one goes as the next comes"


def test_what_waits_for_w_counts_in_full_unless_said() -> None:
    schedule = Schedule.from_orders(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert peak_memory(schedule, Footprint(activation=3)) == (6,)
    assert peak_memory(schedule, Footprint(activation=3, deferred=1)) == (4,)
    assert peak_memory(schedule, Footprint(activation=3, deferred=0)) == (3,)
    assert peak_memory(schedule, Footprint(activation=3, deferred=5)) == (10,), "a W may need more than the I before"


def test_forwards_only_keep_nothing() -> None:
    schedule = build_schedule("forward_only", stages=3, workers=2, microbatches=4)
    assert peak_memory(schedule, Footprint(static=[1, 2, 4], activation=9)) == (3, 4)
    assert schedule.simulate().memory(Footprint(static=5)) == (((0, 10),), ((0, 5),))


@given(
    name=st.sampled_from(ANY_COUNTS),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 7),
    sizes=st.lists(st.integers(0, 9), min_size=18, max_size=18),
    times=st.lists(st.integers(0, 3), min_size=18, max_size=18),
)
def test_the_most_in_time_is_the_most_in_order(
    name: str, stages: int, microbatches: int, sizes: list[int], times: list[int]
) -> None:
    schedule = build_schedule(name, stages=stages, microbatches=microbatches)
    footprint = Footprint(sizes[:stages], sizes[6 : 6 + stages], sizes[12 : 12 + stages])
    costs = Costs(times[:stages], times[6 : 6 + stages], times[12 : 12 + stages])
    history = schedule.simulate(costs).memory(footprint)
    assert tuple(max(level for _, level in steps) for steps in history) == peak_memory(schedule, footprint)
    for steps in history:
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)
        assert steps[0][0] == 0
        assert all(a[1] != b[1] for a, b in itertools.pairwise(steps))
        assert steps[-1][1] == min(level for _, level in steps), "all activations are gone at the end"


@pytest.mark.parametrize(
    ("footprint", "says"),
    [
        (Footprint(static=[1, 2, 3]), "footprint.static has 3 sizes for 2 stages"),
        (Footprint(activation=-1), "footprint.activation has a size that is negative"),
        (Footprint(deferred=float("nan")), "footprint.deferred has a size that is negative or not finite"),
    ],
)
def test_footprints_that_do_not_fit_are_refused(footprint: Footprint, says: str) -> None:
    schedule = build_schedule("gpipe", stages=2, microbatches=1)
    with pytest.raises(InputError, match=says):
        peak_memory(schedule, footprint)
    with pytest.raises(InputError, match=says):
        schedule.simulate().memory(footprint)

"""Every builder: that any counts give a schedule that validates, what is refused, and what the general ones find."""

import pytest
from any_counts import ANY_COUNTS
from hypothesis import given, settings
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule import SCHEDULES, SIMULATED, Action, Costs, Schedule, build_schedule
from stageflow.schedule.families import FAMILIES
from stageflow.schedule.placement import fold, place


def takes(name: str, placement: tuple[int, ...], microbatches: int) -> bool:
    """Whether these counts suit the schedule: a V, one stage of either copy per worker, enough micro-batches."""
    if name in ANY_COUNTS:
        return True
    stages, workers = len(placement), max(placement) + 1
    if name in ("v_half", "v_min", "dualpipe_v"):
        return placement == fold(2 * workers, workers) and (name != "dualpipe_v" or microbatches >= stages)
    if name == "pipedream_2bw":
        return microbatches >= workers
    halves = stages % 2 == microbatches % 2 == 0 and placement == tuple(range(stages))
    return halves and (name == "chimera" or microbatches >= 2 * stages)


counts = {
    "stages": st.integers(1, 8),
    "workers": st.integers(1, 8),
    "microbatches": st.integers(1, 17),
}


@given(name=st.sampled_from(SCHEDULES + SIMULATED), data=st.data(), **counts)
def test_any_counts_in_any_placement_validate(
    name: str, data: st.DataObject, stages: int, workers: int, microbatches: int
) -> None:
    workers = min(workers, stages)
    free = st.permutations([*range(workers), *(s % workers for s in range(stages - workers))])
    placement = data.draw(st.one_of(st.none(), st.sampled_from(["loop", "fold", "contiguous"]), free))
    edges = data.draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))))
    graph = data.draw(st.sampled_from([None, StageGraph(stages, frozenset((a, b) for a, b in edges if a < b))]))

    def build() -> Schedule:
        return build_schedule(
            name, stages=stages, microbatches=microbatches, workers=workers, placement=placement, graph=graph
        )

    if not takes(name, place(placement or FAMILIES[name].placement, stages, workers), microbatches):
        with pytest.raises(InputError, match=name):
            build()
        return
    schedule = build()
    schedule.validate()
    assert schedule.has_backward == (name != "forward_only")


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


@settings(max_examples=60)
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 16),
    times=st.lists(st.integers(0, 9), min_size=30, max_size=30),
    even=st.booleans(),
    hop=st.integers(0, 12),
)
def test_zb_v_for_given_times_keeps_to_its_memory(p: int, m: int, times: list[int], even: bool, hop: int) -> None:
    costs = Costs(*(times[k] if even else times[k : k + 2 * p] for k in (0, 10, 20)), hop=hop)
    schedule = build_schedule("zb_v", stages=2 * p, microbatches=m, costs=costs)
    assert max(schedule.validate().peak_activations) <= 2 * p


def test_zb_v_for_given_times_is_the_pattern_when_those_are_equal() -> None:
    for p in range(1, 7):
        for m in (2 * p, 3 * p + 1):
            found = build_schedule("zb_v", stages=2 * p, microbatches=m, costs=Costs())
            assert found.simulate().span == build_schedule("zb_v", stages=2 * p, microbatches=m).simulate().span


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
    defaults = {name: build_schedule(name, stages=4, microbatches=4).placement for name in SCHEDULES}
    for name in ("interleaved_1f1b", "interleaved_zb", "looped_bfs"):
        assert defaults.pop(name) == (0, 1, 0, 1)
    for name in ("zb_v", "v_half", "v_min", "dualpipe_v"):
        assert defaults.pop(name) == (0, 1, 1, 0)
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
        ({"name": "2f2b"}, "unknown schedule '2f2b'; known: gpipe, 1f1b, eager_1f1b, interleaved_1f1b"),
        ({"stages": 0}, "whole number of stages >= 1, got 0"),
        ({"microbatches": 0}, "whole number of microbatches >= 1, got 0"),
        ({"workers": 3}, "3 workers for 2 stages.*choose from 1 to 2 workers"),
        ({"graph": StageGraph.chain(3)}, "the graph has 3 stages, but stages=2"),
        ({"memory": 3}, "'1f1b' has no option 'memory'; its options: costs"),
        ({"name": "gpipe", "group": 3}, "'gpipe' has no option 'group'; its options: none"),
        ({"name": "zb_h1", "memory": 0}, "memory=0 is too small for worker 0"),
        ({"name": "zb_h1", "stages": 4, "workers": 2, "memory": 1}, "has 2 stages: it must be able to keep at least 2"),
        ({"name": "greedy", "memory": 0}, "memory=0 is too small for worker 0"),
        ({"name": "greedy", "costs": Costs([1, 2, 3])}, "costs.forward has 3 times for 2 stages"),
        ({"name": "interleaved_1f1b", "stages": 4, "group": 1}, "use a group of at least 2"),
        ({"name": "interleaved_zb", "stages": 4, "group": 1}, "use a group of at least 2"),
        ({"name": "v_half", "stages": 3}, "'v_half' needs two stages per worker in a V.*such as 4"),
        ({"name": "v_min", "stages": 4, "workers": 4}, "'v_min' needs two stages per worker in a V"),
        ({"name": "dualpipe_v", "stages": 4, "placement": "loop", "workers": 2}, "two stages per worker in a V"),
        ({"name": "dualpipe_v", "stages": 4, "microbatches": 3}, "got 3: 4 or more would work"),
        ({"name": "dualpipe", "stages": 3, "microbatches": 8}, "an even number of stages, got 3: 4 would work"),
        ({"name": "dualpipe", "stages": 4, "microbatches": 6}, "got 6: 8 or more would work"),
        ({"name": "dualpipe", "stages": 4, "microbatches": 9}, "half of the micro-batches each way, got 9: 10 would"),
        ({"name": "dualpipe", "stages": 4, "workers": 2}, "one stage of each copy per worker.*workers=4"),
        ({"name": "chimera", "stages": 5, "microbatches": 4}, "an even number of stages, got 5: 6 would work"),
        ({"name": "chimera", "stages": 4, "microbatches": 3}, "got 3: 4 would work"),
        ({"name": "pipedream_2bw", "stages": 4, "microbatches": 3}, "4 or more micro-batches would work"),
        ({"name": "pipedream_2bw", "stages": 2, "steps": 0}, "steps >= 1, got 0"),
    ],
)
def test_impossible_requests_are_refused_with_what_would_work(arguments: dict[str, object], says: str) -> None:
    request: dict[str, object] = {"name": "1f1b", "stages": 2, "microbatches": 2} | arguments
    with pytest.raises(InputError, match=says):
        build_schedule(str(request.pop("name")), **request)  # type: ignore[arg-type]


def test_actions_are_small_tuples() -> None:
    assert build_schedule("gpipe", stages=1, microbatches=1).orders == ((Action("F", 0, 0), Action("B", 0, 0)),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stages": "4"}, "whole number of stages >= 1, got '4'"),
        ({"stages": 4.0}, "whole number of stages >= 1, got 4.0"),
        ({"microbatches": None}, "whole number of microbatches >= 1, got None"),
        ({"microbatches": True}, "whole number of microbatches >= 1, got True"),
        ({"workers": 0}, "whole number of workers >= 1, or None, got 0"),
        ({"placement": ["a", "b", "c", "d"]}, "one worker number per stage, got"),
        ({"graph": "chain"}, "graph must be a StageGraph"),
        ({"costs": 3}, "option 'costs' of schedule 'greedy' must be a Costs, got 3"),
        ({"memory": "4"}, "option 'memory' of schedule 'greedy' must be a whole number of activations"),
        ({"split": "maybe"}, "option 'split' of schedule 'greedy' must be True or False, got 'maybe'"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(changed, message):
    with pytest.raises(InputError, match=message):
        build_schedule("greedy", **{"stages": 4, "microbatches": 4, **changed})

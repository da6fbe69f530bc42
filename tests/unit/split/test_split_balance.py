import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.split.balance import chain_min_max, most_stages


def bottleneck(costs, bounds):
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def brute_force(costs, stages, positions):
    n = len(costs)
    return min(bottleneck(costs, [0, *cuts, n]) for cuts in combinations(sorted(positions), stages - 1))


@st.composite
def chains(draw):
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    positions = draw(st.sets(st.integers(1, len(costs) - 1))) if len(costs) > 1 else set()
    stages = draw(st.integers(1, len(positions) + 1))
    return costs, positions, stages


@given(chains())
def test_no_cut_is_better(chain):
    costs, positions, stages = chain
    bounds = chain_min_max(costs, stages, allowed=positions)

    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert len(bounds) == stages + 1
    assert all(a < b for a, b in pairwise(bounds)), "every stage has a layer"
    assert set(bounds[1:-1]) <= positions
    assert bottleneck(costs, bounds) == brute_force(costs, stages, positions)


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=8))
def test_sums_of_floats_are_compared_exactly(costs):
    from fractions import Fraction

    exact = [Fraction(cost) for cost in costs]
    assert bottleneck(exact, chain_min_max(costs, 3)) == brute_force(exact, 3, range(1, len(costs)))


def test_equal_layers_are_shared_out_evenly_and_the_last_stages_are_lighter():
    assert [b - a for a, b in pairwise(chain_min_max([1] * 10, 4))] == [3, 3, 2, 2]
    assert [b - a for a, b in pairwise(chain_min_max([1] * 30, 4))] == [8, 8, 7, 7]


def test_a_heavy_head_gets_a_stage_of_its_own():
    assert chain_min_max([1, 1, 1, 1, 9], 2) == [0, 4, 5]


def test_layers_without_cost_still_fill_every_stage():
    assert all(a < b for a, b in pairwise(chain_min_max([0.0] * 5, 5)))
    assert all(a < b for a, b in pairwise(chain_min_max([5.0, 0.0, 0.0], 3)))


def test_too_many_stages_are_refused_with_the_count_that_works():
    with pytest.raises(InputError, match=r"3 layers can't make 4 stages; choose between 1 and 3"):
        chain_min_max([1, 1, 1], 4)
    with pytest.raises(InputError, match=r"between 1 and 2"):
        chain_min_max([1, 1, 1], 3, allowed={2})
    assert most_stages(3, {2, 7}) == 2


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(cost):
    with pytest.raises(InputError, match="cost of layer 1"):
        chain_min_max([1.0, cost], 2)


def test_thousands_of_layers_take_no_time():
    costs = [((i * 2654435761) % 1000) / 997 for i in range(5000)]
    start = time.perf_counter()
    bounds = chain_min_max(costs, 64)
    assert time.perf_counter() - start < 1.0
    assert bottleneck(costs, bounds) < 1.2 * sum(costs) / 64

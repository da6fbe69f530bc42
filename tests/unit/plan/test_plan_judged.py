"""What is said against a pipeline, and what to change for more: where it must be said, and where it must not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_examples import MIB, make

from stageflow.plan import Device, Plan
from stageflow.plan.advice import advise, moved_cuts
from stageflow.plan.verdict import data_parallel_step, one_device_memory, speaks_against
from stageflow.schedule import build_schedule


def search(plan: Plan, microbatches: int, limited: bool) -> float:
    """1F1B; without a limit GPipe's memory would allow for nothing better here."""
    built = build_schedule("1f1b", stages=len(plan.stages), microbatches=microbatches, placement=plan.placement)
    return built.simulate(plan.costs).makespan * (1.0 if limited else 0.5)


def changes(plan: Plan) -> dict[str, float]:
    return {advice.change: advice.gain for advice in advise(plan, search)}


# ------------------------------------------------------------------------------------------------- against it


def test_data_parallelism_where_the_model_fits_on_one_device() -> None:
    plan = make(microbatches=4)  # 30 ms in stages; alone 4 * 12 = 48 ms, two copies 24 ms
    assert data_parallel_step(plan) == pytest.approx(24e-3)
    (words,) = speaks_against(plan)
    assert "24 ms a step" in words
    assert "this pipeline 30 ms" in words
    assert "no limit on memory" in words


def test_no_data_parallelism_where_it_does_not_fit_or_its_exchange_is_slow() -> None:
    plan = make(microbatches=4)
    need = one_device_memory(plan)
    assert need == 4 * 20 * MIB + 4 * 10 * MIB
    assert not speaks_against(dataclasses.replace(plan, devices=(Device(memory=need - 1),) * 2))
    assert speaks_against(dataclasses.replace(plan, devices=(Device(memory=need),) * 2))
    # 20 MiB of gradients over 1 GiB/s: a ring of two moves half of them twice, 19.5 ms more
    slow = dataclasses.replace(plan, devices=(Device(bandwidth=2**30),) * 2)
    assert data_parallel_step(slow) == pytest.approx(24e-3 + 20 / 1024)
    assert not speaks_against(slow)


def test_one_device_where_the_pipeline_is_slower_than_it() -> None:
    plan = make(microbatches=1, device=Device(latency=1e-3))
    (words, *_) = speaks_against(plan)
    assert "use one device" in words
    assert "one device alone takes 12 ms" in words


def test_the_share_of_a_device_is_as_large_as_it_is_fast() -> None:
    plan = dataclasses.replace(make(microbatches=4), devices=(Device(speed=3), Device(speed=1)))
    assert data_parallel_step(plan) == pytest.approx(12e-3)  # three micro-batches at 4 ms, one at 12 ms


def test_few_microbatches() -> None:
    plan = make((1,) * 4, (0, 1, 2, 3, 4), microbatches=2, device=Device(memory=70 * MIB))
    (words,) = speaks_against(plan)
    assert "2 micro-batches are few for 4 devices" in words
    assert f"{plan.bubble:.0%}" in words
    assert not speaks_against(make((1,) * 4, (0, 1, 2, 3, 4), microbatches=16, device=Device(memory=70 * MIB)))


def test_a_link_that_is_the_bottleneck() -> None:
    tight = Device(memory=101 * MIB, bandwidth=100 * MIB)  # 1 MiB takes 10 ms, a stage 6 ms
    (words,) = speaks_against(make(microbatches=16, device=tight))
    assert "from stage 0 to stage 1 is the bottleneck" in words
    assert "1 MiB take 10 ms each way" in words
    assert not speaks_against(make(microbatches=16, device=dataclasses.replace(tight, bandwidth=200 * MIB)))


# ---------------------------------------------------------------------------------------------------- for more


def test_more_microbatches_count_by_the_time_of_a_sample() -> None:
    gains = changes(make(microbatches=4))
    assert gains["8 micro-batches instead of 4, each as large as now"] == pytest.approx(1 - 54 / 2 / 30)


def test_a_better_cut_and_none_where_the_cut_is_best() -> None:
    uneven = make((1, 1, 1, 1), (0, 1, 4), microbatches=8)
    gain = changes(uneven)["stage 1 starts at 'layers.2' instead of 'layers.1'"]
    assert gain == pytest.approx(1 - make(microbatches=8).step / uneven.step)
    assert not any("starts at" in change for change in changes(make(microbatches=8)))


def test_no_cut_that_does_not_fit() -> None:
    room = make((1, 1, 1, 1), (0, 1, 4), microbatches=8).memory
    tight = Device(memory=max(room[0], room[1]) - 1)
    plan = make((1, 1, 1, 1), (0, 1, 4), microbatches=8)
    assert any("starts at" in change for change in changes(plan))
    assert not any(
        "starts at" in c for c in changes(dataclasses.replace(plan, devices=(Device(memory=room[0]), tight)))
    )


def test_cuts_move_by_one_block_and_leave_no_stage_empty() -> None:
    assert list(moved_cuts((0, 1, 3, 5))) == [(0, 2, 3, 5), (0, 1, 2, 5), (0, 1, 4, 5)]


def test_a_lighter_head_where_the_head_is_what_takes_long() -> None:
    heavy = make((1, 1, 1, 4), (0, 2, 4), microbatches=8)
    gain = changes(heavy)["a head 'layers.3' of half the work"]
    lighter = make((1, 1, 1, 2), (0, 2, 4), microbatches=8)
    assert gain == pytest.approx(1 - lighter.step / heavy.step)
    assert changes(make((9, 1, 1, 0.01), (0, 1, 4), microbatches=8)).get("a head 'layers.3' of half the work") is None


def test_which_block_to_narrow_and_which_may_grow() -> None:
    plan = make((1, 1, 1, 2), (0, 2, 4), microbatches=8)
    told = changes(plan)
    narrow = next(change for change in told if "narrowed" in change)
    assert "block 'layers.3' narrowed from 6 ms by 3 ms" in narrow
    assert told[narrow] == pytest.approx(1 - make((1, 1, 1, 1), (0, 2, 4), microbatches=8).step / plan.step)
    grow = next(change for change in told if "may take" in change)
    assert "block 'layers.0'" in grow
    assert told[grow] == 0.0
    assert not any("narrowed" in change or "may take" in change for change in changes(make(microbatches=8)))


def test_what_may_grow_really_costs_nothing() -> None:
    plan = make((1, 1, 1, 2), (0, 2, 4), microbatches=8)
    grown = next(advice for advice in advise(plan, search) if "may take" in advice.change)
    assert grown.step <= plan.step * 1.002


def test_faster_links_only_where_they_are_slow() -> None:
    slow = make(microbatches=8, device=Device(latency=2e-3))
    assert changes(slow)["links twice as fast"] == pytest.approx(
        1 - make(microbatches=8, device=Device(latency=1e-3)).step / slow.step
    )
    assert "links twice as fast" not in changes(make(microbatches=8))


@pytest.mark.parametrize(("memory", "told"), [(85 * MIB, True), (1000 * MIB, False)])
def test_more_memory_only_where_it_is_scarce(memory: float, told: bool) -> None:
    gains: dict[str, Any] = changes(make(microbatches=8, device=Device(memory=memory)))
    assert ("devices with more memory, the same cuts" in gains) is told


def test_the_most_comes_first_and_trifles_not_at_all() -> None:
    gains = [advice.gain for advice in advise(make((1, 1, 1, 2), microbatches=8), search) if advice.gain]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.005

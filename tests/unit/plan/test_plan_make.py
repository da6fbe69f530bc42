"""From numbers to a plan: what is chosen, what is refused, and that it is chosen well."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from plan_examples import MIB, block, blocks

from stageflow.errors import InputError, ScheduleError, SplitError
from stageflow.plan import Block, Device, Plan, make_plan
from stageflow.plan import choose as choosing
from stageflow.plan.choose import choose
from stageflow.plan.shapes import Wish, Work, in_flight, shapes_of
from stageflow.plan.sizes import between, counts_to_try
from stageflow.plan.words import bytes_of, size_words, time_words
from stageflow.schedule import SCHEDULES, build_schedule

SECONDS = 0.2


def plan_of(times: Any, devices: Any = 2, **options: Any) -> Plan:
    profile = times if isinstance(times[0], Block) else blocks(times)
    return make_plan(**{"devices": devices, "profile": profile, "seconds": SECONDS, "progress": False} | options)


# --------------------------------------------------------------------------------------------------- what is chosen


def test_a_plan_from_blocks_alone_runs_and_keeps_its_promises() -> None:
    plan = plan_of((1, 2, 1, 1, 3, 1), 2, microbatches=8, memory=300 * MIB)
    plan.schedule.validate()
    assert plan.fits
    assert plan.step >= plan.bound.seconds
    assert len(plan.devices) == 2
    assert plan.microbatches == 8
    assert [name for stage in plan.stages for name in stage.blocks] == [b.name for b in plan.blocks]


def test_never_worse_than_a_named_schedule_on_its_best_cuts() -> None:
    row = blocks((1, 2, 1, 1, 3, 1, 1, 2))
    plan = plan_of(row, 2, microbatches=6)
    for name in SCHEDULES:
        try:
            named = plan_of(row, 2, microbatches=6, schedule=name)
        except (InputError, SplitError, ScheduleError):
            continue
        assert plan.step <= named.step * (1 + 1e-9), name


def test_the_same_seed_gives_the_same_plan() -> None:
    row = blocks((1, 2, 1, 1, 3, 1, 1, 2))
    assert plan_of(row, 2, microbatches=6, seed=3) == plan_of(row, 2, microbatches=6, seed=3)


def test_two_stages_per_device_where_that_is_better() -> None:
    plan = plan_of([1] * 8, 4, microbatches=4, recompute=False)
    assert len(plan.stages) == 8
    one = plan_of([1] * 8, 4, microbatches=4, recompute=False, stages=4)
    assert len(one.stages) == 4
    assert plan.step < one.step


def test_recomputation_only_where_memory_is_short() -> None:
    assert not any(plan_of([1] * 4, 2, microbatches=8).recompute)
    tight = plan_of([1] * 4, 2, microbatches=8, memory=70 * MIB, stages=2)
    assert any(tight.recompute)
    assert tight.fits
    assert all(plan_of([1] * 4, 2, microbatches=8, recompute=True).recompute)


def test_a_faster_device_gets_more_work() -> None:
    plan = plan_of([1] * 8, [Device(speed=3), Device(speed=1)], microbatches=16, stages=2)
    assert plan.cuts == (0, 6, 8)


def test_a_cheap_cut_on_a_slow_link() -> None:
    row = [block(f"b{i}", output=MIB if i != 4 else 0.01 * MIB) for i in range(8)]
    plan = plan_of(row, 2, microbatches=8, stages=2, link=(0.0, 0.05 * 2**30))
    assert plan.cuts == (0, 5, 8)


def test_the_number_of_microbatches_is_chosen_by_the_whole_step() -> None:
    """Small micro-batches idle less, but every one costs a call: the best count is in between."""
    works = [
        Work(m, tuple(block(f"b{i}", 0.3 + 16 / m, activation=160 * MIB / m) for i in range(4))) for m in (1, 4, 64)
    ]
    wish = Wish((Device(), Device()), seconds=SECONDS)
    best = choose(works, wish, {"model": "m"}, lambda _: None)
    assert best.microbatches == 4


def test_every_named_schedule_can_be_asked_for() -> None:
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
        plan = plan_of([1] * 8, 2, microbatches=4, schedule=name)
        assert plan.schedule.name == name
        assert len(plan.devices) == 2
        assert plan.step >= plan.bound.seconds


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices must be"),
        ({"devices": True}, "devices must be"),
        ({"devices": []}, "devices must be"),
        ({"devices": "two"}, "devices must be"),
        ({"devices": [2]}, "must hold only Devices"),
        ({"devices": 9}, "9 devices for 4 blocks"),
        ({"memory": "lots"}, "memory='lots' is no size"),
        ({"memory": -1}, "no size"),
        ({"link": 3}, "link must be"),
        ({"link": (-1, 5)}, "latency of a link"),
        ({"link": (0, 0)}, "bandwidth=0 is no size"),
        ({"microbatches": 0}, "microbatches must be"),
        ({"microbatches": 2.0}, "microbatches must be"),
        ({"stages": 1}, "stages=1 for 2 devices"),
        ({"stages": 5}, "stages=5"),
        ({"stages": "2"}, "stages must be"),
        ({"schedule": "best"}, "unknown schedule 'best'"),
        ({"schedule": 3}, "schedule must be a name"),
        ({"recompute": "maybe"}, "recompute must be"),
        ({"seconds": 0}, "seconds must be"),
        ({"seconds": math.inf}, "seconds must be"),
        ({"model": object()}, "leave model and example out"),
        ({"loss": sum}, "leave model and example, loss out"),
        ({"profile": None}, "needs a model and an example"),
        ({"profile": []}, "profile= must be"),
        ({"profile": 3}, "profile= must be"),
        ({"schedule": "forward_only"}, "no backward"),
    ],
)
def test_arguments_that_can_not_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_of([1] * 4, **options)


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(SplitError, match="fit"):
        plan_of([1] * 4, 2, memory=10 * MIB)


def test_a_named_schedule_that_needs_too_much_is_refused_by_device() -> None:
    with pytest.raises(SplitError, match=r"needs .* MiB|fits into memory"):
        plan_of([1] * 4, 2, microbatches=16, memory=90 * MIB, schedule="gpipe", recompute=False)


def weights(*sizes: float) -> list[Block]:
    return [Block(f"b{number}", 1.0, 2.0, 1.0, 1.0, parameters=size) for number, size in enumerate(sizes)]


def test_stages_share_the_memory_of_their_device_as_they_need_it() -> None:
    plan = plan_of(weights(8, 8, 2, 2), 2, microbatches=4, stages=4, memory=10.5)
    assert plan.fits
    assert plan.memory == (10, 10)
    # only one cut of these leaves no device above 12: found by trying them
    assert plan_of(weights(2, 6, 6, 4, 4, 2), 2, microbatches=4, stages=4, memory=12).fits
    tight = [block(f"b{number}", parameters=size * MIB) for number, size in enumerate((80, 80, 5, 5))]
    recomputing = plan_of(tight, 2, microbatches=4, stages=4, memory=134 * MIB)
    assert recomputing.fits
    assert any(recomputing.recompute)


def test_a_refusal_names_the_memory_that_the_device_has() -> None:
    with pytest.raises(SplitError, match="needs 10 B on device 1, which has 9.5 B"):
        plan_of(weights(8, 8, 2, 2), 2, microbatches=4, stages=4, memory=9.5)
    with pytest.raises(SplitError, match="need of 8 B where its device has 7 B"):
        plan_of(weights(8, 8, 2, 2), 2, microbatches=4, stages=4, memory=7)


def test_no_advice_that_does_not_fit() -> None:
    row = [Block(f"b{number}", 1.0, 2.0, 1.0, 1.0, activation=1.0) for number in range(4)]
    options: dict[str, Any] = {"schedule": "gpipe", "recompute": False}
    full = plan_of(row, 4, microbatches=4, memory=4.0, **options)
    assert not [advice for advice in full.advice if "micro-batches" in advice.change]
    with pytest.raises(SplitError):
        plan_of(row, 4, microbatches=8, memory=4.0, **options)
    roomy = plan_of(row, 4, microbatches=4, memory=8.0, **options)
    assert roomy.advice[0].change.startswith("8 micro-batches instead of 4")


def test_a_later_search_that_finds_nothing_does_not_lose_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of((1, 2, 1, 1, 3, 1), 2, microbatches=4)

    def search(**_: Any) -> Any:
        raise SplitError("none fits")

    monkeypatch.setattr(choosing, "find_schedule", search)
    better = choosing._improve(plan, Wish(plan.devices), SECONDS)
    assert better.fits
    assert better.step <= plan.step
    assert not [
        each
        for each in choosing.judge(plan, Wish(plan.devices), print).advice
        if "micro-batches instead" in each.change
    ]


# ------------------------------------------------------------------------------------------------------ its parts


def test_shapes_are_one_or_two_stages_per_device_in_a_line_a_v_and_a_loop() -> None:
    work = Work(8, blocks([1] * 8))
    placements = [shape.placement for shape in shapes_of(work, Wish((Device(),) * 3))]
    assert placements == [(0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)]
    assert [s.placement for s in shapes_of(work, Wish((Device(),) * 3, stages=4))] == [(0, 0, 1, 2)]
    assert [s.placement for s in shapes_of(work, Wish((Device(),) * 2, "zb_v"))] == [(0, 1, 1, 0)]


def test_what_a_pattern_has_in_flight() -> None:
    (shape, *_) = shapes_of(Work(8, blocks([1] * 4)), Wish((Device(),) * 4))
    assert in_flight(shape) == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("samples", "devices", "counts"),
    [(64, 4, [4, 8, 16, 32]), (12, 4, [4, 6, 12]), (3, 4, [3]), (7, 2, [7]), (100, 4, [4, 5, 10, 20, 25])],
)
def test_numbers_of_microbatches_divide_the_batch(samples: int, devices: int, counts: list[int]) -> None:
    found = counts_to_try(samples, devices)
    assert set(found) <= set(counts)
    assert all(samples % count == 0 for count in found)
    assert found[0] >= min(devices, samples)


def test_sizes_between_two_measured_ones() -> None:
    small, large = [block("a", 1, activation=10.0)], [block("a", 3, activation=30.0, parameters=5 * MIB)]
    (middle,) = between(small, large, 0.25)
    assert middle.forward == pytest.approx(1.5e-3)
    assert middle.activation == 15.0
    assert middle.parameters == small[0].parameters
    with pytest.raises(SplitError, match="other blocks"):
        between(small, [block("b")], 0.5)


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * 2**30), ("16 GB", 16e9), ("1.5e3", 1500), ("512 mib", 512 * MIB), (7.5, 7.5), ("3B", 3)],
)
def test_sizes_in_words(text: Any, size: float) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "1.2.3", "-5", "nan", None, True, float("nan")])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InputError, match="is no size"):
        bytes_of(text)


def test_numbers_in_words() -> None:
    assert [size_words(n) for n in (0, 1000, 2**20, 999.6 * 2**20, math.inf)] == [
        "0 B",
        "0.977 KiB",
        "1 MiB",
        "0.976 GiB",
        "no limit",
    ]
    assert [time_words(t) for t in (0, 1.5e-7, 2.34e-3, 0.9999, 61.23)] == ["0", "150 ns", "2.34 ms", "1 s", "61.2 s"]


def test_the_moves_of_cuts_find_the_best_cut_of_a_small_case() -> None:
    """Every cut of six blocks, tried with 1F1B: none is better than what was chosen for it."""
    row = blocks((3, 1, 1, 1, 1, 5))
    plan = plan_of(row, 3, microbatches=6, schedule="1f1b")
    steps = [dataclasses.replace(plan, cuts=(0, a, b, 6)).step for a, b in product(range(1, 5), range(2, 6)) if a < b]
    assert plan.step == pytest.approx(min(steps))
    assert plan.schedule == build_schedule("1f1b", stages=3, microbatches=6)


def test_a_plan_travels_as_json(tmp_path: Path) -> None:
    plan = plan_of((1, 2, 1, 1), 2, microbatches=4, memory="1GiB", link=(1e-6, "25GB/s"), name="mine")
    plan.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == plan
    assert plan.devices[0] == Device(memory=2**30, latency=1e-6, bandwidth=25e9)
    assert plan.model == "mine"

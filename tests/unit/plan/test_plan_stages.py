"""What stages of blocks cost: the partition's own numbers, and links between any two devices."""

from __future__ import annotations

import dataclasses
import math

import pytest
from plan_examples import MIB, block, blocks

from stageflow.errors import InputError
from stageflow.plan import Device, Tie
from stageflow.plan.partition import split_chain
from stageflow.plan.stages import costs_of, footprint_of, link_between, plan_stages
from stageflow.schedule import build_schedule
from stageflow.schedule.memory import peak_memory


def test_sums_of_a_stage_with_what_is_kept_at_its_ends() -> None:
    first = dataclasses.replace(block("a", 2), entry=3 * MIB)
    last = dataclasses.replace(block("b", 3), exit=2 * MIB)
    (stage,) = plan_stages([first, last], (0, 2), (0,), (False,), [Device(speed=2)])
    assert stage.blocks == ("a", "b")
    assert stage.forward == pytest.approx(2.5e-3)
    assert stage.time == pytest.approx(7.5e-3)
    assert stage.activation == 25 * MIB
    assert stage.static == 40 * MIB
    assert stage.workspace == 0


def test_a_stage_that_recomputes_keeps_its_input_and_works_longer() -> None:
    (stage,) = plan_stages(blocks([2, 3]), (0, 2), (0,), (True,), [Device()])
    assert stage.again == pytest.approx(5e-3)
    assert stage.time == pytest.approx(20e-3)
    assert stage.activation == MIB
    assert stage.workspace == 19 * MIB


@pytest.mark.parametrize("recompute", [False, True])
def test_times_and_memory_are_those_that_the_partition_chose_by(recompute: bool) -> None:
    devices = [Device(speed=1 + stage / 2, latency=1e-4, bandwidth=1e10) for stage in range(3)]
    row = [dataclasses.replace(b, entry=MIB / 2, exit=MIB / 4) for b in blocks([1, 2, 1, 3, 1, 2, 4])]
    ties = [Tie((0, 6), 7 * MIB, 7 * MIB)]
    partition = split_chain(row, devices, microbatches=6, recompute=recompute, ties=ties)
    stages = plan_stages(row, partition.cuts, (0, 1, 2), partition.recompute, devices, ties)
    assert [stage.time for stage in stages] == pytest.approx(partition.times)
    schedule = build_schedule("1f1b", stages=3, microbatches=6)
    assert peak_memory(schedule, footprint_of(stages)) == pytest.approx(partition.memory)
    costs = costs_of(stages, devices)
    arrivals = [costs.hop_between(s, s + 1) + costs.transfer_between(s, s + 1) for s in range(2)]
    assert arrivals == pytest.approx(partition.transfers[1:])


def test_two_stages_of_a_device_that_recompute_do_so_one_at_a_time() -> None:
    stages = plan_stages(blocks([1, 1, 1]), (0, 1, 3), (0, 0), (True, True), [Device()])
    footprint = footprint_of(stages)
    assert footprint.static == [20 * MIB, 40 * MIB + 19 * MIB]


def test_links_to_neighbours_around_the_ring_and_across() -> None:
    devices = [Device(latency=1, bandwidth=10), Device(latency=2, bandwidth=5), Device(latency=4, bandwidth=20)]
    devices.append(Device(latency=8, bandwidth=40))
    assert link_between(devices, 0, 1) == (1, 10)
    assert link_between(devices, 1, 0) == (1, 10)
    assert link_between(devices, 3, 0) == (8, 40)
    assert link_between(devices, 0, 2) == (3, 5)
    assert link_between(devices, 2, 2) == (0, math.inf)


@pytest.mark.parametrize(
    ("cuts", "placement", "recompute", "words"),
    [
        ((0, 2), (0,), (False,), "rise from 0 to 3"),
        ((0, 2, 2, 3), (0, 0, 0), (False,) * 3, "rise from 0 to 3"),
        ((0, 1, 3), (0,), (False, False), "placement of 1"),
        ((0, 1, 3), (0, 2), (False, False), r"outside 0\.\.1"),
    ],
)
def test_numbers_of_things_that_do_not_fit(cuts: tuple, placement: tuple, recompute: tuple, words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_stages(blocks([1, 1, 1]), cuts, placement, recompute, [Device(), Device()])

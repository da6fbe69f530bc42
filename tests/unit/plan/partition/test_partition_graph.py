import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from partition_instances import Instance, random_instance

from stageflow.errors import InputError, SplitError
from stageflow.plan.partition import Block, Device, split_chain, split_graph


def best_step(instance: Instance, edges: set[tuple[int, int]]) -> float:
    """The smallest step over all assignments of blocks to stages in which values flow forward."""
    n, p = len(instance.blocks), len(instance.devices)
    ways = {"auto": (False, True), True: (True,), False: (False,)}[instance.recompute]
    best = math.inf
    for stage_of in product(range(p), repeat=n):
        if len(set(stage_of)) == p and all(stage_of[a] <= stage_of[b] for a, b in edges):
            steps = [_step(instance, edges, stage_of, again) for again in product(ways, repeat=p)]
            best = min(best, *steps) if len(steps) > 1 else min(best, steps[0])
    return best


def _step(instance: Instance, edges: set[tuple[int, int]], stage_of: tuple[int, ...], again: tuple[bool, ...]) -> float:
    total = slowest = 0.0
    blocks = instance.blocks
    for stage, device in enumerate(instance.devices):
        mine = [b for b in range(len(blocks)) if stage_of[b] == stage]
        arriving = {a for a, b in edges if stage_of[b] == stage and stage_of[a] < stage}
        received = sum(blocks[a].output for a in arriving)
        needs = {b: [a for a, c in edges if c == b] for b in mine}
        users = {b: [c for a, c in edges if a == b] for b in mine}
        one = sum(blocks[b].activation for b in mine)
        one += sum(blocks[b].entry for b in mine if not needs[b] or any(stage_of[a] < stage for a in needs[b]))
        one += sum(blocks[b].exit for b in mine if not users[b] or any(stage_of[c] > stage for c in users[b]))
        boundary = received + sum(blocks[b].boundary for b in mine if not needs[b])
        static = sum(blocks[b].parameters + blocks[b].gradients + blocks[b].optimizer for b in mine)
        waiting = instance.put_off[stage] * sum(blocks[b].deferred for b in mine)
        kept = instance.kept[stage]
        if static + waiting + (one + (kept - 1) * boundary if again[stage] else kept * one) > device.memory:
            return math.inf
        work = sum(blocks[b].forward for b in mine)
        work += sum(
            blocks[b].backward_input + blocks[b].backward_weight if instance.split else blocks[b].backward for b in mine
        )
        work += sum(blocks[b].again for b in mine) if again[stage] else 0.0
        work /= device.speed
        occupied = received / instance.devices[stage - 1].bandwidth if received else 0.0
        arrival = occupied + instance.devices[stage - 1].latency if received else 0.0
        total += work + 2 * arrival
        slowest = max(slowest, max(work, occupied) if instance.overlap else work + 2 * arrival)
    return total + (instance.microbatches - 1) * slowest


def wire(rng: random.Random, n: int) -> set[tuple[int, int]]:
    return {(a, b) for b in range(n) for a in range(b) if rng.random() < 0.35}


def ladder(n: int, width: int) -> tuple[list[Block], list[tuple[int, int]]]:
    """``width`` chains side by side, of n blocks each."""
    rng = random.Random(0)
    blocks = [Block(str(i), forward=rng.random(), backward=rng.random(), output=1.0) for i in range(n * width)]
    return blocks, [(i, i + width) for i in range(n * width - width)]


@pytest.mark.parametrize("seed", range(4))
def test_equals_trying_everything(seed: int):
    rng = random.Random(seed)
    feasible = 0
    for _ in range(60):
        instance = random_instance(rng, most_blocks=5, most_devices=3)
        instance.ties = []
        edges = wire(rng, len(instance.blocks))
        expected = best_step(instance, edges)
        if math.isinf(expected):
            with pytest.raises(SplitError, match="fits into memory"):
                split_graph(instance.blocks, edges, instance.devices, **instance.arguments)
            continue
        found = split_graph(instance.blocks, edges, instance.devices, **instance.arguments)
        assert found.step == pytest.approx(expected, rel=1e-9)
        assert found.gap == 0.0
        feasible += 1
    assert feasible > 30


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_one_case(seed: int):
    rng = random.Random(seed)
    for _ in range(60):
        instance = random_instance(rng)
        blocks = [replace(instance.blocks[0], boundary=3.0)]
        for block in instance.blocks[1:]:  # a chain's blocks are told what they receive, a graph's receive it
            blocks.append(replace(block, boundary=blocks[-1].output))
        edges = [(i, i + 1) for i in range(len(blocks) - 1)]
        arguments = {**instance.arguments, "ties": instance.ties}
        steps = []
        for cut in (
            partial(split_chain, blocks, instance.devices),
            partial(split_graph, blocks, edges, instance.devices),
        ):
            try:
                steps.append(cut(**arguments).step)
            except SplitError:
                steps.append(math.inf)
        assert steps[1] == pytest.approx(steps[0], rel=1e-9)


def test_two_towers_need_not_be_cut_in_the_order_of_their_blocks():
    blocks = [Block(str(i), forward=t) for i, t in enumerate([3.0, 1.0, 1.0, 1.0])]
    edges = [(1, 2), (2, 3)]
    found = split_graph(blocks, edges, [Device()] * 2, microbatches=10)
    assert sorted(found.times) == [3.0, 3.0]


def test_stages_that_interleave_have_no_cuts():
    blocks = [Block(str(i), forward=t) for i, t in enumerate([1.0, 3.0, 2.0])]
    found = split_graph(blocks, [], [Device()] * 2, microbatches=10)
    assert found.stages in (((1,), (0, 2)), ((0, 2), (1,)))
    with pytest.raises(InputError, match="read .stages"):
        _ = found.cuts


def test_a_value_is_sent_once_to_each_stage_that_uses_it():
    blocks = [Block("a", forward=1.0, output=8.0), Block("b", forward=1.0), Block("c", forward=1.0)]
    found = split_graph(blocks, [(0, 1), (0, 2)], [Device(bandwidth=8.0)] * 2, microbatches=1)
    assert found.step == pytest.approx(3.0 + 2.0)


def test_a_wide_graph_comes_with_a_bound():
    blocks, edges = ladder(6, 6)
    found = split_graph(blocks, edges, [Device()] * 4, microbatches=16)
    assert 0.0 < found.gap < 0.3
    narrow, edges = ladder(18, 2)
    assert split_graph(narrow, edges, [Device()] * 4, microbatches=16).gap == 0.0


def test_more_ideals_never_make_it_worse():
    blocks, edges = ladder(5, 3)
    few = split_graph(blocks, edges, [Device(bandwidth=20.0)] * 4, microbatches=8, ideals=20)
    all_ = split_graph(blocks, edges, [Device(bandwidth=20.0)] * 4, microbatches=8)
    assert few.bound <= all_.step <= few.step


def test_edges_that_go_down_are_refused():
    with pytest.raises(InputError, match="does not go up"):
        split_graph([Block("a"), Block("b")], [(1, 0)], [Device()], microbatches=1)

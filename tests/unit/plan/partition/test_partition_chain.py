import math
import random
import re
import time

import pytest
from partition_instances import all_cuts, best_step, random_instance, step_of

from stageflow.errors import InputError, SplitError
from stageflow.plan.partition import Block, Device, Tie, split_chain
from stageflow.schedule import Costs, build_schedule


def row(*seconds: float, **others: float) -> list[Block]:
    return [Block(f"b{i}", forward=s / 3, backward=2 * s / 3, **others) for i, s in enumerate(seconds)]


@pytest.mark.parametrize("seed", range(8))
def test_equals_trying_everything(seed: int):
    rng = random.Random(seed)
    feasible = 0
    for _ in range(280):
        instance = random_instance(rng, most_blocks=6, most_devices=4)
        expected = best_step(instance)
        if math.isinf(expected):
            with pytest.raises(SplitError, match="fits into memory"):
                split_chain(instance.blocks, instance.devices, ties=instance.ties, **instance.arguments)
            continue
        found = split_chain(instance.blocks, instance.devices, ties=instance.ties, **instance.arguments)
        assert found.step == pytest.approx(expected, rel=1e-9)
        assert step_of(instance, found.cuts) == pytest.approx(expected, rel=1e-9)
        assert found.bound == found.step
        assert all(used <= device.memory for used, device in zip(found.memory, instance.devices, strict=True))
        feasible += 1
    assert feasible > 140


@pytest.mark.parametrize("seed", range(3))
def test_equals_trying_all_cuts_of_longer_chains(seed: int):
    rng = random.Random(100 + seed)
    for _ in range(12):
        instance = random_instance(rng, most_blocks=14, most_devices=6)
        instance.recompute = False
        cuts = all_cuts(len(instance.blocks), len(instance.devices))
        expected = min(step_of(instance, each) for each in cuts)
        if not math.isinf(expected):
            found = split_chain(instance.blocks, instance.devices, ties=instance.ties, **instance.arguments)
            assert found.step == pytest.approx(expected, rel=1e-9)


def test_equal_blocks_are_shared_out_equally():
    found = split_chain(row(*[1.0] * 12), [Device()] * 4, microbatches=8)
    assert found.cuts == (0, 3, 6, 9, 12)
    assert found.step == pytest.approx(12 + 7 * 3)
    assert found.gap == 0.0


def test_a_heavy_head_gets_a_stage_with_fewer_blocks():
    found = split_chain(row(*[1.0] * 10, 4.0), [Device()] * 2, microbatches=8)
    assert found.cuts == (0, 7, 11)


def test_a_device_twice_as_fast_gets_twice_the_work():
    found = split_chain(row(*[1.0] * 9), [Device(speed=2.0), Device()], microbatches=100)
    assert found.cuts == (0, 6, 9)
    assert found.times == pytest.approx((3.0, 3.0))


def test_a_cut_where_little_crosses_is_worth_some_imbalance():
    sizes = (100.0, 100.0, 1.0, 0.0)
    blocks = [Block(f"b{i}", forward=1 / 3, backward=2 / 3, output=size) for i, size in enumerate(sizes)]
    link = Device(bandwidth=100.0)
    assert split_chain(blocks, [link, link], microbatches=4).cuts == (0, 3, 4)
    assert split_chain(blocks, [Device()] * 2, microbatches=4).cuts == (0, 2, 4)


def test_the_first_stage_keeps_the_most_and_so_takes_fewer_blocks():
    blocks = row(*[1.0] * 8, activation=1.0)
    free = split_chain(blocks, [Device()] * 4, microbatches=16, recompute=False)
    assert free.memory == (8.0, 6.0, 4.0, 2.0)
    tight = split_chain(blocks, [Device(memory=6.0)] * 4, microbatches=16, recompute=False)
    assert tight.cuts[1] == 1
    assert max(tight.memory) <= 6.0
    assert tight.step == pytest.approx(8 + 15 * 3)


def test_only_the_stage_that_must_recomputes():
    blocks = row(*[1.0] * 8, activation=4.0, boundary=1.0)
    found = split_chain(blocks, [Device(memory=24.0)] * 4, microbatches=16)
    assert found.recompute == (True, False, False, False)
    assert found.memory == (3 * 1.0 + 8.0, 24.0, 16.0, 8.0)
    assert found.times[0] == pytest.approx(2.0 + 2 / 3)


def test_a_tied_weight_costs_a_copy_where_its_users_part():
    blocks = row(*[1.0] * 4, parameters=10.0)
    apart = split_chain(blocks, [Device(bandwidth=10.0)] * 2, microbatches=1, ties=[Tie((0, 3), 10.0, 10.0)])
    assert apart.memory == (10.0 * apart.cuts[1], 10.0 * (4 - apart.cuts[1]) + 20.0)
    assert apart.step == pytest.approx(4.0 + 2.0)
    together = split_chain(blocks, [Device(bandwidth=10.0)] * 2, microbatches=1, ties=[Tie((0, 1), 10.0, 10.0)])
    assert together.step == pytest.approx(4.0)


def test_a_split_backward_has_its_own_times():
    blocks = [Block("b", forward=1.0, backward=3.0, backward_input=1.0, backward_weight=1.0)] * 2
    assert split_chain(blocks, [Device()] * 2, microbatches=1).step == 8.0
    assert split_chain(blocks, [Device()] * 2, microbatches=1, split=True).step == 6.0


def test_what_does_not_fit_is_refused_with_the_numbers():
    blocks = row(*[1.0] * 4, activation=1024.0, parameters=4096.0)
    with pytest.raises(SplitError, match=r"fits into memory") as refused:
        split_chain(blocks, [Device(memory=2048.0)] * 2, microbatches=8)
    text = str(refused.value)
    assert "where its device has 2 KiB" in text
    times = float(re.search(r"It would fit with ([\d.]+) times the memory", text)[1])
    assert split_chain(blocks, [Device(memory=2048.0 * times * 1.001)] * 2, microbatches=8)
    with pytest.raises(SplitError):
        split_chain(blocks, [Device(memory=2048.0 * times * 0.99)] * 2, microbatches=8)


def test_a_refusal_says_when_recomputation_would_do():
    blocks = row(*[1.0] * 4, activation=1024.0)
    with pytest.raises(SplitError, match="or with recompute='auto'"):
        split_chain(blocks, [Device(memory=3000.0)] * 2, microbatches=8, recompute=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"microbatches": 0}, "microbatches must be at least 1"),
        ({"in_flight": "2f2b"}, "in_flight must be"),
        ({"in_flight": [1]}, "in_flight needs a number of at least 1 for each of 2 stages"),
        ({"put_off": [0, -1]}, "put_off needs"),
        ({"recompute": "never"}, "recompute must be"),
        ({"ties": [Tie((0, 9), 1.0)]}, "a tie names block 9"),
        ({"devices": []}, "at least one device"),
        ({"devices": [Device()] * 5}, "4 blocks can't fill 5 devices"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change: dict, words: str):
    arguments = {"blocks": row(*[1.0] * 4), "devices": [Device()] * 2, "microbatches": 4} | change
    with pytest.raises(InputError, match=words):
        split_chain(arguments.pop("blocks"), arguments.pop("devices"), **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Block("b", forward=-1.0),
        lambda: Block("b", forward=math.nan),
        lambda: Block("b", activation=math.inf),
        lambda: Device(speed=0.0),
        lambda: Device(memory=0.0),
        lambda: Device(latency=-1.0),
        lambda: Device(bandwidth=0.0),
        lambda: Tie((1,), 1.0),
        lambda: Tie((2, 1), 1.0),
        lambda: Tie((0, 1), -1.0),
    ],
)
def test_impossible_numbers_are_refused_at_once(make):
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize("seed", range(10))
def test_a_simulated_1f1b_step_takes_no_longer_than_the_model_says(seed: int):
    """Where backwards take equally many times as long as forwards; else up to a tenth longer. And no less than the
    work and the way there of the stage with the most of both."""
    rng = random.Random(seed)
    for number in range(40):
        p, m, ratio = rng.randint(1, 6), rng.randint(1, 12), rng.uniform(1, 3)
        forward = [rng.lognormvariate(0, 0.7) for _ in range(p)]
        backward = (
            [ratio * time for time in forward] if number % 2 else [rng.lognormvariate(0.7, 0.7) for _ in range(p)]
        )
        sizes = [rng.choice([0.0, rng.lognormvariate(-1, 1)]) for _ in range(p)]
        blocks = [
            Block(str(i), forward=f, backward=b, output=s)
            for i, (f, b, s) in enumerate(zip(forward, backward, sizes, strict=True))
        ]
        found = split_chain(blocks, [Device(bandwidth=1.0)] * p, microbatches=m)
        schedule = build_schedule("1f1b", stages=p, microbatches=m)
        crossing = {(i, i + 1): sizes[i] for i in range(p - 1)}
        for link in ("hop", "transfer"):
            costs = Costs(forward, backward, 0.0, backward, **{link: crossing})
            step = schedule.simulate(costs).makespan
            assert step <= found.step * (1 + 1e-9 if number % 2 else 1.1)
            ways = [sum(forward[j] + backward[j] + 2 * sizes[j] for j in range(i)) for i in range(p)]
            assert step >= max(way + m * found.times[i] for i, way in enumerate(ways)) * (1 - 1e-9)


def test_a_thousand_blocks_on_64_devices_in_under_two_seconds():
    rng = random.Random(0)
    blocks = [
        Block(
            str(i),
            forward=rng.lognormvariate(0, 0.5),
            backward=rng.lognormvariate(0.7, 0.5),
            activation=rng.randint(1, 100),
            boundary=rng.randint(1, 20),
            parameters=rng.randint(1, 50),
            output=rng.randint(1, 30),
        )
        for i in range(1000)
    ]
    devices = [Device(speed=rng.uniform(0.5, 2), memory=3e4, latency=0.01, bandwidth=100.0) for _ in range(64)]
    began = time.process_time()
    found = split_chain(blocks, devices, microbatches=128, ties=[Tie((0, 999), 50.0, 10.0)])
    assert time.process_time() - began < 2.0
    assert len(found.stages) == 64
    assert max(found.memory) <= 3e4

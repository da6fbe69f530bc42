"""Random small instances, and the minimum found by trying everything; the sums are written out here a second time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from stageflow.plan.partition import Block, Device, Tie


@dataclass
class Instance:
    blocks: list[Block]
    devices: list[Device]
    microbatches: int
    kept: list[int]
    put_off: list[int]
    recompute: bool | str
    ties: list[Tie]
    split: bool
    overlap: bool

    @property
    def arguments(self) -> dict:
        return {
            "microbatches": self.microbatches,
            "in_flight": self.kept,
            "put_off": self.put_off,
            "recompute": self.recompute,
            "split": self.split,
            "overlap": self.overlap,
        }


def random_instance(rng: random.Random, most_blocks: int = 8, most_devices: int = 4) -> Instance:
    n = rng.randint(1, most_blocks)
    p = rng.randint(1, min(n, most_devices))
    m = rng.choice([1, 2, 4, 8, 30])
    plain = rng.random() < 0.3
    blocks = []
    for number in range(n):
        cost = (lambda: float(rng.randint(0, 4))) if plain else (lambda: rng.lognormvariate(0, 1))
        blocks.append(
            Block(
                f"b{number}",
                forward=cost(),
                backward=cost(),
                backward_input=cost(),
                backward_weight=cost(),
                recompute=rng.choice([None, cost()]),
                activation=rng.randint(0, 30),
                entry=rng.randint(0, 5),
                exit=rng.randint(0, 5),
                deferred=rng.randint(0, 10),
                boundary=rng.randint(0, 8),
                parameters=rng.randint(0, 20),
                gradients=rng.randint(0, 20),
                optimizer=rng.randint(0, 20),
                output=rng.choice([0, rng.randint(1, 20)]),
            )
        )
    memory = rng.choice([math.inf, 400.0, 200.0, 100.0])
    unequal = rng.random() < 0.5
    devices = [
        Device(
            speed=rng.choice([0.5, 1.0, 2.0, 3.0]) if unequal else 1.0,
            memory=memory * rng.choice([0.5, 1.0, 2.0]) if unequal else memory,
            latency=rng.choice([0.0, 0.1]),
            bandwidth=rng.choice([math.inf, 5.0, 50.0]),
        )
        for _ in range(p)
    ]
    if not unequal:
        devices = devices[:1] * p
    ties = []
    if n >= 2 and rng.random() < 0.4:
        users = sorted(rng.sample(range(n), rng.randint(2, min(3, n))))
        ties.append(Tie(tuple(users), rng.randint(0, 20), rng.randint(0, 20)))
    return Instance(
        blocks,
        devices,
        m,
        [rng.choice([min(m, p - s), m]) for s in range(p)],
        [rng.choice([0, s]) for s in range(p)],
        rng.choice(["auto", "auto", True, False]),
        ties,
        rng.random() < 0.3,
        rng.random() < 0.3,
    )


def best_step(instance: Instance) -> float:
    """The smallest step over all cuts and all choices of recomputation; infinite where nothing fits."""
    return min(step_of(instance, cuts) for cuts in all_cuts(len(instance.blocks), len(instance.devices)))


def all_cuts(n: int, p: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, n), p - 1):
        yield (0, *inner, n)


def step_of(instance: Instance, cuts: Sequence[int]) -> float:
    """The smallest step of one cut over all choices of recomputation."""
    ways = {"auto": (False, True), True: (True,), False: (False,)}[instance.recompute]
    return min(_step(instance, cuts, again) for again in product(ways, repeat=len(cuts) - 1))


def _step(instance: Instance, cuts: Sequence[int], again: Sequence[bool]) -> float:
    total = slowest = 0.0
    for stage, device in enumerate(instance.devices):
        start, end = cuts[stage], cuts[stage + 1]
        members = instance.blocks[start:end]
        copies = [t for t in instance.ties if t.blocks[0] < start and any(start <= b < end for b in t.blocks)]
        static = sum(b.parameters + b.gradients + b.optimizer for b in members)
        static += sum(t.parameters + t.gradients for t in copies)
        one = sum(b.activation for b in members) + members[0].entry + members[-1].exit
        kept, waiting = instance.kept[stage], instance.put_off[stage] * sum(b.deferred for b in members)
        held = one + (kept - 1) * members[0].boundary if again[stage] else kept * one
        if static + held + waiting > device.memory:
            return math.inf
        work = sum(b.forward for b in members)
        work += sum(b.backward_input + b.backward_weight if instance.split else b.backward for b in members)
        if again[stage]:
            work += sum(b.forward if b.recompute is None else b.recompute for b in members)
        work /= device.speed
        arrival = occupied = 0.0
        if stage and instance.blocks[start - 1].output:
            link = instance.devices[stage - 1]
            occupied = instance.blocks[start - 1].output / link.bandwidth
            arrival = link.latency + occupied
        total += work + 2 * arrival
        slowest = max(slowest, max(work, occupied) if instance.overlap else work + 2 * arrival)
        for tie in copies:
            if tie.parameters + tie.gradients:
                total += (tie.parameters + tie.gradients) / instance.devices[stage - 1].bandwidth
        if any(tie.parameters + tie.gradients for tie in copies):
            total += 2 * instance.devices[stage - 1].latency
    return total + (instance.microbatches - 1) * slowest

"""The outcome: which blocks make which stage, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageflow.errors import InputError
from stageflow.plan.partition.block import Device
from stageflow.plan.partition.model import Load, Rules, number, transfers


@dataclass(frozen=True)
class Partition:
    """Stages of blocks, stage s on device s.

    stages: numbers of the blocks of each, ascending.
    recompute: per stage, whether it drops its activations after F and computes them again.
    times: per stage, seconds of one micro-batch on its device: forward, backward, and the forward run again.
    transfers: per stage, seconds until one micro-batch's input has crossed from the stage before; 0 for the first.
    memory: per stage, bytes at the peak.
    step: seconds of a step by the model (see `stageflow.plan.partition.model`).
    bound: no partition of these blocks over these devices takes less by that model; equal to ``step`` where exact.
    """

    stages: tuple[tuple[int, ...], ...]
    recompute: tuple[bool, ...]
    times: tuple[float, ...]
    transfers: tuple[float, ...]
    memory: tuple[float, ...]
    step: float
    bound: float

    @property
    def gap(self) -> float:
        """At most by which share another partition could be faster; 0 where this one is the best."""
        return self.step / self.bound - 1 if self.bound else 0.0

    @property
    def cuts(self) -> tuple[int, ...]:
        """Stage s has the blocks ``cuts[s]`` to ``cuts[s + 1] - 1``; from 0 to the number of blocks.

        Raises InputError where stages of a graph are no runs of consecutive blocks.
        """
        flat = [block for stage in self.stages for block in stage]
        if flat != sorted(flat):
            raise InputError("these stages interleave in the order of the blocks: read .stages instead of .cuts")
        return (*(stage[0] for stage in self.stages), len(flat))

    @property
    def slowest(self) -> int:
        """The stage that takes longest."""
        return max(range(len(self.times)), key=self.times.__getitem__)


def evaluate(
    stages: Sequence[Sequence[int]],
    loads: Sequence[Load],
    recompute: Sequence[bool],
    devices: Sequence[Device],
    rules: Rules,
    bound: float | None = None,
) -> Partition:
    """Work out what given stages take. loads: of each. bound: None where there is nothing better."""
    times: list[float] = []
    arrivals: list[float] = []
    memory: list[float] = []
    total = beat = 0.0
    for stage, (load, again) in enumerate(zip(loads, recompute, strict=True)):
        time = (load.time + (load.again if again else 0.0)) / devices[stage].speed
        arrival, busy, exchange = map(number, transfers(load, stage, devices))
        total += time + 2 * arrival + exchange
        beat = max(beat, max(time, busy) if rules.overlap else time + 2 * arrival)
        times.append(number(time))
        arrivals.append(arrival)
        memory.append(number(load.memory(rules.kept[stage], rules.put_off[stage], again)))
    step = number(total + (rules.microbatches - 1) * beat)
    return Partition(
        tuple(tuple(stage) for stage in stages),
        tuple(bool(again) for again in recompute),
        tuple(times),
        tuple(arrivals),
        tuple(memory),
        step,
        step if bound is None else min(bound, step),
    )

"""What a stage takes, and what a step of the pipeline takes: the model that partitions are chosen by.

A step of m micro-batches over stages s, where t(s) is the time of one micro-batch's forward and backward on its device
(and of the forward run again, if it recomputes) and c(s) the time until its input has crossed from the stage before:

    step = Σ (t(s) + 2 c(s)) + (m - 1) max (t(s) + 2 c(s)) + ties

The sum is the way of one micro-batch through all stages and back, the maximum the beat at which the others follow.
Waits for transfers belong to the beat because 1F1B has no micro-batch in hand while one is under way; `overlap` takes
them out of it, for schedules that do (max(t(s), time on the link) then). Without transfers the same is the model of
Alpa (Zheng et al. 2022, Section 5.2) and the sum behind PipeDream's optimizer (Narayanan et al. 2019, Section 3.1).

Bytes of a stage that keeps k micro-batches in flight and the rest of a put-off W for w of them:

    keeping activations     static + ties + k activation + w deferred
    recomputing them        static + ties + (k - 1) boundary + activation + w deferred

The micro-batch that is being run again holds everything, the others their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from stageflow.errors import InputError
from stageflow.plan.partition.block import Block, Device, Tie

Recompute = bool | Literal["auto"]
InFlight = Literal["1f1b", "gpipe"] | Sequence[float]


@dataclass(frozen=True)
class Rules:
    """What the step looks like, whatever the cuts.

    kept, put_off: per stage, micro-batches whose activations it keeps at once, and those that wait for their W.
    recompute: "auto" recomputes in the stages that would not fit otherwise; True in all, False in none.
    split: backwards are I and W. overlap: transfers go on while stages compute.
    """

    microbatches: int
    kept: tuple[float, ...]
    put_off: tuple[float, ...]
    recompute: Recompute = "auto"
    split: bool = False
    overlap: bool = False

    @classmethod
    def of(
        cls,
        stages: int,
        microbatches: int,
        in_flight: InFlight,
        put_off: Sequence[float] | None,
        recompute: Recompute,
        split: bool,
        overlap: bool,
    ) -> Rules:
        """Check the arguments of a partition. Raises InputError for what makes no sense."""
        if microbatches < 1:
            raise InputError(f"microbatches must be at least 1, got {microbatches}")
        if recompute not in ("auto", True, False):
            raise InputError(f"recompute must be 'auto', True or False, got {recompute!r}")
        if in_flight == "1f1b":
            kept: Sequence[float] = [min(microbatches, stages - stage) for stage in range(stages)]
        elif in_flight == "gpipe":
            kept = [microbatches] * stages
        elif isinstance(in_flight, str):
            raise InputError(f"in_flight must be '1f1b', 'gpipe' or a number for each stage, got {in_flight!r}")
        else:
            kept = in_flight
        waiting = [0.0] * stages if put_off is None else put_off
        for name, counts, least in (("in_flight", kept, 1), ("put_off", waiting, 0)):
            if len(counts) != stages or not all(least <= count < math.inf for count in counts):
                raise InputError(f"{name} needs a number of at least {least} for each of {stages} stages, got {counts}")
        return cls(microbatches, tuple(kept), tuple(waiting), recompute, split, overlap)


@dataclass
class Load:
    """Sums over the blocks of a stage, or of many possible stages at once: numbers, or arrays of one shape.

    time, again: seconds of forward and backward, and of the forward run again, on a device of speed 1.
    activation: with what is kept where the stage begins and ends. received: bytes of its input. tied: of its copies.
    """

    time: Any
    again: Any
    static: Any
    activation: Any
    deferred: Any
    boundary: Any
    received: Any
    tied: Any

    def memory(self, kept: float, put_off: float, recompute: bool) -> Any:
        """Bytes at the peak."""
        held = (kept - 1) * self.boundary + self.activation if recompute else kept * self.activation
        return self.static + self.tied + held + put_off * self.deferred


class Weight(NamedTuple):
    """What possible stages add to the step: arrays of one shape, infinite where a stage does not fit.

    cost: seconds added to the sum. beat: seconds that the maximum is taken over. recompute: whether it has to.
    """

    cost: np.ndarray
    beat: np.ndarray
    recompute: np.ndarray


def weigh(load: Load, number: int, devices: Sequence[Device], rules: Rules) -> Weight:
    """The cheapest way to run each stage as stage ``number``: keeping its activations if they fit."""
    device, kept, put_off = devices[number], rules.kept[number], rules.put_off[number]
    never = np.full(np.shape(load.time), math.inf)
    keeping = recomputing = never
    if rules.recompute is not True:
        keeping = np.where(load.memory(kept, put_off, False) <= device.memory, load.time, math.inf)
    if rules.recompute is not False:
        fits = load.memory(kept, put_off, True) <= device.memory
        recomputing = np.where(fits, load.time + load.again, math.inf)
    time = np.minimum(keeping, recomputing) / device.speed
    arrival, busy, exchange = transfers(load, number, devices)
    beat = np.maximum(time, busy) if rules.overlap else time + 2 * arrival
    return Weight(time + 2 * arrival + exchange, beat, keeping > recomputing)


def transfers(load: Load, number: int, devices: Sequence[Device]) -> tuple[Any, Any, Any]:
    """Of stage ``number``: seconds until its input is there, seconds that this occupies the link, and seconds per step
    for its copies of tied weights; all over the link from the device before."""
    if number == 0:
        return 0.0, 0.0, 0.0
    link = devices[number - 1]
    busy = load.received / link.bandwidth
    arrival = np.where(np.asarray(load.received) > 0, link.latency + busy, 0.0)
    exchange = np.where(np.asarray(load.tied) > 0, 2 * link.latency + load.tied / link.bandwidth, 0.0)
    return arrival, busy, exchange


def block_time(block: Block, rules: Rules) -> float:
    """Seconds of its forward and backward for one micro-batch."""
    return block.forward + (block.backward_input + block.backward_weight if rules.split else block.backward)


def check(blocks: Sequence[Block], devices: Sequence[Device], ties: Sequence[Tie]) -> None:
    """Raise InputError unless there is something to cut, for somebody, with ties that name blocks."""
    if not devices:
        raise InputError("a partition needs at least one device")
    if len(blocks) < len(devices):
        raise InputError(
            f"{len(blocks)} blocks can't fill {len(devices)} devices: use at most {len(blocks)}, or finer blocks"
        )
    for tie in ties:
        if tie.blocks[-1] >= len(blocks):
            raise InputError(f"a tie names block {tie.blocks[-1]}, there are blocks 0 to {len(blocks) - 1}")


def number(value: Any) -> float:
    """A plain number out of what may be an array of one."""
    return float(cast(float, value))

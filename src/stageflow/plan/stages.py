"""What the stages of a cut cost: times, bytes and links, as the simulator and the bounds take them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stageflow.errors import InputError
from stageflow.plan.partition import Block, Device, Tie
from stageflow.schedule import Costs
from stageflow.schedule.memory import Footprint


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan, on its device.

    blocks: their names, in order. device: which one it sits on.
    recompute: whether activations are dropped after F and computed again before B.
    forward, backward, backward_input, backward_weight, again: seconds per micro-batch; again: of that recomputation.
    parameters: bytes of its weights, copies of tied ones included. static: of these, gradients, optimizer state.
    activation, deferred: bytes kept per micro-batch, from F until B (or I), and from I until W.
    workspace: bytes that one recomputation brings back while it lasts.
    tied: bytes of copies of weights that an earlier stage owns, with their gradients; part of ``static``.
    output: bytes handed to the next stage per micro-batch; gradients come back in as many.
    """

    blocks: tuple[str, ...]
    device: int
    recompute: bool
    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    again: float
    parameters: float
    static: float
    activation: float
    deferred: float
    workspace: float
    tied: float
    output: float

    @property
    def time(self) -> float:
        """Seconds of work per micro-batch: forward, whole backward, recomputation."""
        return self.forward + self.backward + self.again


def plan_stages(
    blocks: Sequence[Block],
    cuts: Sequence[int],
    placement: Sequence[int],
    recompute: Sequence[bool],
    devices: Sequence[Device],
    ties: Sequence[Tie] = (),
) -> tuple[PlannedStage, ...]:
    """Add up the blocks of every stage. cuts: from 0 to the number of blocks, one more than there are stages.

    Times and bytes are those by which `split_chain` chooses.

    Raises InputError where the numbers of things do not fit each other.
    """
    n = len(cuts) - 1
    if list(cuts) != sorted(set(cuts)) or cuts[0] != 0 or cuts[-1] != len(blocks):
        raise InputError(f"cuts {tuple(cuts)} must rise from 0 to {len(blocks)}, the number of blocks")
    if not len(placement) == len(recompute) == n:
        raise InputError(f"{n} stages, but a placement of {len(placement)} and recomputation of {len(recompute)}")
    if not set(placement) <= set(range(len(devices))):
        raise InputError(f"placement {tuple(placement)} names a device outside 0..{len(devices) - 1}")
    return tuple(
        _stage(blocks[start:end], worker, again, devices[worker].speed, _copies(ties, start, end))
        for (start, end), worker, again in zip(pairwise(cuts), placement, recompute, strict=True)
    )


def _copies(ties: Sequence[Tie], start: int, end: int) -> list[Tie]:
    """Of which the stage of these blocks holds a copy: weights that some of them use and an earlier one owns."""
    return [tie for tie in ties if tie.blocks[0] < start and any(start <= block < end for block in tie.blocks)]


def _stage(blocks: Sequence[Block], worker: int, recompute: bool, speed: float, copies: Sequence[Tie]) -> PlannedStage:
    activation = blocks[0].entry + sum(block.activation for block in blocks) + blocks[-1].exit
    kept = blocks[0].boundary if recompute else activation
    tied = sum(tie.bytes for tie in copies)
    return PlannedStage(
        blocks=tuple(block.name for block in blocks),
        device=worker,
        recompute=recompute,
        forward=sum(block.forward for block in blocks) / speed,
        backward=sum(block.backward for block in blocks) / speed,
        backward_input=sum(block.backward_input for block in blocks) / speed,
        backward_weight=sum(block.backward_weight for block in blocks) / speed,
        again=sum(block.again for block in blocks) / speed if recompute else 0.0,
        parameters=sum(each.parameters for each in (*blocks, *copies)),
        static=sum(block.static for block in blocks) + tied,
        activation=kept,
        deferred=sum(block.deferred for block in blocks),
        workspace=max(0.0, activation - kept),
        tied=tied,
        output=blocks[-1].output,
    )


def costs_of(stages: Sequence[PlannedStage], devices: Sequence[Device]) -> Costs:
    """Times for the simulator: stages, and the links between those that sit on different devices."""
    hop: dict[tuple[int, int], float] = {}
    transfer: dict[tuple[int, int], float] = {}
    exchange = [0.0] * len(stages)
    for number, (stage, after) in enumerate(pairwise(stages)):
        latency, bandwidth = link_between(devices, stage.device, after.device)
        hop[number, number + 1] = latency if stage.output else 0.0
        transfer[number, number + 1] = stage.output / bandwidth
        if after.tied:  # gradients of the copies to their owner, and its new values back
            exchange[number + 1] = 2 * latency + after.tied / bandwidth
    return Costs(
        forward=[stage.forward for stage in stages],
        backward_input=[stage.backward_input for stage in stages],
        backward_weight=[stage.backward_weight for stage in stages],
        backward=[stage.backward for stage in stages],
        recompute=[stage.again for stage in stages],
        hop=hop,
        transfer=transfer,
        reduction=exchange,
    )


def footprint_of(stages: Sequence[PlannedStage]) -> Footprint:
    """Bytes for the memory count. One recomputation runs at a time on a device: the largest counts, once."""
    static = [stage.static for stage in stages]
    largest: dict[int, int] = {}
    for number, stage in enumerate(stages):
        if stage.workspace > stages[largest.setdefault(stage.device, number)].workspace:
            largest[stage.device] = number
    for number in largest.values():
        static[number] += stages[number].workspace
    return Footprint(
        static=static,
        activation=[stage.activation for stage in stages],
        deferred=[stage.deferred for stage in stages],
    )


def link_between(devices: Sequence[Device], source: int, target: int) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes/s from one device to another.

    A device names its link to the next one, the last one that back to the first; what lies further apart goes over all
    links in between, the shorter way round.
    """
    n = len(devices)
    if source == target:
        return 0.0, math.inf
    low, high = min(source, target), max(source, target)
    inside, around = range(low, high), [*range(high, n), *range(low)]
    way = [devices[i] for i in (inside if len(inside) <= len(around) else around)]
    return sum(device.latency for device in way), min(device.bandwidth for device in way)

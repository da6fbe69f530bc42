"""Cuts for a shape, before it has a schedule. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from stageflow.errors import SplitError
from stageflow.plan.advice import moved_cuts
from stageflow.plan.partition import Device, Partition, split_chain
from stageflow.plan.shapes import AUTO, Shape, Wish, in_flight, pattern_of
from stageflow.plan.stages import footprint_of, link_between, plan_stages
from stageflow.plan.words import size_words
from stageflow.schedule.memory import peak_memory

ALL_CUTS = 300_000  # actions looked at when every cut is tried: bounds the time without looking at a clock


@dataclass(frozen=True)
class Draft:
    """A shape with its cuts, before it has a schedule."""

    shape: Shape
    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]


def draft(shape: Shape, wish: Wish, overlap: bool) -> Draft:
    """The best cuts by the model of a step: stage by stage, as if stages of one device were devices of their own.

    Where none fits when they share its memory equally, cuts that fit when they share it as they need.
    Raises SplitError where none is found.
    """
    try:
        partition = _split(shape, wish, overlap, equal_shares=True)
        return Draft(shape, partition.cuts, partition.recompute)
    except SplitError:
        if overlap or len(set(shape.placement)) == len(shape.placement):
            raise
    # what does not fit when every stage has its device for itself never does
    partition = _split(shape, wish, overlap, equal_shares=False)
    return _fit_together(Draft(shape, partition.cuts, partition.recompute), wish)


def _split(shape: Shape, wish: Wish, overlap: bool, *, equal_shares: bool) -> Partition:
    placement, work = shape.placement, shape.work
    return split_chain(
        work.blocks,
        [_seat(wish.devices, placement, stage, equal_shares) for stage in range(len(placement))],
        microbatches=work.microbatches,
        in_flight=in_flight(shape),
        recompute=wish.recompute,
        ties=work.ties,
        overlap=overlap,
    )


def _seat(devices: Sequence[Device], placement: Sequence[int], stage: int, equal_shares: bool) -> Device:
    """A stage's share of its device, with the link to where the next stage sits."""
    worker = placement[stage]
    after = placement[stage + 1] if stage + 1 < len(placement) else worker
    latency, bandwidth = link_between(devices, worker, after)
    memory = devices[worker].memory / (placement.count(worker) if equal_shares else 1)
    return Device(devices[worker].speed, memory, latency, bandwidth)


def _fit_together(start: Draft, wish: Wish) -> Draft:
    """Step by step less over the devices' memory, by a moved cut or one stage more that recomputes; then every cut."""
    schedule = pattern_of(start.shape)

    def peaks(each: Draft) -> Sequence[float]:
        work, placement = each.shape.work, each.shape.placement
        stages = plan_stages(work.blocks, each.cuts, placement, each.recompute, wish.devices, work.ties)
        return peak_memory(schedule, footprint_of(stages))

    def excess(each: Draft) -> list[float]:
        """How far devices are over their memory, the worst first."""
        pairs = zip(peaks(each), wish.devices, strict=True)
        return sorted((max(1.0, peak / device.memory) for peak, device in pairs), reverse=True)

    best, over = start, excess(start)
    while over[0] > 1:
        tried = [(excess(other), other) for other in _neighbours(best, wish)]
        less, other = min(tried, key=lambda pair: pair[0], default=(over, best))
        if less >= over:
            break
        best, over = other, less
    if over[0] > 1:
        for other in _all(best, wish, ALL_CUTS // sum(map(len, schedule.orders))):
            if (less := excess(other)) < over:
                best, over = other, less
            if over[0] <= 1:
                break
    if over[0] <= 1:
        return best
    needs = [
        (peak / device.memory, peak, at)
        for at, (peak, device) in enumerate(zip(peaks(best), wish.devices, strict=True))
    ]
    _, peak, at = max(needs)
    raise SplitError(
        f"no cut was found with which stages that share a device fit into its memory. The closest needs "
        f"{size_words(peak)} on device {at}, which has {size_words(wish.devices[at].memory)}: take fewer stages, more "
        "devices or smaller micro-batches"
    )


def _neighbours(of: Draft, wish: Wish) -> Iterator[Draft]:
    for cuts in moved_cuts(of.cuts):
        yield dataclasses.replace(of, cuts=cuts)
    if wish.recompute == AUTO:
        for stage, again in enumerate(of.recompute):
            if not again:
                yield dataclasses.replace(of, recompute=(*of.recompute[:stage], True, *of.recompute[stage + 1 :]))


def _all(like: Draft, wish: Wish, most: int) -> Iterator[Draft]:
    """Every cut, recomputing wherever that is allowed; none where there are more than so many."""
    blocks, stages = len(like.shape.work.blocks), len(like.cuts) - 1
    if math.comb(blocks - 1, stages - 1) <= most:
        for inner in combinations(range(1, blocks), stages - 1):
            yield Draft(like.shape, (0, *inner, blocks), (wish.recompute is not False,) * stages)

"""When a pipeline is the wrong tool: what else would do, and what stands in its way. With the numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan

LARGE_BUBBLE = 0.25


def speaks_against(plan: Plan) -> tuple[str, ...]:
    """What speaks against this pipeline, in words."""
    found = [_one_device(plan), _few_microbatches(plan), _link_bound(plan)]
    return tuple(words for words in found if words)


def one_device_memory(plan: Plan) -> float:
    """Bytes of the whole model on one device, which goes through the micro-batches one by one."""
    blocks = plan.blocks
    activation = blocks[0].entry + sum(block.activation for block in blocks) + blocks[-1].exit
    return sum(block.static for block in blocks) + activation


def one_device_step(plan: Plan, microbatches: int, speed: float) -> float:
    """Seconds of the whole model for so many micro-batches on one device."""
    return microbatches * sum(block.forward + block.backward for block in plan.blocks) / speed


def data_parallel_step(plan: Plan) -> float:
    """Seconds of a step with the whole model on every device and the micro-batches shared out.

    Afterwards a ring sums the gradients (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", Section
    3): 2(p-1) messages one after the other, each of 1/p of the gradients, as fast as the slowest link.
    """
    p = len(plan.devices)
    speeds = sum(device.speed for device in plan.devices)
    # shares of the batch in proportion to speed, in whole micro-batches
    work = max(
        one_device_step(plan, math.ceil(plan.microbatches * device.speed / speeds - 1e-9), device.speed)
        for device in plan.devices
    )
    gradients = sum(block.gradients for block in plan.blocks)
    link = max(device.latency + gradients / p / device.bandwidth for device in plan.devices)
    return work + 2 * (p - 1) * link


def _one_device(plan: Plan) -> str | None:
    if len(plan.devices) < 2 or not any(block.static for block in plan.blocks):  # whether it fits is not known
        return None
    need, room = one_device_memory(plan), min(device.memory for device in plan.devices)
    if need > room:
        return None
    of = "no limit on memory was given" if math.isinf(room) else f"{plan.size_words(need)} of {plan.size_words(room)}"
    fastest = max(device.speed for device in plan.devices)
    alone = one_device_step(plan, plan.microbatches, fastest)
    here = plan.time_words(plan.step)
    if alone <= plan.step:
        return (
            f"one device alone takes {plan.time_words(alone)} a step, this pipeline {here}, and the model fits "
            f"there ({of}): use one device"
        )
    shared = data_parallel_step(plan)
    if shared >= plan.step:
        return None
    return (
        f"the model fits on one device ({of}), and data parallelism over {len(plan.devices)} devices would take "
        f"{plan.time_words(shared)} a step with its exchange of gradients, this pipeline {here}: use that"
    )


def _few_microbatches(plan: Plan) -> str | None:
    m, p = plan.microbatches, len(plan.devices)
    if plan.bubble < LARGE_BUBBLE or m >= 2 * p:
        return None
    return (
        f"{m} micro-batches are few for {p} devices: workers idle for {plan.bubble:.0%} of the step. Cut the batch "
        f"into {4 * p} or more, or use fewer devices"
    )


def _link_bound(plan: Plan) -> str | None:
    beat = max(stage.time for stage in plan.stages)
    assert isinstance(plan.costs.transfer, dict)
    (edge, slowest) = max(plan.costs.transfer.items(), key=lambda item: item[1], default=((0, 0), 0.0))
    if slowest < beat:  # in each beat one value crosses, and one gradient the other way
        return None
    return (
        f"the link from stage {edge[0]} to stage {edge[1]} is the bottleneck: "
        f"{plan.size_words(plan.stages[edge[0]].output)} take {plan.time_words(slowest)} each way, while the slowest "
        f"stage computes "
        f"{plan.time_words(beat)} per micro-batch: cut where less crosses, or use a faster link"
    )

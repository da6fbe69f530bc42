"""The same model at several sizes of a micro-batch: measured at two, worked out between them. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stageflow.errors import SplitError
from stageflow.plan.partition import Block

_PER_SAMPLE = (
    *("forward", "backward", "backward_input", "backward_weight"),
    *("activation", "entry", "exit", "deferred", "boundary", "output"),
)


def counts_to_try(samples: int, devices: int) -> list[int]:
    """Numbers of micro-batches for a batch of so many samples: about one, two, four and eight per device.

    Of those that cut the batch into equal parts; one per sample where there are fewer samples than devices.
    """
    divisors = [count for count in range(1, samples + 1) if samples % count == 0]
    enough = [count for count in divisors if count >= devices] or [samples]
    return sorted({min(enough, key=lambda count: abs(count - times * devices)) for times in (1, 2, 4, 8)})


def between(small: Sequence[Block], large: Sequence[Block], share: float) -> tuple[Block, ...]:
    """Blocks of a size between two: times and activations grow in a straight line, from what a call costs anyway.

    share: 0 for the small size, 1 for the large one. Raises SplitError where the two are not the same blocks.
    """
    if [block.name for block in small] != [block.name for block in large]:
        raise SplitError("the model has other blocks for small micro-batches than for large ones: give microbatches=")
    return tuple(_mix(a, b, share) for a, b in zip(small, large, strict=True))


def _mix(small: Block, large: Block, share: float) -> Block:
    def at(low: float, high: float) -> float:
        return max(0.0, low + share * (high - low))

    again = None
    if small.recompute is not None and large.recompute is not None:
        again = at(small.recompute, large.recompute)
    changed = {name: at(getattr(small, name), getattr(large, name)) for name in _PER_SAMPLE}
    return dataclasses.replace(small, recompute=again, **changed)

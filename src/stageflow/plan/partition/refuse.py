"""What to say when no partition fits into memory: which stage needs how much, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stageflow.errors import SplitError
from stageflow.plan.partition.block import Block, Device
from stageflow.plan.partition.model import Load, Rules, number
from stageflow.plan.words import size_words


def refusal(
    blocks: Sequence[Block],
    stages: Sequence[Sequence[int]],
    loads: Sequence[Load],
    devices: Sequence[Device],
    rules: Rules,
    recomputing_fits: bool,
) -> SplitError:
    """The error for the stages that come closest to fitting. recomputing_fits: it would, if they might recompute."""
    needs = [number(least_memory(load, stage, rules)) for stage, load in enumerate(loads)]
    over = [need / device.memory for need, device in zip(needs, devices, strict=True)]
    worst = max(range(len(over)), key=over.__getitem__)
    members, load, kept = stages[worst], loads[worst], rules.kept[worst]
    recomputing = needs[worst] < number(load.memory(kept, rules.put_off[worst], False))
    held = needs[worst] - number(load.static + load.tied)
    names = blocks[members[0]].name if len(members) == 1 else f"{blocks[members[0]].name} to {blocks[members[-1]].name}"
    problem = (
        f"no cut of {len(blocks)} blocks into {len(stages)} stages fits into memory. The closest leaves stage {worst} "
        f"({names}) in need of {size_words(needs[worst])} where its device has {size_words(devices[worst].memory)}: "
        f"{size_words(number(load.static + load.tied))} of parameters, gradients and optimizer state, and "
        f"{size_words(held)} of activations for {kept:g} micro-batches in flight"
        f"{' with recomputation' if recomputing else ''}.\n"
    )
    options = [f"It would fit with {over[worst]:.4g} times the memory on every device"]
    if recomputing_fits:
        options.append("with recompute='auto'")
    if number(load.static + load.tied) < devices[worst].memory:
        options.append("perhaps with smaller micro-batches or fewer in flight")
    else:
        options.append("perhaps with more devices, finer blocks or an optimizer that keeps less")
    return SplitError(f"{problem}{', or '.join(options)}.")


def least_memory(load: Load, stage: int, rules: Rules) -> Any:
    """Bytes that a stage takes at the least, as far as it may recompute; of many stages, an array."""
    ways = (True,) if rules.recompute is True else (False,) if rules.recompute is False else (False, True)
    return np.minimum.reduce([load.memory(rules.kept[stage], rules.put_off[stage], way) for way in ways])

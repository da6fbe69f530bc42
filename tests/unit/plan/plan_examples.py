"""Blocks, devices and plans that several tests look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageflow.plan import Block, Device, Plan
from stageflow.plan.bounds import Bound
from stageflow.schedule import build_schedule

MIB = 2**20


def block(name: str, forward: float = 1.0, **options: Any) -> Block:
    """Of so many milliseconds: F, I and W alike."""
    ms = forward / 1000
    sizes: dict[str, Any] = {
        "activation": 10 * MIB,
        "deferred": 4 * MIB,
        "boundary": MIB,
        "parameters": 5 * MIB,
        "gradients": 5 * MIB,
        "optimizer": 10 * MIB,
        "output": MIB,
    }
    times = {"forward": ms, "backward": 2 * ms, "backward_input": ms, "backward_weight": ms}
    return Block(name, **(times | sizes | options))


def blocks(times: Sequence[float]) -> tuple[Block, ...]:
    return tuple(block(f"layers.{number}", time) for number, time in enumerate(times))


def make(
    times: Sequence[float] = (1, 1, 1, 1),
    cuts: Sequence[int] = (0, 2, 4),
    *,
    microbatches: int = 4,
    schedule: str = "1f1b",
    device: Device | None = None,
    recompute: Sequence[bool] | None = None,
    bound: float = 0.0,
    **options: Any,
) -> Plan:
    """A plan of a chain, one stage per device."""
    stages = len(cuts) - 1
    return Plan(
        model="Model",
        blocks=blocks(times),
        devices=(device or Device(),) * stages,
        cuts=tuple(cuts),
        recompute=tuple(recompute or [False] * stages),
        schedule=build_schedule(schedule, stages=stages, microbatches=microbatches),
        bound=Bound(bound, "a reason", {"a reason": bound}),
        **options,
    )

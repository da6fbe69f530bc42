"""What a worker is told, and what it says after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from stageflow.graph import StageGraph, StageSpec
from stageflow.runtime.optimize import OptimizerOptions
from stageflow.runtime.stage import StageOptions
from stageflow.schedule.actions import Action


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker is told at its start.

    specs: of its own stages. placement: the worker of each stage. owners, mirrors: as in `Split`.
    timeout: seconds that a message from another worker may take.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    specs: tuple[StageSpec, ...]
    owners: Mapping[str, int]
    mirrors: Mapping[str, tuple[int, ...]]
    options: StageOptions
    optimizer: OptimizerOptions
    seed: int
    device: str
    dtype: torch.dtype | None
    timeout: float

    @property
    def n_workers(self) -> int:
        return max(self.placement) + 1


@dataclass(frozen=True)
class StepCommand:
    """One step, the same on every worker but for the actions.

    number: of the call, in its messages. step: of the training, for random draws.
    mode: "train", "evaluate" (loss), "predict" (output).
    actions: this worker's order; None: the one it was given before under `schedule`.
    fresh: drop gradients of earlier steps. update: let the optimizers step. memory: report what the worker holds after.
    classes: of the batch, those that can't be imported.
    """

    number: int
    step: int
    mode: Literal["train", "evaluate", "predict"]
    weights: tuple[float, ...]
    schedule: str
    actions: tuple[Action, ...] | None
    fresh: bool = True
    update: bool = True
    memory: bool = False
    classes: Mapping[str, type] = field(default_factory=dict)


@dataclass
class StepReport:
    """What a worker says after a step.

    loss: of the whole batch, from the worker of the output stage. grad_norm: before clipping, over all stages.
    peak_in_flight: most micro-batches kept at once, over the worker's stages.
    memory: what the worker holds, see `WorkerState.memory`; where the command asked for it.
    outputs: flat outputs when predicting without an endpoint; classes: of outputs, for `unflatten`.
    """

    loss: float | None = None
    grad_norm: float | None = None
    peak_in_flight: int = 0
    learning_rates: list[float] = field(default_factory=list)
    memory: dict[str, int] | None = None
    outputs: dict[int, tuple[dict[str, Tensor], Any]] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)

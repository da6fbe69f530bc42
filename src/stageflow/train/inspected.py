"""What a pipeline tells of itself: its stages, its schedule, its last step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stageflow.errors import InputError
from stageflow.runtime.stage import Recompute
from stageflow.schedule import Schedule
from stageflow.split import Split
from stageflow.train.blueprint import Blueprint
from stageflow.train.life import Life
from stageflow.train.report import Description, StepView
from stageflow.train.start import Launch

if TYPE_CHECKING:
    from stageflow.plan import Plan


class Inspected:
    """The part of `Pipeline` that can be looked at; the other part sets these."""

    launch: Launch
    microbatches: int
    _blueprint: Blueprint
    _life: Life
    _example: Any
    _dtype: torch.dtype | None
    _recompute: Recompute | Sequence[Recompute | None] | None
    _last: StepView | None
    _memory: list[dict[str, int]] | None

    @property
    def split(self) -> Split:
        """How the model was cut. Raises InputError before the first batch where no example was given."""
        with self._life.alone("split"):
            return self._life.split("split")

    @property
    def stages(self) -> int:
        """How many. Raises InputError while "auto" has not decided it."""
        if self._blueprint.undecided and self._blueprint.any_stages:
            raise InputError(f"the number of stages is not decided yet: {self._decides()}")
        return self._blueprint.stages

    @property
    def plan(self) -> Plan | None:
        """The plan that this pipeline follows: the one given, or the one that "auto" made; None where there is none."""
        return self._blueprint.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full batch. Raises InputError while "auto" has not decided it."""
        if self._blueprint.undecided:
            raise InputError(f"the schedule is not decided yet: {self._decides()}")
        return self._blueprint.schedule_for(self.microbatches)

    @property
    def last_step(self) -> StepView:
        """Times, bubble and memory of the last train_step. Raises InputError before the first.

        Under torchrun all ranks must ask, as for everything that needs the workers.
        """
        if self._last is None:
            raise InputError("no train_step has run yet, so there is nothing to look at")
        if not self._last.events:
            with self._life.alone("last_step"):
                self._last.events = self._life.crew("last_step").events()
        return self._last

    def timeline(self, path: str | Path) -> None:
        """Draw the last train_step as one HTML page that needs no network: measured over predicted, a lane a worker."""
        self.last_step.write_html(path)

    def trace(self, path: str | Path) -> None:
        """Write the last train_step as a trace for ui.perfetto.dev or chrome://tracing."""
        self.last_step.write_trace(path)

    def describe(self) -> str:
        """Stages, owners, parameters, memory, schedule, expected bubble, as far as they are known.

        Asks no worker and starts none, so any rank may print its pipeline by itself, also in the middle of a step.
        """
        if self._blueprint.undecided:
            return f"{self!r}\n{self._blueprint.n_workers} workers, schedule 'auto': {self._decides()}"
        happens_with = "the first batch" if self._example is None else "the example, once the workers are needed,"
        shown = str(
            Description(
                repr(self),
                self.schedule,
                self._blueprint.split,
                happens_with,
                self._recomputes(),
                self._dtype,
                self._memory,
            )
        )
        return shown if self.plan is None else f"{shown}\nplanned: {self.plan.outlook()}"

    def _decides(self) -> str:
        """What has to happen for "auto" to decide."""
        by = "the first batch" if self._example is None else "the example, once the workers are needed,"
        return f"{by} is run to measure the model, which decides stages, placement and order"

    def _recomputes(self) -> list[bool]:
        """Per stage, whether it runs its forward again."""
        given = self._recompute
        if given is None and self.plan is not None:
            return list(self.plan.recompute)
        ways = given if isinstance(given, tuple) else (given,) * self.stages
        return [way is not None for way in ways]

    __str__ = describe

    @property
    def is_built(self) -> bool:
        """Whether the model was split and the workers started."""
        return self._life.started

    def __repr__(self) -> str:
        state = "closed" if self._life.closed else "running" if self._life.started else "not started"
        stages = "'auto'" if self._blueprint.undecided and self._blueprint.any_stages else self.stages
        return f"<stageflow.Pipeline stages={stages} microbatches={self.microbatches} launch={self.launch!r} {state}>"

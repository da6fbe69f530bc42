"""A plan: where the model is cut, who holds what, in which order it runs, and what that will take. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from stageflow.errors import InputError
from stageflow.plan import save
from stageflow.plan.bounds import Bound
from stageflow.plan.partition import Block, Device, Tie
from stageflow.plan.stages import PlannedStage, costs_of, footprint_of, plan_stages
from stageflow.plan.words import size_words, time_words
from stageflow.schedule import Costs, Schedule, Simulation
from stageflow.schedule.memory import Footprint, peak_memory


@dataclass(frozen=True)
class Advice:
    """One thing to change, and what it would bring.

    change: in words. step: seconds of a step then. gain: share of the time that a sample takes now which it saves.
    """

    change: str
    step: float
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {self.gain:.1%} less time per sample" if self.gain else self.change


@dataclass(frozen=True)
class Plan:
    """How a model is trained in stages; `make_plan` makes one.

    model: what it is for, in words.
    blocks: the measured pieces of the model for one micro-batch, in order.
    devices: one per worker.
    cuts: stage s has ``blocks[cuts[s]:cuts[s + 1]]``.
    recompute: per stage, whether it drops its activations after F and computes them again.
    schedule: who does what when; with it the placement and the number of micro-batches.
    bound: seconds below which no schedule of these stages on these devices can go, and why (`lower_bound`).
    samples: of the whole batch, 0 where not known.
    unit: of the times, where they are no seconds ("" for none); sizes are no bytes then either.
    ties: weights that several blocks use, by numbers of blocks.
    warnings: what speaks against a pipeline here. advice: what to change for more.

    ``print(plan)`` shows all of it as a table. Everything else follows from these: see the properties.
    """

    model: str
    blocks: tuple[Block, ...]
    devices: tuple[Device, ...]
    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]
    schedule: Schedule
    bound: Bound
    samples: int = 0
    unit: str | None = None
    ties: tuple[Tie, ...] = ()
    warnings: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule.n_stages != len(self.cuts) - 1:
            raise InputError(f"the schedule is for {self.schedule.n_stages} stages, the cuts {self.cuts} make others")
        if self.schedule.n_workers != len(self.devices):
            raise InputError(f"the schedule is for {self.schedule.n_workers} workers, not {len(self.devices)} devices")
        _ = self.stages  # refuse what does not fit now, not when somebody looks

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages with their blocks, device, times and bytes."""
        return plan_stages(self.blocks, self.cuts, self.placement, self.recompute, self.devices, self.ties)

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage."""
        return self.schedule.placement

    @property
    def microbatches(self) -> int:
        """Into how many parts a batch is cut."""
        return self.schedule.microbatches

    @property
    def boundaries(self) -> tuple[str, ...]:
        """Module paths at which stages 1, 2, ... start, as `split_model` takes them."""
        return tuple(self.blocks[cut].name for cut in self.cuts[1:-1])

    @cached_property
    def costs(self) -> Costs:
        """Times of all stages and links, as `Schedule.simulate` takes them."""
        return costs_of(self.stages, self.devices)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes of all stages, as `peak_memory` takes them."""
        return footprint_of(self.stages)

    @cached_property
    def simulation(self) -> Simulation:
        """The predicted step."""
        return self.schedule.simulate(self.costs)

    @property
    def step(self) -> float:
        """Predicted seconds of a step, from its first action to the end of its last; the optimizer comes on top."""
        return self.simulation.makespan

    @property
    def bubble(self) -> float:
        """Predicted share of the workers' time that is no work."""
        return self.simulation.bubble

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Predicted peak of bytes per worker: weights, gradients, optimizer state, activations."""
        return tuple(peak_memory(self.schedule, self.footprint))

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that this takes."""
        return all(peak <= device.memory for peak, device in zip(self.memory, self.devices, strict=True))

    @cached_property
    def stage_memory(self) -> tuple[float, ...]:
        """The peak of each stage for itself; peaks of the stages of one worker need not come at the same time."""
        kept = list(cast("Sequence[float]", self.footprint.static))
        peaks = list(kept)
        for order in self.schedule.orders:
            for action in order:
                during = kept[action.stage] + self.footprint.at_start(action)
                peaks[action.stage] = max(peaks[action.stage], during)
                kept[action.stage] = during + self.footprint.at_end(action)
        return tuple(peaks)

    @property
    def gap(self) -> float:
        """At most by which share any schedule of these stages on these devices could be faster: step / bound - 1."""
        return max(0.0, self.step / self.bound.seconds - 1) if self.bound.seconds > 0 else math.inf

    def time_words(self, seconds: float) -> str:
        """A time as this plan tells it: ``12.3 ms``."""
        return time_words(seconds, self.unit)

    def size_words(self, size: float) -> str:
        """A size as this plan tells it: ``12.3 MiB``."""
        return size_words(size, plain=self.unit is not None)

    def outlook(self) -> str:
        """What a step will take, and what is proved about all other schedules, in two lines."""
        from stageflow.plan.table import gap_line, step_line

        return f"{step_line(self)}\n{gap_line(self)}"

    def describe(self) -> str:
        """The whole plan as a table with what speaks against it and what to change for more."""
        from stageflow.plan.table import describe

        return describe(self)

    __str__ = describe

    def __repr__(self) -> str:
        return (
            f"<stageflow.Plan of {self.model}: {len(self.stages)} stages on {len(self.devices)} devices, "
            f"{self.microbatches} micro-batches, schedule {self.schedule.name!r}>"
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON, which `from_json` reads back exactly; written to ``path`` if given."""
        text = save.to_json(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read a plan from a file (a Path, or a string that is no JSON object) or from its text.

        Raises InputError for a file of another kind or version, or one that was damaged.
        """
        return save.from_json(source)

    def page(self, path: str | Path) -> None:
        """Write one HTML page that needs no network: timeline, memory of every device over time, balance."""
        from stageflow.plan.page import render_page

        Path(path).write_text(render_page(self), encoding="utf-8")

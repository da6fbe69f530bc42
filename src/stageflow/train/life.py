"""The life of a pipeline: its workers are started when they are first needed, and ended once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stageflow.errors import InputError, LaunchError, PipelineClosed
from stageflow.runtime.batch import MicroBatch
from stageflow.split import Split, split_model
from stageflow.train.arguments import Model, model_facts
from stageflow.train.blueprint import Blueprint
from stageflow.train.crew import Crew
from stageflow.train.planned import plan_for
from stageflow.train.start import Launch, start_crew

if TYPE_CHECKING:
    from stageflow.plan import Plan


class Life:
    """Not started, running, closed.

    launch: see `Pipeline`. example: makes the inputs to split with; None: the first batch's.
    splitting, planning, starting, setting_up: what the user chose for `split_model`, `plan_for`, `start_crew`,
        `Blueprint.worker_setups`.
    """

    def __init__(
        self,
        model: Model,
        launch: Launch,
        blueprint: Blueprint,
        example: Callable[[], MicroBatch] | None,
        *,
        splitting: Mapping[str, Any],
        planning: Mapping[str, Any],
        starting: Mapping[str, Any],
        setting_up: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._launch: Launch = launch
        self._blueprint = blueprint
        self._example = example
        self._splitting = splitting
        self._planning = planning
        self._starting = starting
        self._setting_up = setting_up
        self._crew: Crew | None = None
        self._inputs: MicroBatch | None = None  # of the first batch, to split with once more should workers be missing
        self._ended: str | None = None
        self.dismissed = False
        self._number = 0
        self._turn = threading.Lock()
        self._doing = ""

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Nobody else uses the pipeline meanwhile; what: the method, for the error.

        Who comes second is refused rather than made to wait: a loss function, run by a worker thread, that called its
        own pipeline would wait for ever. Raises InputError, and the call under way goes on.
        """
        if not self._turn.acquire(blocking=False):
            raise InputError(
                f"{what} while {self._doing} of the same pipeline runs, in another thread or further up in this one: "
                "a pipeline does one thing at a time. Hold a lock around its calls, or make a pipeline for each thread"
            )
        self._doing = what
        open_before = not self.dismissed
        try:
            yield
        except BaseException as error:
            if self.broken:
                first_line = str(error).partition("\n")[0]
                self.end(f"it ended after a failure in {what} ({type(error).__name__}: {first_line})")
            if open_before and self.dismissed and isinstance(error, Exception):
                raise PipelineClosed(f"the pipeline was closed, by another thread, while {what} ran") from error
            raise
        finally:
            self._turn.release()

    @property
    def started(self) -> bool:
        """Whether the model was split and the workers were started, even if they have ended since."""
        return self._crew is not None

    @property
    def closed(self) -> bool:
        return self._ended is not None

    @property
    def usable(self) -> bool:
        """Whether the next call can run."""
        return not self.closed and (self._crew is None or self._crew.usable)

    @property
    def broken(self) -> bool:
        """Whether there are workers, but they take no further call."""
        return self._crew is not None and not self._crew.usable

    def start(self, first: MicroBatch) -> None:
        """Split the model and start the workers, once. first: what to split with where there is no example."""
        self.start_from_example()
        if self._crew is None:
            self._crew = self._start(first)

    def start_from_example(self) -> None:
        """Start where an example was given; without one, the first batch will."""
        if self._crew is None and self._example is not None:
            self._crew = self._start(self._example())

    @torch.inference_mode(False)  # weights copied in inference mode, as for a first predict, could never be trained
    @torch.enable_grad()
    def _split(self, inputs: MicroBatch) -> Split:
        blueprint = self._blueprint
        example = inputs.copied_inputs()  # the model runs on them, and may write into them
        return split_model(self._model, example, stages=blueprint.stages, **{**self._splitting, **blueprint.cuts})

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _start(self, inputs: MicroBatch) -> Crew:
        blueprint = self._blueprint
        blueprint.show(inputs.args, inputs.kwargs)
        if self._launch == "torchrun":
            return self._join_ranks(inputs, lambda: self._split(inputs))
        if self._example is None:  # a copy: views would keep the whole batch in memory
            self._inputs = MicroBatch(*inputs.copied_inputs(), None)
        if blueprint.undecided:
            blueprint.decide(self._plan(inputs))
        blueprint.split = self._split(inputs)
        return start_crew(self._launch == "threads", blueprint.worker_setups(**self._setting_up), **self._starting)

    def _plan(self, inputs: MicroBatch) -> Plan:
        return plan_for(
            self._model, inputs, self._blueprint, self._splitting, self._planning, self._starting, self._setting_up
        )

    def _join_ranks(self, inputs: MicroBatch, split: Callable[[], Split]) -> Crew:
        from stageflow.train.ranks import RankCrew, Ranks  # torch.distributed only where it is used

        blueprint = self._blueprint
        schedule = blueprint.outline
        facts = model_facts(self._model) | {"stages": blueprint.stages, "schedule": str(schedule)}
        facts["microbatches"] = blueprint.microbatches
        ranks = Ranks(schedule.n_workers, self._starting["devices"], self._starting["timeout"], facts)
        try:
            if blueprint.undecided:
                from stageflow.plan import Plan

                # measured times differ from rank to rank: one decides for all
                plans = ranks.run(lambda: ranks.exchange(self._plan(inputs).to_json() if ranks.group.rank == 0 else ""))
                blueprint.decide(Plan.from_json(plans[0]))
            blueprint.split = ranks.share_split(split, blueprint.placement)
            return RankCrew(ranks, blueprint.worker_setups(**self._setting_up))
        except BaseException:
            ranks.close()
            raise

    def restart(self, *, fewest: int | None = None) -> None:
        """New workers in place of those that are, or were, with the weights of the start.

        fewest: None: as many, with the split there is. Else one less, or the next number that can be, down to this
        one, with a new split. Raises InputError under torchrun, where the ranks are started by torchrun; LaunchError.
        """
        if self._launch == "torchrun":
            raise InputError("ranks are started again by torchrun (see its --max-restarts), not by the pipeline")
        if self.dismissed:
            self.require_open()
        assert self._crew is not None
        self._crew.close()
        if fewest is not None:
            self._shrink(fewest)
        setups = self._blueprint.worker_setups(**self._setting_up)
        self._crew = start_crew(self._launch == "threads", setups, **self._starting)
        self._ended = None

    def _shrink(self, fewest: int) -> None:
        blueprint = self._blueprint
        reason = f"there are {blueprint.n_workers} workers, and fewer than {fewest} were not allowed"
        if self._splitting["boundaries"] is not None or isinstance(self._setting_up["options"].recompute, tuple):
            reason, fewest = "boundaries= or recompute= are for this number of stages only", blueprint.n_workers
        for workers in range(blueprint.n_workers - 1, fewest - 1, -1):
            try:
                blueprint.shrink(workers)
            except InputError as error:
                reason = str(error)
                continue
            inputs = self._inputs if self._example is None else self._example()
            assert inputs is not None
            blueprint.split = self._split(inputs)
            devices = self._starting["devices"]
            if not isinstance(devices, str):
                self._starting = {**self._starting, "devices": devices[:workers]}
            return
        raise LaunchError(f"the run can't go on with fewer workers: {reason}")

    def trace(self) -> str:
        """What every worker does now; for any thread, at any moment."""
        crew = self._crew
        return "no workers yet" if crew is None else crew.trace()

    def next_number(self) -> int:
        """The number of a call to the workers, which its messages bear."""
        self.require_open()
        self._number += 1
        return self._number

    def require_open(self) -> None:
        """Raise PipelineClosed, with the reason, once `end` was called."""
        if self._ended is not None:
            raise PipelineClosed(f"this pipeline can't be used any more: {self._ended}")

    def crew(self, what: str) -> Crew:
        """The workers, started if there is an example. what: what needs them, for the error.

        Raises PipelineClosed, or InputError where there is no example and no batch has come yet.
        """
        self.require_open()
        self.start_from_example()
        if self._crew is None:
            raise InputError(f"{what} needs a pipeline that was built: run a step first, or give example= inputs")
        return self._crew

    def split(self, what: str) -> Split:
        """How the model was cut; otherwise as `crew`."""
        self.crew(what)
        assert self._blueprint.split is not None
        return self._blueprint.split

    def end(self, reason: str, *, for_good: bool = False) -> None:
        """End all workers; may be called twice, and the first reason stays. for_good: nothing starts new ones."""
        self.dismissed = self.dismissed or for_good
        if self._ended is None:
            self._ended = reason
        if self._crew is not None:
            self._crew.close()

"""What a pipeline is made of: the split, the schedule for each number of micro-batches, each worker's setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError, ScheduleError, SplitError
from stageflow.graph import StageGraph
from stageflow.runtime.batch import TARGET
from stageflow.runtime.command import WorkerSetup
from stageflow.runtime.stage import StageOptions
from stageflow.schedule import SCHEDULES, Schedule, build_schedule
from stageflow.schedule.build import SIMULATED
from stageflow.schedule.families import FAMILIES
from stageflow.split import Split
from stageflow.train.planned import AUTO, recompute_of
from stageflow.transport.structure import flatten

if TYPE_CHECKING:
    import torch

    from stageflow.plan import Plan

MANY = 1024  # micro-batches
SHORT_SEARCH = 1.0  # seconds, for a batch that comes once in an epoch


class Blueprint:
    """Decides, before and after the model is split, who runs what.

    wanted: a schedule's name, a `Schedule`, or "auto": then `decide` has to tell before the model is split, and until
        then there is only the number of workers. plan: the one that all this is from, if any.
    """

    def __init__(
        self,
        stages: int,
        microbatches: int,
        wanted: str | Schedule,
        workers: int | None,
        plan: Plan | None = None,
        *,
        any_stages: bool = False,
    ) -> None:
        """any_stages: with "auto", whether the number of stages is to be decided as well.

        Raises InputError or ScheduleError for what can't be.
        """
        if isinstance(wanted, Schedule):
            if wanted.n_stages != stages:
                raise InputError(f"the schedule {wanted.name!r} is for {wanted.n_stages} stages, stages={stages}")
        elif wanted not in (AUTO, *SCHEDULES, *SIMULATED):
            raise InputError(f"unknown schedule {wanted!r}; known: {', '.join(SCHEDULES)}, {AUTO}")
        self.stages = stages
        self.microbatches = microbatches
        self._wanted = wanted
        self._workers = workers
        self.plan = plan
        self.undecided = wanted == AUTO
        self.any_stages = any_stages
        self._split: Split | None = None
        self._shown: frozenset[str] = frozenset()
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        # every further schedule, of a smaller batch or after the split, has to be for these same workers
        schedule = self.outline
        if schedule.refusal is not None:
            raise InputError(schedule.refusal)
        if not schedule.has_backward:  # a step would give a loss and learn nothing
            raise InputError(f"the schedule {schedule.name!r} has no backward, so it can't train")
        self._workers = schedule.n_workers

    @property
    def split(self) -> Split | None:
        """How the model was cut; None before it was."""
        return self._split

    @split.setter
    def split(self, split: Split) -> None:
        self._split = split
        self._schedules.clear()

    def decide(self, plan: Plan) -> None:
        """Take over the plan that "auto" came to, for these same workers and micro-batches."""
        self.plan = plan
        self.undecided = False
        self.stages = len(plan.stages)
        self._wanted = plan.schedule
        self._schedules.clear()

    def shrink(self, workers: int) -> None:
        """Be for so many workers, each with as many stages as before; the model has to be split again.

        Raises InputError where stages and workers were given by a plan or a `Schedule`, or the schedule can't be had
        on so many.
        """
        if self.plan is not None or isinstance(self._wanted, Schedule):
            raise InputError("a plan, or a schedule of one's own, is for its own number of workers only")
        before = self.stages, self._workers
        self.stages, self._workers = self.stages // self.n_workers * workers, workers
        self._schedules.clear()
        self._split, split = None, self._split
        try:
            schedule = self.schedule_for(min(self.microbatches, MANY))
            if schedule.n_workers != workers:
                raise InputError(f"{schedule.name!r} would have {schedule.n_workers} workers, not {workers}")
        except (InputError, ScheduleError) as error:
            self.stages, self._workers = before
            self._split = split
            self._schedules.clear()
            raise InputError(f"not on {workers} workers: {error}") from error

    @property
    def n_workers(self) -> int:
        """How many workers; known from the start."""
        assert self._workers is not None
        return self._workers

    @property
    def cuts(self) -> dict[str, Any]:
        """What the plan tells `split_model`."""
        return {} if self.plan is None else {"boundaries": self.plan.boundaries}

    def show(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Tell what the model is split with; it says who reads just those arguments that hold tensors there."""
        slots = {str(i): value for i, value in enumerate(args)} | {"=" + name: value for name, value in kwargs.items()}
        self._shown = frozenset(slot for slot, value in slots.items() if flatten(value)[0])

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage."""
        return self.outline.placement

    @property
    def outline(self) -> Schedule:
        """The schedule of a full batch, or of fewer micro-batches, for the same stages on the same workers.

        To make and prove one for very many takes long; that has time until a batch has shown that it gives so many.
        """
        named = not isinstance(self._wanted, Schedule)
        return self.schedule_for(min(self.microbatches, MANY) if named else self.microbatches)

    def schedule_for(self, microbatches: int, *, train: bool = True) -> Schedule:
        """The validated schedule of a batch of so many micro-batches."""
        key = (train, microbatches)
        if key not in self._schedules:
            schedule = self._training(microbatches) if train else self._forward_only(microbatches)
            schedule.validate()
            self._schedules[key] = schedule
        return self._schedules[key]

    def _training(self, microbatches: int) -> Schedule:
        wanted = self._wanted
        if not isinstance(wanted, Schedule):
            return self._named("1f1b" if wanted == AUTO else wanted, microbatches)
        if microbatches != wanted.microbatches:
            if self.plan is not None:
                return self._planned(self.plan, microbatches)
            raise InputError(
                f"the schedule {wanted.name!r} is made for {wanted.microbatches} micro-batches, this batch gives "
                f"{microbatches}: give batches of at least {wanted.microbatches} samples, or name a schedule"
            )
        if wanted.refusal is not None:
            raise InputError(wanted.refusal)
        return replace(wanted, graph=self._graph)

    def _planned(self, plan: Plan, microbatches: int) -> Schedule:
        """For a batch that gives fewer micro-batches than the plan has: stages, devices and memory stay the plan's."""
        from stageflow.plan.search import find_schedule

        found = find_schedule(
            stages=self.stages,
            microbatches=microbatches,
            costs=plan.costs,
            placement=plan.placement,
            footprint=plan.footprint,
            memory=[device.memory for device in plan.devices],
            seconds=SHORT_SEARCH,
        )
        return Schedule(plan.schedule.name, self._graph, plan.placement, microbatches, found.schedule.orders)

    def _named(self, name: str, microbatches: int) -> Schedule:
        """The named schedule, or for a batch that gives too few micro-batches for it one that takes any number.

        dualpipe_v has a minimum; zb_v goes the same V, and takes its place on a short last batch.
        """
        try:
            return self._build(name, microbatches)
        except InputError:
            if microbatches >= self.microbatches or FAMILIES[name].placement != "fold":
                raise
            return self._build("zb_v", microbatches)

    def _build(self, name: str, microbatches: int) -> Schedule:
        return build_schedule(
            name, stages=self.stages, microbatches=microbatches, workers=self._workers, graph=self._graph
        )

    def _forward_only(self, microbatches: int) -> Schedule:
        return build_schedule(
            "forward_only",
            stages=self.stages,
            microbatches=microbatches,
            placement=self.placement,
            graph=self._graph,
        )

    @property
    def _graph(self) -> StageGraph:
        return StageGraph.chain(self.stages) if self._split is None else self._split.graph

    def worker_setups(self, **shared: Any) -> list[WorkerSetup]:
        """One setup per worker; `shared`: what is the same in all."""
        split = self._split
        assert split is not None
        schedule = self.outline
        if split.way == "export":
            _check_captured(split, shared["dtype"])
        options: StageOptions = shared["options"]
        if self.plan is not None and options.recompute is None:
            shared["options"] = replace(options, recompute=recompute_of(self.plan))
        return [
            WorkerSetup(
                graph=split.graph,
                placement=schedule.placement,
                specs=tuple(split.specs[stage] for stage in schedule.stages_of(worker)),
                owners=split.owners,
                mirrors=split.mirrors,
                **shared,
            )
            for worker in range(schedule.n_workers)
        ]

    def wants(self, worker: int, name: str) -> bool:
        """Whether a worker may read the values of a tensor of the batch, by its flat name (see `Batch`).

        Of what the example did not show, in this place or under this name, nobody knows, so everybody gets it.
        """
        split = self._split
        assert split is not None
        slot = name.partition("/")[0]
        if slot == TARGET:
            return self.placement[split.graph.output_stage] == worker
        if slot not in self._shown:
            return True
        for stage, holder in enumerate(self.placement):
            used = split.inputs_used[stage]
            if holder == worker and (
                used is None or (int(slot) in used.args if slot.isdigit() else slot[1:] in used.kwargs)
            ):
                return True
        return False


def _check_captured(split: Split, dtype: torch.dtype | None) -> None:
    """Raises SplitError where a captured model is to have another dtype than it was captured with."""
    for name, info in split.tensors.items():
        if dtype not in (None, info.dtype) and info.dtype.is_floating_point:
            raise SplitError(
                f"dtype={dtype} with a model split by export, where {name!r} is {info.dtype}: a captured graph keeps "
                f"the dtypes it was captured with; convert the model first, model.to({dtype}), and give inputs to match"
            )

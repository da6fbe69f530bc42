"""The façade: a model trained in stages as if on one device."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from stageflow.errors import CheckpointError, InputError, PipelineError
from stageflow.runtime.batch import TARGET, Batch, MicroBatch, check_values, cut_batch
from stageflow.runtime.command import StepCommand
from stageflow.runtime.loss import LossFunction, takes_target
from stageflow.runtime.optimize import GroupOptions, OptimizerFactory, OptimizerOptions, SchedulerFactory
from stageflow.runtime.outputs import merge_outputs
from stageflow.runtime.stage import Recompute, StageOptions
from stageflow.runtime.state import StateKind
from stageflow.schedule import Schedule
from stageflow.split import Split
from stageflow.split.request import as_call
from stageflow.split.signature import has_argument, positional_names
from stageflow.train.arguments import (
    LONGEST_TIMEOUT,
    Model,
    check_functions,
    check_model,
    check_options,
    check_recompute,
    check_weights,
    count_microbatches,
    count_stages,
    not_importable,
)
from stageflow.train.blueprint import Blueprint
from stageflow.train.crew import StepResult
from stageflow.train.inspected import Inspected
from stageflow.train.life import Life
from stageflow.train.planned import check_plan, follow
from stageflow.train.reduction import Reduction, check_reduction, loss_weights
from stageflow.train.report import StepView
from stageflow.train.start import Launch, choose_launch
from stageflow.train.state import check_state, parts_for, whole_state
from stageflow.train.storage import PLACE, Storage
from stageflow.whole import as_whole

if TYPE_CHECKING:
    from stageflow.checkpoint import Checkpoint
    from stageflow.plan import Plan
    from stageflow.train.callbacks import Callback, FitReport, Run
    from stageflow.train.feed import Feed, Source

log = logging.getLogger("stageflow")

Mode = Literal["train", "evaluate", "predict"]


class Pipeline(Inspected):
    """Trains a model in stages, with the numbers that one device would give.

        with Pipeline(model, stages=4, microbatches=16, loss=loss_fn, optimizer=partial(AdamW, lr=3e-4)) as pipe:
            for x, y in loader:
                loss = pipe.train_step(x, target=y)

    model: any nn.Module (not changed), a list of modules, or a function that builds one (then no process ever holds
        more than its own stages).
    stages: how many. workers: how many workers they are spread over; default as suits the schedule.
    microbatches: into how many parts a batch is cut. A batch with fewer samples gives fewer.
    schedule: a name (see `stageflow.SCHEDULES`; default "1f1b"), a `Schedule`, or "auto".
    loss: ``loss(output, target)``; None: the model's own (``output.loss``). See `reduction`.
    reduction: how micro-batch losses make the batch's: "mean" (weighted by samples), "sum", or a function that gives a
        micro-batch's weight from its target (from the model's keyword arguments where there is no target).
    optimizer: makes an optimizer from parameters; called once per stage. None: gradients only.
    lr_scheduler: makes a learning-rate scheduler for an optimizer; stepped after every update.
    parameter_groups: ``(name, parameter) -> options`` such as ``{"weight_decay": 0.0}``, by original name.
    max_grad_norm: clip gradients to this norm over all stages.
    plan: a `Plan`, which decides stages, workers, microbatches, schedule, boundaries and recompute.
    split, balance, boundaries: see `split_model`.
    example: inputs, in a batch's size, to split with before the first batch comes: a tuple of arguments, a dict of
        keyword arguments, a pair of both, or one tensor; default the first batch.
    batch_dims: argument name -> dimension along which its tensors are cut (None: not cut); default see `train_step`.
    recompute: "stage" (or True) drops a stage's activations after its forward and computes them again in its backward;
        "layer" does so one layer at a time; False keeps them; a list has one of these per stage.
    check_finite: stop at the first NaN or infinity and name its stage and micro-batch.
    launch: "processes" (of this machine), "threads" (in this process), "torchrun" (every rank runs this script);
        None: "torchrun" under torchrun, else "processes".
    device: "cpu", "cuda" (worker r gets device r), or one name for each worker.
    weights: with a function for a model: a safetensors file, or a folder of them such as a Hugging Face model's, from
        which each worker loads its own stages' weights.
    dtype: of parameters and buffers; None: as they are.
    autocast: dtype for `torch.autocast`, None for none.
    seed: of all random draws, which depend on (seed, step, micro-batch, layer) and nothing else.
    threads: intra-op threads per worker process.
    timeout: seconds without any progress after which the workers count as hung.

    steps: train_steps so far.

    Raises InputError for arguments that can't be, before any work.
    """

    def __init__(
        self,
        model: Model,
        stages: int | Literal["auto"] = "auto",
        microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        loss: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        plan: Plan | None = None,
        workers: int | None = None,
        reduction: Reduction = "mean",
        lr_scheduler: SchedulerFactory | None = None,
        parameter_groups: GroupOptions | None = None,
        max_grad_norm: float | None = None,
        split: Literal["auto", "sequence", "blocks", "export"] = "auto",
        balance: Literal["time", "parameters"] = "time",
        boundaries: Sequence[str] | None = None,
        example: Any = None,
        batch_dims: Mapping[str, int | None] | None = None,
        recompute: bool | Recompute | Sequence[bool | Recompute | None] | None = None,
        check_finite: bool = False,
        launch: Launch | None = None,
        device: str | Sequence[str] = "cpu",
        weights: str | Path | None = None,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        threads: int = 1,
        timeout: float = 300.0,
    ) -> None:
        self.launch: Launch = choose_launch(launch)
        self._model = check_model(model)
        weights = check_weights(weights, model)
        check_reduction(reduction)
        check_functions(loss=loss, optimizer=optimizer, lr_scheduler=lr_scheduler, parameter_groups=parameter_groups)
        check_options(
            workers=workers,
            max_grad_norm=max_grad_norm,
            batch_dims=batch_dims,
            device=device,
            dtype=dtype,
            autocast=autocast,
            seed=seed,
            threads=threads,
            timeout=timeout,
        )
        timeout = min(timeout, LONGEST_TIMEOUT)
        workers = as_whole(workers)
        seed, threads = int(seed), int(threads)  # what travels between processes is Python's own
        given = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "workers": workers}
        given |= {"boundaries": boundaries, "balance": balance, "recompute": recompute}
        wanted = follow(check_plan(plan), given)
        count = count_stages(wanted["stages"], wanted["schedule"], device, wanted["workers"])
        self.microbatches = count_microbatches(wanted["microbatches"], count, wanted["schedule"])
        self._blueprint = Blueprint(
            count, self.microbatches, wanted["schedule"], wanted["workers"], plan, any_stages=stages == "auto"
        )
        self._reduction: Reduction = reduction
        self._example = None if example is None else as_call(example)
        self._batch_dims = {name: as_whole(dim) for name, dim in (batch_dims or {}).items()}
        self._positional = positional_names(model)
        # a model with an argument of that name gets it, unless the loss function can't do without
        self._model_takes_target = has_argument(model, TARGET) and (loss is None or not takes_target(loss))
        self._dtype = dtype
        self._seed = seed
        self._optimizes = optimizer is not None
        self._recompute = check_recompute(wanted["recompute"], count)
        self._life = Life(
            self._model,
            self.launch,
            self._blueprint,
            None if example is None else self._cut_example,
            splitting={"split": split, "balance": balance, "boundaries": wanted["boundaries"], "weights": weights},
            planning={"batch_dims": self._batch_dims, "recompute": wanted["recompute"]},
            starting={"devices": device, "threads": threads, "timeout": timeout},
            setting_up={
                "options": StageOptions(loss, self._recompute, check_finite, autocast),
                "optimizer": OptimizerOptions(optimizer, lr_scheduler, parameter_groups, max_grad_norm),
                "seed": seed,
                "device": "cpu",
                "dtype": dtype,
                # a driver sees sooner than its workers that nothing moves, and knows more
                "timeout": timeout if self.launch == "torchrun" else timeout * 4 + 60,
            },
        )
        self._storage = Storage(self._life, self._model, dtype, seed, self._optimizes)
        self._known_to_workers: set[str] = set()
        self.steps = 0
        self._fresh = True
        self._mode: bool | None = None
        self._last: StepView | None = None
        self._memory: list[dict[str, int]] | None = None
        self._feed: Feed | None = None  # of the last fit: the next one goes on from its place
        self._loaded_place: Sequence[int] | None = None

    # --------------------------------------------------------------------------------------------------- steps

    def train_step(self, *args: Any, target: Any = None, update: bool = True, **kwargs: Any) -> Tensor:
        """Forward, backward and, with `update`, one optimizer step on one batch; returns its loss.

        args, kwargs: the model's own inputs. Tensors whose first dimension is the batch size (that of the first tensor)
            are cut into micro-batches; everything else reaches every micro-batch whole. `batch_dims` overrides by name.
        target: for the loss function; for the model, where that has an argument of this name and the loss takes none.
        update: False only adds to the gradients.

        The loss is a float32 tensor without dimensions. Raises InputError for a bad batch, before any work; StageFailed
        with the original exception as ``__cause__`` when the model, the loss or the optimizer raises; WorkerDied;
        WorkerHung. Afterwards `usable` tells whether the pipeline can go on.
        """
        with self._life.alone("train_step()"):
            command, batch = self._prepare("train", args, kwargs, target, update)
            loss = self._run(command, batch).loss
            self._fresh = update
            self.steps += 1
        return torch.tensor(loss)

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The loss of a batch in eval mode, without gradients; arguments as in `train_step`."""
        with self._life.alone("evaluate()"):
            command, batch = self._prepare("evaluate", args, kwargs, target)
            return torch.tensor(self._run(command, batch).loss)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for a batch, whole, in eval mode, without gradients; arguments as in `train_step`.

        Outputs of micro-batches are joined along their first dimension, or along another that `batch_dims` names:
        where they have the size of the micro-batch. Else a floating-point scalar is the mean weighted by samples, what
        is the same in all stays as it is, and tensors with several rows per sample, where all inputs are cut along
        their first dimension, are joined along it. Raises InputError for what can't be put together.
        """
        with self._life.alone("predict()"):
            command, batch = self._prepare("predict", args, kwargs, None)
            outputs = self._run(command, batch).outputs
        return merge_outputs(outputs, batch.layout.sizes, set(batch.layout.cut.values()))

    __call__ = predict

    def train(self, mode: bool = True) -> Pipeline:
        """Put all modules into training mode. A new pipeline keeps the modes that the model had."""
        with self._life.alone("train()"):
            self._life.crew("train()").ask("set_training", mode)
            self._mode = mode
        return self

    def eval(self) -> Pipeline:
        """Put all modules into evaluation mode, for `train_step` too; `evaluate` and `predict` always use it."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget gradients that ``train_step(update=False)`` has added up."""
        with self._life.alone("zero_grad()"):
            self._fresh = True
            if self._life.started:
                self._life.crew("zero_grad()").ask("zero_gradients")

    # ---------------------------------------------------------------------------------------------------- a run

    def fit(
        self,
        loader: Source,
        steps: int | None = None,
        *,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        max_restarts: int = 10,
        min_workers: int | None = None,
        callbacks: Sequence[Callback | Callable[[Run], Any]] = (),
    ) -> FitReport:
        """Train on what a loader gives; after a failure of workers, go on from the last checkpoint as if it never was.

        loader: a DataLoader or anything else that can be iterated again and again, an iterator (batches since the last
            checkpoint are kept then), or a function from a batch's number to the batch. A batch is a dict of the
            model's keyword arguments, (input, target), or the one input. What a loader draws depends on (`seed`,
            epoch), not on what was drawn before. A later call goes on in the data where this one stopped, with another
            loader at the start of the next epoch.
        steps: how many there shall be in all, those of a resumed run and of earlier calls counted; None: one epoch,
            or the rest of the one that an earlier call began.
        checkpoint: a folder for checkpoints. If it holds some of an earlier run, the newest good one is taken and the
            run goes on from there, at its place in the data. None: no checkpoints, so a failure ends the run.
        checkpoint_every: steps between two, written in the background; None: only one before and one after the run.
        keep: how many checkpoints stay.
        max_restarts: from how many failures the run goes on. An exception that comes again at the same step ends it.
        min_workers: when new workers can't be started twice in a row, go on with one less, by a new split, down to so
            many. None: always with as many. Not with a plan, a `Schedule` of your own, `boundaries` or a list for
            `recompute`, which are for their number of stages.
        callbacks: `Callback` objects, or functions of a `Run` that are called after every step.

        What happens is logged to ``logging.getLogger("stageflow")``, and is in the report. Raises what ends the run:
        InputError, CheckpointError, what callbacks and loader raise, or the failure from which it can't go on, with a
        note that says why. Under torchrun a failure always ends the ranks: torchrun starts them again, and they resume.
        """
        from stageflow.train.fit import Fit

        return Fit(
            self,
            loader,
            seed=self._seed,
            steps=steps,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            max_restarts=max_restarts,
            min_workers=min_workers,
            callbacks=callbacks,
        ).run()

    def _build_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Split the model and start the workers, as the first `train_step` would with this batch."""
        with self._life.alone("fit()"):
            inputs = {name: value for name, value in kwargs.items() if name != TARGET}
            self._prepare("train", args, inputs, kwargs.get(TARGET))

    def _replace_workers(self, fewest: int | None) -> int:
        """New workers with the weights of the start; `_adopt` has to follow. fewest: see `Life.restart`.

        Returns how many there are.
        """
        with self._life.alone("fit()"):
            if self._life.usable:
                try:
                    self._storage.settle()
                except CheckpointError as error:
                    log.warning("%s", error)
            else:
                self._storage.give_up()
            self._known_to_workers.clear()
            self._memory = None
            self._life.restart(fewest=fewest)
            if self._mode is not None:
                self._life.crew("fit()").ask("set_training", self._mode)
            return self._life.crew("fit()").n_workers

    def _agree(self, function: Callable[[], str]) -> str:
        """What a function gives; under torchrun, on the first rank for all."""
        with self._life.alone("fit()"):
            return self._life.crew("fit()").agree(function)

    def _prepare(
        self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, update: bool = True
    ) -> tuple[StepCommand, Batch]:
        self._life.require_open()
        if target is not None and self._model_takes_target:
            kwargs, target = {**kwargs, TARGET: target}, None
        dims = self._batch_dims
        if mode == "predict" and TARGET not in kwargs:  # it may well be named for the other steps
            dims = {name: dim for name, dim in dims.items() if name != TARGET}
        batch = cut_batch(args, kwargs, target, self.microbatches, dims, self._positional)
        check_values(batch.tensors)
        sizes = batch.layout.sizes
        if len(sizes) < self.microbatches:
            warnings.warn(
                f"a batch of {sum(sizes)} samples gives {len(sizes)} micro-batches, not {self.microbatches}",
                stacklevel=3,
            )
        weights = loss_weights(self._reduction, batch)
        if not self._life.started:
            self._life.start(batch.microbatch(0))
        command = StepCommand(
            number=self._life.next_number(),
            step=self.steps,
            mode=mode,
            weights=weights,
            schedule=f"{'train' if mode == 'train' else 'forward'}-{len(sizes)}",
            actions=None,
            fresh=self._fresh,
            update=update,
            memory=mode == "train" and self._memory is None and (update or not self._optimizes),
            classes=not_importable(batch.classes),
        )
        return command, batch

    def _run(self, command: StepCommand, batch: Batch) -> StepResult:
        crew = self._life.crew("a step")
        schedule = self._blueprint.schedule_for(len(command.weights), train=command.mode == "train")
        orders = None if command.schedule in self._known_to_workers else schedule.orders
        try:
            result = crew.step(command, orders, batch, self._blueprint.wants)
        except BaseException as error:
            self._after_failure(error, command)
            raise
        self._known_to_workers.add(command.schedule)
        if command.mode == "train":
            self._last = StepView(schedule, result.reports)
        if command.memory:
            self._memory = [report.memory for report in result.reports if report.memory is not None]
        return result

    def _after_failure(self, error: BaseException, command: StepCommand) -> None:
        self._known_to_workers.clear()
        if command.mode == "train":
            self._fresh = True
        if command.update and getattr(error, "action", None) == "update":
            self._life.end("the optimizer failed, so some stages may be updated and others not: load a saved state")

    def _cut_example(self) -> MicroBatch:
        """The first micro-batch of the example."""
        assert self._example is not None
        args, kwargs = self._example
        known = {*kwargs, *self._positional[: len(args)], *map(str, range(len(args)))}
        dims = {name: dim for name, dim in self._batch_dims.items() if name in known}
        return cut_batch(args, kwargs, None, self.microbatches, dims, self._positional).microbatch(0)

    # -------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers on the CPU, under the model's own names, tied ones under each."""
        return whole_state(*self._gather("state_dict()", "weights"))

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients of the last train_step (after clipping), by the model's own names; None where there is none."""
        split, tensors = self._gather("gradients()", "gradients")
        return {name: tensors.get(name) for name in split.owners if split.tensors[name].kind == "parameter"}

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, also those that are not persistent, by the model's own names."""
        split, tensors = self._gather("buffers()", "weights")
        return {name: tensors[name] for name in split.owners if split.tensors[name].kind == "buffer"}

    def parameters_of(self, stage: int) -> dict[str, Tensor]:
        """The parameters that a stage owns, by the model's own names."""
        if stage not in range(self.stages):
            raise InputError(f"there is no stage {stage!r}: this pipeline has stages 0..{self.stages - 1}")
        split, tensors = self._gather("parameters_of()", "weights")
        return {name: tensors[name] for name in split.parameter_names(stage)}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take over parameters and buffers by the model's own names; checked whole before anything is changed.

        strict: every persistent name must be there and no other. Raises InputError.
        """
        with self._life.alone("load_state_dict()"):
            split = self._life.split("load_state_dict()")
            parts = parts_for(split, self._blueprint.placement, check_state(split, state, strict))
            self._life.crew("load_state_dict()").load(self._life.next_number(), parts)

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        background: bool = False,
    ) -> Path:
        """Save weights, optimizers, learning-rate schedulers and the step, whole or not at all; returns where.

        The directory holds safetensors under the model's own names; `load` takes it into any number of stages, and
        `stageflow.load_weights` or transformers' ``from_pretrained`` into the plain model. An older save there is
        replaced in one step.

        extra: plain JSON values to find again: `load` returns them.
        keep: the directory is a folder of checkpoints: this one goes into ``step-00000100`` in it, for the steps so
            far, and older ones are removed until there are so many.
        background: return once the workers have copied what they hold (which takes as much memory again until it is
            written). If it fails, the next `save` or `load`, `finish_saving` or `close` raises.

        Raises CheckpointError.
        """
        with self._life.alone("save()"):
            return self._storage.save(directory, self.steps, extra or {}, keep, background)

    def finish_saving(self) -> None:
        """Wait until a save in the background is complete. Raises CheckpointError if it failed."""
        with self._life.alone("finish_saving()"):
            self._storage.settle()

    def load(self, directory: str | Path) -> Mapping[str, Any]:
        """Take over what `save` wrote, by however many stages; of other safetensors directories the weights.

        directory: or a folder of checkpoints (see ``save(keep=)``), of which the newest good one is taken; the log,
        `logging.getLogger("stageflow")`, says which and what is wrong with newer ones.

        Everything is checked before anything is changed. Returns what was saved as `extra`. Raises CheckpointError.
        """
        with self._life.alone("load()"):
            checkpoint = self._storage.load(directory)
            self._take_step(checkpoint)
            self._loaded_place = checkpoint.extra.get(PLACE)
            return checkpoint.extra

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """As `load`, of a checkpoint whose files are known to be good."""
        with self._life.alone("fit()"):
            self._storage.adopt(checkpoint)
            self._take_step(checkpoint)

    def _take_step(self, checkpoint: Checkpoint) -> None:
        self._fresh = True
        if checkpoint.manifest is not None:
            self.steps = checkpoint.step

    def _gather(self, what: str, kind: StateKind) -> tuple[Split, dict[str, Tensor]]:
        with self._life.alone(what):
            split = self._life.split(what)
            tensors, _ = self._life.crew(what).state(self._life.next_number(), kind)
        return split, tensors

    # ----------------------------------------------------------------------------------------------------- end

    def memory(self) -> list[dict[str, int]]:
        """Bytes that each worker holds now: "parameters", "gradients", "optimizer"."""
        with self._life.alone("memory()"):
            return self._life.crew("memory()").ask("memory")

    @property
    def worker_processes(self) -> list[int]:
        """The process id of each worker; of threads, and under torchrun, only this process's own, once."""
        with self._life.alone("worker_processes"):
            return self._life.crew("worker_processes").processes

    @property
    def usable(self) -> bool:
        """Whether the next step can run."""
        return self._life.usable

    def close(self) -> None:
        """End all workers; may be called twice. Raises CheckpointError where a save in the background had failed."""
        try:
            if self._life.usable and not self._leaves_others():
                self._storage.settle()
            else:
                self._storage.give_up()
        finally:
            self._feed = None
            self._life.end("it was closed", for_good=True)

    def _leaves_others(self) -> bool:
        """Whether an exception of this rank alone ends its part: the others may be in a step, and wait for it there."""
        error = sys.exception()
        return self.launch == "torchrun" and error is not None and not isinstance(error, PipelineError)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a pipeline holds workers and can be neither copied nor pickled: make another one from the same model and "
            "give it state_dict(), or save() and load()"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

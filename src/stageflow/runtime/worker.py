"""What one worker serves to whoever drives it: it builds its stages, runs steps, updates, gives and takes state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stageflow.errors import InputError, PipelineError
from stageflow.graph import Bundle, StageBuilder, StageGraph
from stageflow.observe.events import Event
from stageflow.observe.recorder import Recorder
from stageflow.runtime.batch import Batch
from stageflow.runtime.executor import Board, Executor, Order, Step
from stageflow.runtime.optimize import OptimizerOptions, StageOptimizer, agree, clip, squared_norm
from stageflow.runtime.random import Generators, Turns
from stageflow.runtime.shared import SharedWeights
from stageflow.runtime.stage import Stage, StageOptions
from stageflow.schedule.actions import Action
from stageflow.transport.base import Endpoint, Interrupt, Tag
from stageflow.transport.structure import flatten

StateKind = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True)
class WorkerPlan:
    """All that a worker is told at its start.

    specs: of its own stages. placement: the worker of each stage. owners, mirrors: as in `Split`.
    timeout: seconds that a message from another worker may take.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    specs: tuple[StageBuilder, ...]
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

    number: of the call, in its messages. key: of the training step, for random draws.
    mode: "train", "evaluate" (loss), "predict" (output).
    actions: this worker's order; None: the one it was given before under `schedule`.
    fresh: drop gradients of earlier steps. update: let the optimizers step.
    classes: of the batch, those that can't be imported.
    """

    number: int
    key: int
    mode: Literal["train", "evaluate", "predict"]
    weights: tuple[float, ...]
    schedule: str
    actions: tuple[Action, ...] | None
    fresh: bool = True
    update: bool = True
    classes: Mapping[str, type] = field(default_factory=dict)


@dataclass
class StepReport:
    """What a worker says after a step.

    loss: of the whole batch, from the worker of the output stage. grad_norm: before clipping, over all stages.
    peak_in_flight: most micro-batches kept at once, over the worker's stages.
    outputs: flat outputs when predicting without an endpoint; classes: of outputs, for `unflatten`.
    """

    loss: float | None = None
    grad_norm: float | None = None
    peak_in_flight: int = 0
    learning_rates: list[float] = field(default_factory=list)
    outputs: dict[int, tuple[dict[str, Tensor], Any]] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)


class Worker:
    """The stages of one worker. Used by one thread."""

    def __init__(
        self,
        plan: WorkerPlan,
        rank: int,
        endpoint: Endpoint | None,
        interrupt: Interrupt,
        board: Board,
        turns: Turns | None = None,
    ) -> None:
        """endpoint: None for a worker that is alone and gets its batches handed. turns: see `Stage`."""
        self._plan = plan
        self._rank = rank
        self._endpoint = endpoint
        self._device = torch.device(plan.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._generators = Generators(self._device)
        programs = {}
        for spec in plan.specs:
            board.set(f"building stage {spec.index}")
            programs[spec.index] = spec.build(self._device)
            if plan.dtype is not None:
                programs[spec.index].module.to(plan.dtype)
        self._programs = programs
        self._stages = {
            index: Stage(program, plan.graph, self._device, plan.options, self._generators, turns)
            for index, program in programs.items()
        }
        self._shared = SharedWeights(programs, plan.owners, plan.mirrors, plan.placement, rank)
        self._owned = {
            index: {name: p for name, p in program.parameters.items() if plan.owners[name] == index}
            for index, program in programs.items()
        }
        self._trained = [p for owned in self._owned.values() for p in owned.values() if p.requires_grad]
        self._optimizers = self._make_optimizers()
        self._recorder = Recorder(rank)
        self._orders: dict[str, Order] = {}
        self._executor = Executor(
            self._stages,
            plan.graph,
            plan.placement,
            endpoint,
            interrupt,
            board,
            self._recorder,
            plan.timeout,
            self._device,
        )
        self._board = board
        self._events: list[Event] = []

    def _make_optimizers(self) -> dict[int, StageOptimizer]:
        if self._plan.optimizer.optimizer is None:
            return {}
        optimizers = {}
        for index, owned in self._owned.items():
            trained = {name: p for name, p in owned.items() if p.requires_grad}
            if trained:
                optimizers[index] = StageOptimizer(trained, self._plan.optimizer)
        return optimizers

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def n_workers(self) -> int:
        """How many workers the pipeline has."""
        return self._plan.n_workers

    @property
    def optimizes(self) -> bool:
        """Whether the pipeline has optimizers (this worker may still have nothing to train)."""
        return self._plan.optimizer.optimizer is not None

    @property
    def optimizers(self) -> list[StageOptimizer]:
        """Of the stages here that have something to train."""
        return list(self._optimizers.values())

    @property
    def held(self) -> set[str]:
        """Names of all parameters and buffers here, owned or not."""
        return {name for program in self._programs.values() for name in (*program.parameters, *program.buffers)}

    # --------------------------------------------------------------------------------------------------- steps

    def step(self, command: StepCommand, batch: Batch | None = None) -> StepReport:
        """Run one step.

        batch: the whole batch; None: it comes through the endpoint, with tag kind "in".
        """
        if command.actions is not None:
            self._orders[command.schedule] = Order.of(command.actions)
            if self._orders[command.schedule].splits:
                for stage in self._stages.values():
                    stage.prepare_split_backward()
        if self._endpoint is not None:
            self._endpoint.forget(command.number)
        if batch is None:
            batch = self._receive_batch(command)
        train = command.mode == "train"
        if train and command.fresh:
            self.zero_gradients()
        self._recorder.drain()
        try:
            report = self._train(command, batch) if train else self._forward_only(command, batch)
        except BaseException:
            self._executor.reset()
            raise
        finally:
            self._events = self._recorder.drain()
        return report

    def _receive_batch(self, command: StepCommand) -> Batch:
        assert self._endpoint is not None
        self._board.set("receiving the batch", "the driver")
        bundle = self._endpoint.recv(Tag(command.number, "in", -1, self._rank, 0), self._plan.timeout)
        return Batch.from_bundle(bundle, self._device, dict(command.classes))

    def _train(self, command: StepCommand, batch: Batch) -> StepReport:
        plan = self._plan
        step = Step(command.number, (plan.seed, command.key), True, batch, command.weights)
        outcome = self._executor.run(self._orders[command.schedule], step, None)
        report = StepReport(peak_in_flight=outcome.peak_in_flight)
        if outcome.losses:
            report.loss = self._weighted(outcome.losses, command.weights)
        if self._shared:
            self._board.set("adding up gradients of shared weights")
            self._shared.collect_gradients(self._endpoint, command.number, plan.timeout)
        if plan.options.check_finite:
            self._board.set("looking for NaN in gradients")
            self._check_gradients()
        if command.update and plan.optimizer.optimizer is not None:
            self._update(command.number, report)
        return report

    def _check_gradients(self) -> None:
        """Before anybody updates, so that all stages skip an overflow in one of them."""
        for stage, owned in self._owned.items():
            for name, parameter in owned.items():
                if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                    raise PipelineError(
                        f"stage {stage}: the gradient of {name!r} holds NaN or infinity (check_finite=True); no stage "
                        "has updated",
                        stage=stage,
                    )

    def _update(self, number: int, report: StepReport) -> None:
        plan = self._plan
        start = self._recorder.clock()
        self._board.set("update", "all workers to finish their backward")
        limit = plan.optimizer.max_grad_norm
        square = squared_norm(self._trained) if limit is not None else 0.0
        # nobody updates before all are through: a failure up to here leaves every weight as it was
        square = agree(self._endpoint, plan.n_workers, number, square, plan.timeout)
        self._board.set("update")
        if limit is not None:
            norm = report.grad_norm = square**0.5
            clip(self._trained, norm, limit)
        for optimizer in self._optimizers.values():
            optimizer.step()
            report.learning_rates += optimizer.learning_rates
        if self._shared:
            self._shared.spread_values(self._endpoint, number, plan.timeout)
        self._recorder.record(-1, "update", -1, start, self._recorder.clock())

    def _forward_only(self, command: StepCommand, batch: Batch) -> StepReport:
        report = StepReport()
        losses: dict[int, Tensor] = {}

        def on_output(microbatch: int, output: Any, target: Any) -> None:
            if command.mode == "evaluate":
                stage = self._stages[self._plan.graph.output_stage]
                losses[microbatch] = stage.loss_of(output, target)
                return
            flat = flatten(output, report.classes, where="output")
            if self._endpoint is None or self._endpoint.size == self._plan.n_workers:
                report.outputs[microbatch] = flat
            else:
                tag = Tag(command.number, "out", self._plan.graph.output_stage, -1, microbatch)
                self._endpoint.send(self._plan.n_workers, tag, Bundle(*flat))

        step = Step(command.number, (self._plan.seed, command.key), False, batch, command.weights)
        with self._evaluating():
            self._executor.run(self._orders[command.schedule], step, on_output)
        if losses:
            report.loss = self._weighted(losses, command.weights)
        return report

    def _evaluating(self) -> AbstractContextManager[Any]:
        return _EvalMode([program.module for program in self._programs.values()])

    @staticmethod
    def _weighted(losses: Mapping[int, Tensor], weights: Sequence[float]) -> float:
        return sum(weights[i] * float(losses[i]) for i in sorted(losses) if weights[i] != 0.0)

    # --------------------------------------------------------------------------------------------------- state

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for program in self._programs.values():
            for parameter in program.parameters.values():
                parameter.grad = None

    def set_training(self, mode: bool) -> None:
        """`train` or `eval` for all modules here."""
        for program in self._programs.values():
            program.module.train(mode)

    def state(self, kind: StateKind) -> tuple[dict[str, Tensor], Any]:
        """(tensors, plain rest) of what this worker owns.

        "weights": parameters and buffers. "gradients": those there are. "optimizer": see `StageOptimizer.state`.
        """
        if kind == "optimizer":
            tensors: dict[str, Tensor] = {}
            rest = {}
            for index, optimizer in self._optimizers.items():
                own, rest[str(index)] = optimizer.state()
                tensors.update(own)
            return tensors, rest
        if kind == "gradients":
            named = [item for owned in self._owned.values() for item in owned.items()]
            return {name: p.grad for name, p in named if p.grad is not None}, None
        weights: dict[str, Tensor] = {}
        for index, program in self._programs.items():
            weights.update({name: p.detach() for name, p in self._owned[index].items()})
            weights.update({n: b.detach() for n, b in program.buffers.items() if self._plan.owners[n] == index})
        return weights, None

    def send_state(self, number: int, kind: StateKind) -> Any:
        """Send `state` to the driver, with tag kind "state"; returns the plain rest."""
        assert self._endpoint is not None
        tensors, rest = self.state(kind)
        self._endpoint.send(self._plan.n_workers, Tag(number, "state", self._rank, -1, 0), Bundle(tensors))
        self._endpoint.flush(self._plan.timeout)
        return rest

    def load_weights(self, number: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Copy values into the parameters and buffers here, owned or not; None: they come with tag kind "load"."""
        if tensors is None:
            assert self._endpoint is not None
            tensors = self._endpoint.recv(Tag(number, "load", -1, self._rank, 0), self._plan.timeout).tensors
        with torch.no_grad():
            for program in self._programs.values():
                for name, target in [*program.parameters.items(), *program.buffers.items()]:
                    value = tensors.get(name)
                    if value is not None:
                        if value.shape != target.shape:
                            raise InputError(f"{name!r} has shape {tuple(target.shape)}, given {tuple(value.shape)}")
                        target.copy_(value)

    def events(self) -> list[Event]:
        """What happened here in the last step."""
        return self._events

    def memory(self) -> dict[str, int]:
        """Bytes held here: parameters, gradients, optimizer state."""
        own = {id(p): p for program in self._programs.values() for p in program.parameters.values()}
        optimizer = [t for each in self._optimizers.values() for t in each.state()[0].values()]
        return {
            "parameters": sum(p.nbytes for p in own.values()),
            "gradients": sum(p.grad.nbytes for p in own.values() if p.grad is not None),
            "optimizer": sum(t.nbytes for t in optimizer),
        }


class _EvalMode:
    """Puts modules into eval mode and gives every one its own flag back afterwards."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._flags = [(module, module.training) for root in modules for module in root.modules()]
        self._roots = modules

    def __enter__(self) -> None:
        for root in self._roots:
            root.eval()

    def __exit__(self, *_: object) -> None:
        for module, flag in self._flags:
            module.training = flag

"""What one worker serves to whoever drives it: it builds its stages, runs steps, updates, gives and takes state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import PipelineError
from stageflow.graph import Bundle
from stageflow.observe.events import Event
from stageflow.observe.recorder import Recorder
from stageflow.runtime.batch import Batch
from stageflow.runtime.command import StepCommand, StepReport, WorkerSetup
from stageflow.runtime.executor import Board, Executor, Order, Step
from stageflow.runtime.optimize import agree, clip, entries, squared_norm
from stageflow.runtime.random import Generators, Turns
from stageflow.runtime.shared import SharedWeights
from stageflow.runtime.stage import Stage
from stageflow.runtime.state import StateKind, WorkerState
from stageflow.transport.base import Endpoint, Interrupt, Tag
from stageflow.transport.structure import flatten


class Worker:
    """The stages of one worker. Used by one thread."""

    def __init__(
        self,
        setup: WorkerSetup,
        rank: int,
        endpoint: Endpoint | None,
        interrupt: Interrupt,
        board: Board,
        turns: Turns | None = None,
    ) -> None:
        """endpoint: None for a worker that is alone and gets its batches handed. turns: see `Stage`."""
        self._setup = setup
        self._rank = rank
        self._endpoint = endpoint
        self._device = torch.device(setup.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._generators = Generators(self._device)
        programs = {}
        for spec in setup.specs:
            board.set(f"building stage {spec.index}")
            programs[spec.index] = spec.build(self._device, setup.dtype)
        self._programs = programs
        self._stages = {
            index: Stage(program, setup.graph, self._device, setup.options, self._generators, turns)
            for index, program in programs.items()
        }
        self._shared = SharedWeights(programs, setup.owners, setup.mirrors, setup.placement, rank)
        self._state = WorkerState(programs, setup.owners, setup.optimizer)
        self._recorder = Recorder(rank)
        self._orders: dict[str, Order] = {}
        self._executor = Executor(
            self._stages,
            setup.graph,
            setup.placement,
            endpoint,
            interrupt,
            board,
            self._recorder,
            setup.timeout,
            self._device,
        )
        self._board = board
        self._events: list[Event] = []

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def n_workers(self) -> int:
        """How many workers the pipeline has."""
        return self._setup.n_workers

    @property
    def optimizes(self) -> bool:
        """Whether the pipeline has optimizers (this worker may still have nothing to train)."""
        return self._setup.optimizer.optimizer is not None

    @property
    def state(self) -> WorkerState:
        """What the stages here hold."""
        return self._state

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
            self._state.zero_gradients()
        self._recorder.drain()
        try:
            report = self._train(command, batch) if train else self._forward_only(command, batch)
        except BaseException:
            self._executor.reset()
            raise
        if train:
            self._events = self._recorder.drain()
        return report

    def _receive_batch(self, command: StepCommand) -> Batch:
        assert self._endpoint is not None
        self._board.set("receiving the batch", "the driver")
        bundle = self._endpoint.recv(Tag(command.number, "in", -1, self._rank, 0), self._setup.timeout)
        return Batch.from_bundle(bundle, self._device, dict(command.classes))

    def _train(self, command: StepCommand, batch: Batch) -> StepReport:
        setup = self._setup
        step = Step(command.number, (setup.seed, command.step), True, batch, command.weights)
        outcome = self._executor.run(self._orders[command.schedule], step, None)
        report = StepReport(peak_in_flight=outcome.peak_in_flight)
        if outcome.losses:
            report.loss = self._weighted(outcome.losses, command.weights)
        if self._shared:
            self._board.set("adding up gradients of shared weights")
            self._shared.collect_gradients(self._endpoint, command.number, setup.timeout)
        if setup.options.check_finite:
            self._board.set("looking for NaN in gradients")
            self._check_gradients()
        if command.update and setup.optimizer.optimizer is not None:
            self._update(command.number, report)
        if command.memory:
            report.memory = self._state.memory()
        return report

    def _check_gradients(self) -> None:
        """Before anybody updates, so that all stages skip an overflow in one of them."""
        for stage, owned in self._state.owned.items():
            for name, parameter in owned.items():
                if parameter.grad is not None and not bool(torch.isfinite(entries(parameter.grad)).all()):
                    raise PipelineError(
                        f"stage {stage}: the gradient of {name!r} holds NaN or infinity (check_finite=True); no stage "
                        "has updated",
                        stage=stage,
                    )

    def _update(self, number: int, report: StepReport) -> None:
        setup = self._setup
        start = self._recorder.clock()
        self._board.set("update", "all workers to finish their backward")
        limit = setup.optimizer.max_grad_norm
        square = squared_norm(self._state.trained) if limit is not None else 0.0
        # nobody updates before all are through: a failure up to here leaves every weight as it was
        square = agree(self._endpoint, setup.n_workers, number, square, setup.timeout)
        self._board.set("update")
        if limit is not None:
            norm = report.grad_norm = square**0.5
            clip(self._state.trained, norm, limit)
        for optimizer in self._state.optimizers.values():
            report.learning_rates += optimizer.learning_rates  # the step moves the scheduler on
            optimizer.step()
        if self._shared:
            self._shared.spread_values(self._endpoint, number, setup.timeout)
        self._recorder.record(-1, "update", -1, start, self._recorder.clock())

    def _forward_only(self, command: StepCommand, batch: Batch) -> StepReport:
        report = StepReport()
        losses: dict[int, Tensor] = {}

        def on_output(microbatch: int, output: Any, target: Any) -> None:
            if command.mode == "evaluate":
                stage = self._stages[self._setup.graph.output_stage]
                losses[microbatch] = stage.loss_of(output, target)
                return
            flat = flatten(output, report.classes, where="output")
            if self._endpoint is None or self._endpoint.size == self._setup.n_workers:
                report.outputs[microbatch] = flat
            else:
                tag = Tag(command.number, "out", self._setup.graph.output_stage, -1, microbatch)
                self._endpoint.send(self._setup.n_workers, tag, Bundle(*flat))

        step = Step(command.number, (self._setup.seed, command.step), False, batch, command.weights)
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
        self._state.zero_gradients()

    def set_training(self, mode: bool) -> None:
        """`train` or `eval` for all modules here."""
        self._state.set_training(mode)

    def send_state(self, number: int, kind: StateKind) -> Any:
        """Send `WorkerState.take` to the driver, with tag kind "state"; returns the plain rest."""
        assert self._endpoint is not None
        tensors, rest = self._state.take(kind)
        self._endpoint.send(self._setup.n_workers, Tag(number, "state", self._rank, -1, 0), Bundle(tensors))
        self._endpoint.flush(self._setup.timeout)
        return rest

    def load_weights(self, number: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Copy values into the parameters and buffers here, owned or not; None: they come with tag kind "load"."""
        if tensors is None:
            assert self._endpoint is not None
            tensors = self._endpoint.recv(Tag(number, "load", -1, self._rank, 0), self._setup.timeout).tensors
        self._state.give(tensors)

    def memory(self) -> dict[str, int]:
        """Bytes held here: parameters, gradients, optimizer state."""
        return self._state.memory()

    def events(self) -> list[Event]:
        """What happened here in the last training step that went through."""
        return self._events


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

"""Runs one worker's share of a schedule: a table from the kind of an action to what it does.

There is no other loop: gpipe, 1F1B and the zero-bubble schedules differ only in the list they hand over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stageflow.errors import StageflowError
from stageflow.graph import Bundle, StageGraph
from stageflow.observe.recorder import Recorder
from stageflow.runtime.batch import Batch
from stageflow.runtime.entry import arrive
from stageflow.runtime.stage import Stage
from stageflow.schedule.actions import Action
from stageflow.schedule.rules import depends_on, in_one_piece, is_backward
from stageflow.transport.base import Endpoint, Interrupt, Tag


class Board(Protocol):
    """Where the worker shows what it does."""

    def set(self, action: str, waits_for: str = "") -> None: ...


@dataclass(frozen=True)
class Step:
    """One run through a schedule.

    number: of the step, in every message. key: (seed, step) of every random draw.
    train: with backward; else forward only.
    weights: of each micro-batch's loss in the batch's.
    """

    number: int
    key: tuple[int, int]
    train: bool
    batch: Batch
    weights: Sequence[float]


@dataclass(frozen=True)
class Order:
    """One worker's share of a schedule.

    splits: (stage, micro-batch) whose backward is an I and a W.
    """

    actions: tuple[Action, ...]
    splits: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> Order:
        return cls(tuple(actions), frozenset((a.stage, a.microbatch) for a in actions if a.kind == "I"))


@dataclass
class Outcome:
    """What a worker got out of a step.

    losses: per micro-batch, on the worker of the output stage. peak_in_flight: most micro-batches kept at once.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    peak_in_flight: int = 0


OnOutput = Callable[[int, Any, Any], None]
"""Called with (micro-batch, output, target) of the output stage."""


class _Need(NamedTuple):
    """A message that an action waits for, whatever its micro-batch.

    kind: of the message. action: what makes it, of micro-batch 0. worker: where that runs; None: here.
    """

    kind: str
    action: Action
    worker: int | None


@dataclass(slots=True)
class _Run:
    """A step under way on this worker."""

    step: Step
    splits: frozenset[tuple[int, int]]
    on_output: OnOutput | None
    outcome: Outcome = field(default_factory=Outcome)


class Executor:
    """Follows an action list with the stages of one worker."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        graph: StageGraph,
        placement: Sequence[int],
        endpoint: Endpoint | None,
        interrupt: Interrupt,
        board: Board,
        recorder: Recorder,
        timeout: float,
        device: torch.device,
    ) -> None:
        """endpoint: None for a worker that is alone. timeout: seconds that a message may take to come."""
        self._stages = stages
        self._graph = graph
        self._placement = placement
        self._endpoint = endpoint
        self._interrupt = interrupt
        self._board = board
        self._recorder = recorder
        self._timeout = timeout
        self._device = device
        self._handed: dict[Tag, Bundle] = {}
        self._needs: dict[tuple[str, int], list[_Need]] = {}  # by kind and stage of the action, asked for once
        # each does an action and gives the time at which it had all it waited for
        self._table: dict[str, Callable[[_Run, Action], float]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }

    def run(self, order: Order, step: Step, on_output: OnOutput | None) -> Outcome:
        """Do the actions in order.

        on_output: for steps that don't train.
        Whatever is raised bears attributes ``stage``, ``action`` and ``microbatch`` that say where.
        """
        run = _Run(step, order.splits, on_output)
        outcome = run.outcome
        clock, record = self._recorder.clock, self._recorder.record
        action = None
        try:
            for action in order.actions:
                kind, stage, microbatch = action
                self._interrupt.check()
                start = self._table[kind](run, action)
                record(stage, kind, microbatch, start, clock())
                if kind == "F" and step.train:
                    in_flight = sum(each.in_flight for each in self._stages.values())
                    outcome.peak_in_flight = max(outcome.peak_in_flight, in_flight)
            for each in self._stages.values():
                each.check_losses()
        except BaseException as error:
            if action is not None:
                _locate(error, action)
            raise
        return outcome

    def reset(self) -> None:
        """Drop what an interrupted step left behind."""
        self._handed.clear()
        for stage in self._stages.values():
            stage.clear()

    def _forward(self, run: _Run, action: Action) -> float:
        _, stage, microbatch = action
        step = run.step
        received = self._gather(run, action)
        inputs = step.batch.microbatch(microbatch)
        start = self._recorder.clock()
        split = (stage, microbatch) in run.splits
        ran = self._stages[stage].forward(microbatch, inputs, received, step.key, train=step.train, split=split)
        for consumer, bundle in ran.bundles.items():
            self._hand_over(Tag(step.number, "F", stage, consumer, microbatch), bundle)
        if ran.loss is not None:
            run.outcome.losses[microbatch] = ran.loss
        if stage == self._graph.output_stage and run.on_output is not None:
            run.on_output(microbatch, ran.output, inputs.target)
        return start

    def _backward(self, run: _Run, action: Action) -> float:
        return self._differentiate(self._stages[action.stage].backward, run, action)

    def _backward_inputs(self, run: _Run, action: Action) -> float:
        return self._differentiate(self._stages[action.stage].backward_inputs, run, action)

    def _differentiate(
        self, backward: Callable[[int, Mapping[int, Bundle], float], dict[int, Bundle]], run: _Run, action: Action
    ) -> float:
        _, stage, microbatch = action
        gradients = self._gather(run, action)
        start = self._recorder.clock()
        for producer, bundle in backward(microbatch, gradients, run.step.weights[microbatch]).items():
            self._hand_over(Tag(run.step.number, "B", stage, producer, microbatch), bundle)
        return start

    def _backward_weights(self, run: _Run, action: Action) -> float:
        self._board.set(str(action))
        start = self._recorder.clock()
        self._stages[action.stage].backward_weights(action.microbatch)
        return start

    def _hand_over(self, tag: Tag, bundle: Bundle) -> None:
        worker = self._placement[tag.target]
        if self._endpoint is None or worker == self._endpoint.rank:
            # a copy, as any transport makes: the receiver may change it, and so may the sender, if it is a buffer
            tensors = {name: tensor.clone() for name, tensor in bundle.tensors.items()} if tag.kind == "F" else None
            self._handed[tag] = bundle if tensors is None else Bundle(tensors, bundle.meta)
        else:
            self._endpoint.send(worker, tag, bundle)

    def _gather(self, run: _Run, action: Action) -> dict[int, Bundle]:
        """The bundle of every other stage that the action waits for."""
        kind, stage, microbatch = action
        needs = self._needs.get((kind, stage))
        if needs is None:
            needs = self._needs[kind, stage] = self._needs_of(action)
        number = run.step.number
        bundles = {
            need.action.stage: self._receive(Tag(number, need.kind, need.action.stage, stage, microbatch), action, need)
            for need in needs
        }
        self._board.set(str(action))
        return bundles

    def _needs_of(self, action: Action) -> list[_Need]:
        kind = "B" if is_backward(action) else "F"
        here = None if self._endpoint is None else self._endpoint.rank
        needs = []
        for need in depends_on(action._replace(microbatch=0), self._graph, in_one_piece):
            if need.stage != action.stage:
                worker = self._placement[need.stage]
                needs.append(_Need(kind, need, None if here is None or worker == here else worker))
        return needs

    def _receive(self, tag: Tag, action: Action, need: _Need) -> Bundle:
        """The message that an action needs of another, wherever that ran."""
        made_by = need.action._replace(microbatch=tag.microbatch)
        if need.worker is None:
            bundle = self._handed.pop(tag, None)
            if bundle is None:
                raise StageflowError(
                    f"{action} needs {made_by}, which has not run yet on this worker: the schedule is wrong"
                )
            return bundle
        assert self._endpoint is not None
        self._board.set(str(action), f"{made_by} from worker {need.worker}")
        started = self._recorder.clock()
        bundle = arrive(self._endpoint.recv(tag, self._timeout), self._device)
        self._recorder.record(tag.target, "wait", tag.microbatch, started, self._recorder.clock())
        return bundle


def _locate(error: BaseException, action: Action) -> None:
    """Say on the exception where it was raised; the launcher reads it."""
    with contextlib.suppress(AttributeError):  # an exception class with __slots__
        error.stage, error.action, error.microbatch = action.stage, str(action), action.microbatch  # type: ignore[attr-defined]

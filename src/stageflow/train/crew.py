"""Who runs the workers: a driver with threads or processes, or every rank of a torchrun job for itself.

The façade speaks to a `Crew` and does not know which.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from stageflow.checkpoint import (
    BackgroundSave,
    Pending,
    Progress,
    Saving,
    Shard,
    ShardEntry,
    open_checkpoint,
    write_behind,
    write_config,
)
from stageflow.errors import InputError
from stageflow.graph import Bundle
from stageflow.launch.base import WorkerContext, WorkerGroup
from stageflow.launch.trace import tell, trace_process
from stageflow.observe.events import Event
from stageflow.runtime.batch import Batch
from stageflow.runtime.command import StepCommand, StepReport, WorkerSetup
from stageflow.runtime.random import Generators, Turns
from stageflow.runtime.state import StateKind
from stageflow.runtime.worker import Worker
from stageflow.schedule.actions import Action, Orders
from stageflow.transport.base import Tag
from stageflow.transport.structure import unflatten

T = TypeVar("T")
Wanted = Callable[[int, str], bool]
"""Whether a worker needs the values of a tensor of the batch, by its flat name."""


@dataclass
class StepResult:
    """What came out of one step, for the caller."""

    reports: list[StepReport]
    outputs: list[Any]

    @property
    def loss(self) -> float | None:
        return next((report.loss for report in self.reports if report.loss is not None), None)


class Crew(ABC):
    """All workers of one pipeline."""

    n_workers: int

    @abstractmethod
    def step(self, command: StepCommand, orders: Orders | None, batch: Batch, wanted: Wanted) -> StepResult:
        """Run one step on all workers; orders: each worker's actions, None where they know them."""

    @abstractmethod
    def state(self, number: int, kind: StateKind) -> tuple[dict[str, Tensor], list[Any]]:
        """What all workers own, on the CPU: (tensors by name, each worker's plain rest)."""

    @abstractmethod
    def load(self, number: int, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Give each worker the values of its parameters and buffers."""

    @abstractmethod
    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker that moves no tensors; the results in rank order."""

    @abstractmethod
    def save(
        self, directory: Path, skip: frozenset[str], progress: Progress, model: object, dtype: torch.dtype | None
    ) -> None:
        """Write a checkpoint; skip: names that are not saved. model, dtype: see `write_config`."""

    @abstractmethod
    def save_behind(
        self,
        directory: Path,
        skip: frozenset[str],
        progress: Progress,
        model: object,
        dtype: torch.dtype | None,
        then: Callable[[], None],
    ) -> Pending:
        """As `save`, but return once the workers have copied what they hold. then: called after it went well."""

    @property
    def leads(self) -> bool:
        """Whether this process does what only one may do: the driver, or the first rank."""
        return True

    def agree(self, function: Callable[[], T]) -> T:
        """What a function gives (plain values): where there is one driver, there; else on the first rank, for all."""
        return function()

    @property
    def processes(self) -> list[int]:
        """The process of each worker; here only this one, where they are no processes of their own."""
        return [os.getpid()]

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the next step can run."""

    @abstractmethod
    def trace(self) -> str:
        """What every worker does now, for a person to read; at any moment, also in the middle of a step."""

    @abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice."""

    def events(self) -> list[Event]:
        """What happened in the last step, on all workers."""
        return [event for events in self.ask("events") for event in events]


class DriverCrew(Crew):
    """Workers that one driver commands: threads or processes of this machine."""

    def __init__(self, group: WorkerGroup, setup: WorkerSetup, timeout: float, in_process: bool) -> None:
        self.n_workers = group.size
        self._group = group
        self._setup = setup
        self._timeout = timeout
        # threads draw from the caller's own generators
        self._generators = Generators(torch.device("cpu")) if in_process else None

    def step(self, command: StepCommand, orders: Orders | None, batch: Batch, wanted: Wanted) -> StepResult:
        if self._generators is not None:
            with self._generators.preserved():
                return self._step(command, orders, batch, wanted)
        return self._step(command, orders, batch, wanted)

    def _step(self, command: StepCommand, orders: Orders | None, batch: Batch, wanted: Wanted) -> StepResult:
        endpoint = self._group.endpoint
        endpoint.forget(command.number)
        for rank in range(self.n_workers):
            bundle = batch.bundle(lambda name, rank=rank: wanted(rank, name))
            endpoint.send(rank, Tag(command.number, "in", -1, rank, 0), bundle)
        per_worker = [((order,), {}) for order in orders or [None] * self.n_workers]
        outputs: list[Bundle] = []
        with self._group.cast("step", per_worker, timeout=self._timeout, common=(command,)) as running:
            if command.mode == "predict":
                source = self._setup.graph.output_stage
                for microbatch in range(len(command.weights)):
                    tag = Tag(command.number, "out", source, -1, microbatch)
                    bundle = endpoint.recv(tag, self._timeout * 2)
                    # what is kept must not hold the transport's memory
                    outputs.append(Bundle({n: t.clone() for n, t in bundle.tensors.items()}, bundle.meta))
            reports = running.results()
        classes = {name: cls for report in reports for name, cls in report.classes.items()}
        return StepResult(reports, [unflatten(bundle.meta, bundle.tensors, classes) for bundle in outputs])

    def state(self, number: int, kind: StateKind) -> tuple[dict[str, Tensor], list[Any]]:
        tensors: dict[str, Tensor] = {}
        with self._group.cast("send_state", timeout=self._timeout, common=(number, kind)) as running:
            for rank in range(self.n_workers):
                bundle = self._group.endpoint.recv(Tag(number, "state", rank, -1, 0), self._timeout * 2)
                tensors.update({name: tensor.clone() for name, tensor in bundle.tensors.items()})
            rests = running.results()
        return tensors, rests

    def load(self, number: int, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        for rank, own in enumerate(tensors):
            self._group.endpoint.send(rank, Tag(number, "load", -1, rank, 0), Bundle(dict(own)))
        self._group.call("load_weights", timeout=self._timeout, common=(number,))

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._group.call(method, timeout=self._timeout, common=arguments)

    def save(
        self, directory: Path, skip: frozenset[str], progress: Progress, model: object, dtype: torch.dtype | None
    ) -> None:
        with Saving(directory, sum(self.ask("bytes_to_save"))) as saving:
            entries = [entry for own in self.ask("write_checkpoint", str(saving.path), skip) for entry in own]
            write_config(model, saving.path, dtype)
            saving.finish(entries, progress)

    def save_behind(
        self,
        directory: Path,
        skip: frozenset[str],
        progress: Progress,
        model: object,
        dtype: torch.dtype | None,
        then: Callable[[], None],
    ) -> Pending:
        saving = Saving(directory, sum(self.ask("bytes_to_save")))
        try:
            write_config(model, saving.path, dtype)
            count = sum(self.ask("start_checkpoint", str(saving.path), skip))
            return BackgroundSave(saving, count, progress, self._timeout, then)
        except BaseException:
            saving.abandon()
            raise

    @property
    def processes(self) -> list[int]:
        return list(dict.fromkeys(status.pid for status in self._group.status()))

    @property
    def usable(self) -> bool:
        return self._group.usable

    def trace(self) -> str:
        try:
            return tell(trace_process(os.getpid()))
        except InputError as error:
            return str(error)

    def close(self) -> None:
        self._group.close()


class TrainingWorker(Worker):
    """A worker that also reads and writes its own part of a checkpoint."""

    def bytes_to_save(self) -> int:
        """An estimate of what `write_checkpoint` writes, in bytes."""
        held = self.memory()
        return held["parameters"] + held["optimizer"]

    def write_checkpoint(self, directory: str, skip: frozenset[str]) -> list[ShardEntry]:
        """Write what this worker owns into `Saving.path`; skip: names that are not saved."""
        return [shard.write(directory) for shard in self._shards(skip, copy=False)]

    def start_checkpoint(self, directory: str, skip: frozenset[str]) -> int:
        """Copy what this worker owns, and have a thread write it; returns how many files that will be."""
        shards = list(self._shards(skip, copy=True))
        write_behind(directory, shards)
        return len(shards)

    def _shards(self, skip: frozenset[str], *, copy: bool) -> Iterator[Shard]:
        weights, _ = self.state.take("weights")
        kept = {name: tensor for name, tensor in weights.items() if name not in skip}
        yield Shard.of("model", self.rank, self.n_workers, kept, copy=copy)
        if self.optimizes:
            yield Shard.of("optimizer", self.rank, self.n_workers, *self.state.take("optimizer"), copy=copy)

    def read_checkpoint(
        self,
        number: int,
        directory: str,
        identity: str,
        names: frozenset[str],
        aliases: Mapping[str, str],
        resume: bool,
    ) -> None:
        """Load what the stages here hold; names: of all that was saved. resume: the optimizers' state too."""
        checkpoint = open_checkpoint(directory, verify=False, identity=identity)
        self.load_weights(number, checkpoint.weights(self.state.names & names, aliases))
        if resume:
            for optimizer in self.state.optimizers.values():
                tensors, plain = checkpoint.optimizer(optimizer.names, aliases)
                optimizer.load(tensors, plain)


class DrivenWorker:
    """The service that a driver's worker runs: first `build`, then whatever `TrainingWorker` offers."""

    def __init__(self, context: WorkerContext, turns: Turns | None = None) -> None:
        self._context = context
        self._turns = turns
        self._worker: TrainingWorker | None = None

    def build(self, setup: WorkerSetup) -> None:
        """Make the stages; once."""
        context = self._context
        self._worker = TrainingWorker(
            replace(setup, device=context.device),
            context.rank,
            context.endpoint(),
            context.interrupt,
            context.board,
            self._turns,
        )

    def step(self, command: StepCommand, actions: tuple[Action, ...] | None) -> StepReport:
        """`Worker.step` with this worker's own actions, None where it knows them."""
        assert self._worker is not None
        return self._worker.step(command if actions is None else replace(command, actions=actions))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

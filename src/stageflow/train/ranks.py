"""A pipeline under torchrun: every rank runs the same script, holds one worker, and gets every result.

Rank 0 splits the model and sends each rank its stages, so all agree on the cuts and on the first weights. What ranks
exchange afterwards goes through their endpoints, whose waits end when any rank fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import cloudpickle
import torch
from torch import Tensor

from stageflow.checkpoint import BackgroundSave, Pending, Progress, Saving, write_config
from stageflow.errors import LaunchError, SplitError, TransferTimeout
from stageflow.graph import Bundle, StageProgram, StageSpec
from stageflow.launch.torchrun import TorchrunGroup, join_torchrun
from stageflow.observe.events import Event
from stageflow.runtime.batch import Batch
from stageflow.runtime.command import StepCommand, StepReport, WorkerSetup
from stageflow.runtime.random import Generators
from stageflow.runtime.state import StateKind
from stageflow.schedule.actions import Orders
from stageflow.split import Split
from stageflow.train.crew import Crew, StepResult, TrainingWorker, Wanted
from stageflow.transport.base import Endpoint, Tag
from stageflow.transport.structure import flatten, imported, unflatten

T = TypeVar("T")

_LOOK_EVERY = 1.0  # seconds between looks at rank 0 while it splits the model
_SILENCE = (
    60.0  # seconds without its sign of life, which comes five times a second unless something holds Python's lock
)


class _Elsewhere(StageSpec):
    """Stands for a stage that another rank holds."""

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> StageProgram:
        raise SplitError(f"stage {self.index} is held by another rank")


class Ranks:
    """All ranks of a torchrun job, before they have stages.

    Raises LaunchError on all of them where they do not run the same thing, or are not as many as needed.
    """

    def __init__(self, n_workers: int, devices: str | Sequence[str], timeout: float, facts: Mapping[str, Any]) -> None:
        """facts: what must be equal on all ranks."""
        self._group = join_torchrun(devices, facts)
        self._timeout = timeout
        self._calls = 0
        if self._group.size != n_workers:
            size = self._group.size
            self.close()
            raise LaunchError(
                f"this pipeline has {n_workers} workers, torchrun started {size} ranks: use --nproc-per-node so that "
                f"there are {n_workers} in all, or stages={size}"
            )

    @property
    def group(self) -> TorchrunGroup:
        return self._group

    def run(self, function: Callable[[], T]) -> T:
        """Call the function; on every rank. Raises on all where one raised."""
        return self._group.run(function, timeout=self._timeout)

    def share_split(self, make: Callable[[], Split], placement: Sequence[int]) -> Split:
        """Let rank 0 split the model; every rank gets the split with the stages that it holds itself."""
        return self.run(lambda: self._share_split(make, placement))

    def _share_split(self, make: Callable[[], Split], placement: Sequence[int]) -> Split:
        endpoint, rank = self._group.context.endpoint(), self._group.rank
        board = self._group.context.board
        if rank != 0:
            board.set("waiting for the split", "rank 0 to split the model")
            packed = self._await_split(endpoint).tensors["split"]
            return cloudpickle.loads(packed.numpy().tobytes())  # type: ignore[no-any-return]
        board.set("splitting the model")
        split = make()
        own = split
        for peer in range(self._group.size):
            specs = [spec if placement[spec.index] == peer else _Elsewhere(spec.index) for spec in split.specs]
            packed = bytearray(cloudpickle.dumps(replace(split, specs=specs)))
            if peer == rank:  # a copy here too: a stage must not train the user's own tensors
                own = cloudpickle.loads(packed)
            else:
                message = Bundle({"split": torch.frombuffer(packed, dtype=torch.uint8)})
                endpoint.send(peer, Tag(0, "split", 0, peer, 0), message)
        return own

    def _await_split(self, endpoint: Endpoint) -> Bundle:
        """The message with this rank's split, for as long as rank 0 lives and works on it.

        Splitting a large model may take longer than any message, and nobody could say how long. A rank 0 that raises or
        dies ends the wait by its interrupt or its connection, within moments; one that was stopped, or whose machine
        is gone without a word, falls silent.
        """
        tag = Tag(0, "split", 0, self._group.rank, 0)
        shown, since = "", time.monotonic()
        while True:
            try:
                return endpoint.recv(tag, _LOOK_EVERY)
            except TransferTimeout:
                now = time.monotonic()
                line = self._group.shown_by(0)
                if line != shown:
                    shown, since = line, now
                elif now - since > min(self._timeout, _SILENCE):
                    raise TransferTimeout(
                        f"rank 0 was splitting the model and has given no sign of life for {now - since:.0f} s; the "
                        f"last was: {line}"
                    ) from None

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank; what has a plain form."""
        endpoint, rank, size = self._group.context.endpoint(), self._group.rank, self._group.size
        self._calls += 1
        if size == 1:
            return [value]
        message = Bundle(*flatten(value))
        # beyond any step's number, so that no step forgets a message that another rank was quick to send
        tags = [Tag(1 << 40, "all", source, rank, self._calls) for source in range(size)]
        for peer in range(size):
            if peer != rank:
                endpoint.send(peer, tags[rank]._replace(target=peer), message)
        values = []
        for source in range(size):
            if source == rank:
                values.append(value)
            else:
                bundle = endpoint.recv(tags[source], self._timeout)
                values.append(unflatten(bundle.meta, bundle.tensors))
        return values

    def close(self) -> None:
        self._group.close()


class RankCrew(Crew):
    """This rank's worker, and the others' through it."""

    def __init__(self, ranks: Ranks, setups: Sequence[WorkerSetup]) -> None:
        context = ranks.group.context
        self.n_workers = ranks.group.size
        self._ranks = ranks
        self._timeout = setups[0].timeout
        self._rank = context.rank
        self._output_worker = setups[0].placement[setups[0].graph.output_stage]
        self._device = torch.device(context.device)
        self._generators = Generators(self._device)
        setup = replace(setups[self._rank], device=context.device)
        self._worker = ranks.run(
            lambda: TrainingWorker(setup, context.rank, context.endpoint(), context.interrupt, context.board)
        )

    def step(self, command: StepCommand, orders: Orders | None, batch: Batch, wanted: Wanted) -> StepResult:
        if orders is not None:
            command = replace(command, actions=orders[self._rank])
        here = replace(batch, tensors={n: t.to(self._device, non_blocking=True) for n, t in batch.tensors.items()})

        def work() -> StepResult:
            report = self._worker.step(command, here)
            outputs = self._spread_outputs(command, report)
            plain = (report.loss, report.grad_norm, report.peak_in_flight, report.learning_rates, report.memory)
            return StepResult([StepReport(*values) for values in self._ranks.exchange(plain)], outputs)

        with self._generators.preserved():
            return self._ranks.run(work)

    def _spread_outputs(self, command: StepCommand, report: StepReport) -> list[Any]:
        """Every micro-batch's output on every rank."""
        if command.mode != "predict":
            return []
        mine = ([report.outputs[i] for i in sorted(report.outputs)], _pack_classes(report.classes))
        flats, packed = self._ranks.exchange(mine)[self._output_worker]
        classes = _unpack_classes(packed)
        return [unflatten(meta, tensors, classes) for tensors, meta in flats]

    def state(self, number: int, kind: StateKind) -> tuple[dict[str, Tensor], list[Any]]:
        def work() -> tuple[dict[str, Tensor], list[Any]]:
            tensors, rest = self._worker.state.take(kind)
            everyone = self._ranks.exchange(({name: tensor.cpu() for name, tensor in tensors.items()}, rest))
            # copies: what the caller does with them must not change this rank's own stages
            merged = {name: tensor.clone() for own, _ in everyone for name, tensor in own.items()}
            return merged, [rest for _, rest in everyone]

        return self._ranks.run(work)

    def load(self, number: int, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        self._ranks.run(lambda: self._worker.load_weights(number, tensors[self._rank]))

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._ranks.run(lambda: self._ranks.exchange(getattr(self._worker, method)(*arguments)))

    def save(
        self, directory: Path, skip: frozenset[str], progress: Progress, model: object, dtype: torch.dtype | None
    ) -> None:
        needed = sum(self.ask("bytes_to_save"))
        saving = self._ranks.run(lambda: Saving(directory, needed) if self._rank == 0 else None)
        try:
            path = self._ranks.run(lambda: self._ranks.exchange(None if saving is None else str(saving.path)))[0]
            assert path is not None
            entries = [entry for own in self.ask("write_checkpoint", path, skip) for entry in own]

            def finish() -> None:
                if saving is not None:
                    write_config(model, saving.path, dtype)
                    saving.finish(entries, progress)

            self._ranks.run(finish)
        finally:
            if saving is not None:
                saving.abandon()

    def save_behind(
        self,
        directory: Path,
        skip: frozenset[str],
        progress: Progress,
        model: object,
        dtype: torch.dtype | None,
        then: Callable[[], None],
    ) -> Pending:
        needed = sum(self.ask("bytes_to_save"))
        saving = self._ranks.run(lambda: Saving(directory, needed) if self._rank == 0 else None)
        try:
            path = self.agree(lambda: "" if saving is None else str(saving.path))
            self._ranks.run(lambda: None if saving is None else write_config(model, saving.path, dtype))
            count = sum(self.ask("start_checkpoint", path, skip))
            first = None if saving is None else BackgroundSave(saving, count, progress, self._timeout, then)
            return _RanksSave(self._ranks, first)
        except BaseException:
            if saving is not None:
                saving.abandon()
            raise

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def agree(self, function: Callable[[], T]) -> T:
        first = self._ranks.run(lambda: self._ranks.exchange(function() if self._rank == 0 else None))[0]
        return cast(T, first)

    def events(self) -> list[Event]:
        """What happened in the last step, on all ranks; clocks of several machines are not aligned."""
        return [Event(*event) for events in self.ask("events") for event in events]

    def trace(self) -> str:
        return f"worker {self._rank}: {self._ranks.group.context.board}"

    @property
    def usable(self) -> bool:
        return self._ranks.group.usable

    def close(self) -> None:
        self._ranks.close()


def _pack_classes(classes: Mapping[str, type]) -> Tensor | None:
    """Classes of outputs for the other ranks, where one made inside a function can't be found by its name."""
    return torch.frombuffer(bytearray(cloudpickle.dumps(dict(classes))), dtype=torch.uint8) if classes else None


def _unpack_classes(packed: Tensor | None) -> dict[str, type]:
    """By name. Of what this rank's own script or modules define, its own class: so `isinstance` holds there."""
    if packed is None:
        return {}
    given: dict[str, type] = cloudpickle.loads(packed.cpu().numpy().tobytes())
    found = {name: imported(name) for name in given}
    return {name: found[name] if isinstance(found[name], type) else cls for name, cls in given.items()}


class _RanksSave:
    """A background save that rank 0 finishes and all ranks hear of. first: rank 0's part, None on the others."""

    def __init__(self, ranks: Ranks, first: BackgroundSave | None) -> None:
        self._ranks = ranks
        self._first = first

    @property
    def done(self) -> bool:
        """Always False: ranks that look at different moments must not see different things."""
        return False

    def result(self) -> None:
        self._ranks.run(lambda: None if self._first is None else self._first.result())

    def abandon(self) -> None:
        if self._first is not None:
            self._first.abandon()

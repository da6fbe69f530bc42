"""Who is measured: one process, stageflow, and torch.distributed.pipelining, all on the same model and batch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf
from benchmarks.common import Turn
from stageflow.schedule.families import FAMILIES

# idle threads must not spin: they would take the cores from whoever has its turn
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")


@dataclass(frozen=True)
class Task:
    """One step: forward and backward, no optimizer.

    build: makes the model, a sequence with the same weights whenever it is called.
    x, y: the batch, cut into `microbatches` of equal size; the loss is the mean square error, averaged over them.
    """

    build: Callable[[], nn.Sequential]
    x: Tensor
    y: Tensor
    microbatches: int

    def cuts(self, stages: int) -> list[int]:
        """Where each stage but the first begins: stages of equal length."""
        return [len(self.build()) * stage // stages for stage in range(1, stages)]


def one_process(task: Task, own: Sequence[int] | None = None) -> Callable[[], Turn]:
    """Gradient accumulation over the micro-batches, or only those given, on one thread."""
    torch.set_num_threads(1)
    model = task.build()
    xs, ys = task.x.chunk(task.microbatches), task.y.chunk(task.microbatches)
    numbers = range(task.microbatches) if own is None else own

    def step() -> Turn:
        model.zero_grad()
        started = time.perf_counter()
        total = 0.0
        for i in numbers:
            loss = F.mse_loss(model(xs[i]), ys[i]) / task.microbatches
            loss.backward()
            total += loss.item()
        return Turn(time.perf_counter() - started, total)

    return step


def stageflow_schedules(workers: int) -> dict[str, int]:
    """All that train, with the number of stages that each usually has on so many workers."""
    return {name: workers * FAMILIES[name].chunks for name in sf.SCHEDULES if name != "forward_only"}


def stageflow_pipeline(task: Task, schedule: str | sf.Schedule, stages: int, workers: int | None = None) -> sf.Pipeline:
    """A pipeline in worker processes, built."""
    return sf.Pipeline(
        task.build(),
        stages,
        task.microbatches,
        schedule,
        F.mse_loss,
        workers=workers,
        launch="processes",
        balance="parameters",
        boundaries=[str(cut) for cut in task.cuts(stages)] or None,
        example=task.x,
    )


def stageflow_step(pipe: sf.Pipeline, task: Task) -> Callable[[], Turn]:
    """One `train_step`, timed from outside: with the way of batch and loss from and to the caller."""

    def step() -> Turn:
        started = time.perf_counter()
        loss = pipe.train_step(task.x, target=task.y)
        return Turn(time.perf_counter() - started, float(loss))

    return step


@dataclass(frozen=True)
class TorchPlan:
    """A schedule of torch.distributed.pipelining by name. stages: over all workers; fold: as a V, else in a loop."""

    schedule: str
    stages: int
    fold: bool = False

    def stages_of(self, rank: int, workers: int) -> list[int]:
        if self.fold:
            return [rank, self.stages - 1 - rank]
        return list(range(rank, self.stages, workers))


class Workers:
    """Processes with one thread each that sleep between their turns.

    Timed from the start of the first to the end of the last. main: is called in each with (its end of a pipe, rank,
    number of workers, a folder for all, `arguments`); it sends "ready", then answers each name that it receives with
    (start, end, loss or None), until it receives None.
    """

    def __init__(self, workers: int, main: Callable[..., None], arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=main, args=(theirs, rank, workers, self._folder.name, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def step(self, name: str) -> Turn:
        """One step of one of the jobs."""
        for pipe in self._pipes:
            pipe.send(name)
        answers = [pipe.recv() for pipe in self._pipes]
        seconds = max(end for _, end, _ in answers) - min(start for start, _, _ in answers)
        return Turn(seconds, sum(loss for _, _, loss in answers if loss is not None))

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def torch_workers(workers: int, jobs: Mapping[str, tuple[Task, TorchPlan]]) -> Workers:
    """torch.distributed.pipelining over gloo.

    The stages are cut by hand, shapes are given, every worker has the batch already, and all start from a barrier.
    """
    return Workers(workers, _torch_worker, dict(jobs))


def apart(workers: int, task: Task) -> Workers:
    """Processes that have nothing to do with each other: each accumulates its share of the micro-batches over the whole
    model. What they reach together is what the machine can give."""
    return Workers(workers, _lone_worker, task)


def _lone_worker(pipe: Connection, rank: int, workers: int, folder: str, task: Task) -> None:
    own = range(rank, task.microbatches, workers)
    step = one_process(task, own)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while pipe.recv() is not None:
            started = time.perf_counter()
            turn = step()
            pipe.send((started, started + turn.seconds, turn.loss))


def _torch_worker(
    pipe: Connection, rank: int, workers: int, folder: str, jobs: Mapping[str, tuple[Task, TorchPlan]]
) -> None:
    warnings.simplefilter("ignore")  # torch's own, about its private parts
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.path.join(folder, 'rendezvous')}", rank=rank, world_size=workers
    )
    steps = {name: _torch_step(task, plan, rank, workers) for name, (task, plan) in jobs.items()}
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while (name := pipe.recv()) is not None:
            pipe.send(steps[name]())
    dist.destroy_process_group()


def _torch_step(
    task: Task, plan: TorchPlan, rank: int, workers: int
) -> Callable[[], tuple[float, float, float | None]]:
    from torch.distributed import pipelining

    model = task.build()
    cuts = [0, *task.cuts(plan.stages), len(model)]
    example = task.x.chunk(task.microbatches)[0]
    own = plan.stages_of(rank, workers)
    stages = [
        pipelining.PipelineStage(model[cuts[i] : cuts[i + 1]], i, plan.stages, torch.device("cpu"), input_args=example)
        for i in own
    ]
    kind = getattr(pipelining, plan.schedule)
    multi = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    schedule = kind(stages if multi else stages[0], task.microbatches, loss_fn=F.mse_loss)
    inputs: Sequence[Tensor] = (task.x,) if 0 in own else ()
    last = plan.stages - 1 in own

    def step() -> tuple[float, float, float | None]:
        model.zero_grad()
        losses: list[Tensor] = []
        dist.barrier()
        started = time.perf_counter()
        schedule.step(*inputs, **({"target": task.y, "losses": losses} if last else {}))
        ended = time.perf_counter()
        return started, ended, float(torch.stack(losses).mean()) if last else None

    return step

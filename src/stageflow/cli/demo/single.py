"""The same training in this one process, without a pipeline: what the pipeline is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from stageflow.cli.demo.job import Call, Job

WARM_UP = 1


@dataclass(frozen=True)
class SingleRun:
    """losses: of each step, from the starting weights. seconds: of a typical step."""

    losses: list[float]
    seconds: float


def train_single(
    job: Job, calls: list[Call], optimizer: Callable[..., torch.optim.Optimizer], threads: int, device: str
) -> SingleRun:
    """Train the job's model on these batches, one optimizer step for each.

    threads: of torch in this process, for the time of this call.
    """
    model = job.build().to(device)
    steps = optimizer(model.parameters())
    losses: list[float] = []
    times: list[float] = []
    with _threads(threads):
        for call in calls:
            start = time.perf_counter()
            losses.append(_step(model, steps, job, _moved(call, device)))
            times.append(time.perf_counter() - start)
    return SingleRun(losses, median(times[WARM_UP:] or times))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, call: Call) -> float:
    output = model(*call.args, **call.kwargs)
    loss = output.loss if job.loss is None else job.loss(output, call.target)  # type: ignore[arg-type]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _moved(call: Call, device: str) -> Call:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    kwargs = {name: move(value) for name, value in call.kwargs.items()}
    return Call(tuple(map(move, call.args)), kwargs, move(call.target))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

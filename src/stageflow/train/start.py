"""Starts the workers of a pipeline, with the launcher and transport that were asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from stageflow.errors import InputError
from stageflow.graph import StageSpec
from stageflow.launch.base import WorkerGroup
from stageflow.launch.devices import choose_devices
from stageflow.launch.processes import start_processes
from stageflow.launch.threads import start_threads
from stageflow.launch.travel import pack, unpack
from stageflow.runtime.command import WorkerSetup
from stageflow.runtime.random import Turns
from stageflow.train.crew import Crew, DrivenWorker, DriverCrew
from stageflow.train.wiring import ProcessWiring, ThreadWiring

Launch = Literal["processes", "threads", "torchrun"]
LEAST_PATIENCE = 30.0
"""Seconds without progress that starting may take at least: Python imports torch meanwhile, and says nothing."""

LAUNCHERS: tuple[Launch, ...] = get_args(Launch)


def choose_launch(launch: Launch | None) -> Launch:
    """The launcher asked for; None: torchrun where torchrun started this process, else processes."""
    if launch is None:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "processes"
    if launch not in LAUNCHERS:
        raise InputError(f"launch={launch!r}; expected one of {', '.join(map(repr, LAUNCHERS))}")
    return launch


def start_crew(
    in_process: bool, setups: Sequence[WorkerSetup], *, devices: str | Sequence[str], threads: int, timeout: float
) -> Crew:
    """Start one worker per setup, as threads or as processes; timeout: for all that follows. Raises LaunchError."""
    size = len(setups)
    patience = max(timeout, LEAST_PATIENCE)
    names = choose_devices(size, devices)
    wiring = ThreadWiring(size + 1) if in_process else ProcessWiring(size + 1)
    try:
        if in_process:
            # threads share the user's memory, and a stage must not train the user's own tensors
            setups = [replace(setup, specs=tuple(map(_copy, setup.specs))) for setup in setups]
            make = partial(DrivenWorker, turns=Turns())
            group: WorkerGroup = start_threads(make, size, wiring=wiring, devices=names, timeout=patience)
        else:
            # forked with what they will surely import, rather than each importing it again
            preload = [DrivenWorker.__module__, *(name for name in ("transformers",) if name in sys.modules)]
            if setups[0].optimizer.optimizer is not None:
                preload.append("torch._dynamo")  # torch imports it, for seconds, when the first optimizer is made
            group = start_processes(
                DrivenWorker, size, wiring=wiring, devices=names, threads=threads, timeout=patience, preload=preload
            )
    finally:
        wiring.close()
    try:
        group.call("build", [((setup,), {}) for setup in setups], timeout=patience)
    except BaseException:
        group.close()
        raise
    return DriverCrew(group, setups[0], timeout, in_process)


def _copy(spec: StageSpec) -> StageSpec:
    return unpack(pack(spec, f"stage {spec.index}"))  # type: ignore[no-any-return]

"""Starts workers, watches them, and says what went wrong. Moves no tensors and, torchrun apart, needs no torch.

base        what a group of workers is, and what a worker is given
supervisor  decides: notices in, commands out
group       obeys it; threads and processes add how
zygote      what worker processes are forked from; server is the driver's side of it, worker what they become
travel      packs what goes to a worker process; channel carries it, and servant answers there
board       what every worker shows of itself; watch, how ranks learn of a failure; trace, the stacks of all its threads
failure     an exception that crosses processes; guard, the missing ``__main__`` guard
torchrun    ranks without a driver; agreement decides for them
"""

from stageflow.launch.base import Call, WorkerContext, WorkerGroup, WorkerStatus
from stageflow.launch.devices import choose_devices
from stageflow.launch.processes import start_processes
from stageflow.launch.server import keep_warm
from stageflow.launch.threads import start_threads

__all__ = [
    "Call",
    "WorkerContext",
    "WorkerGroup",
    "WorkerStatus",
    "choose_devices",
    "keep_warm",
    "start_processes",
    "start_threads",
]

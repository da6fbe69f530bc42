"""How much memory does a worker take for a model that is built by a function, against its own share of the model?"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
import torch.nn.functional as F

import stageflow as sf
from benchmarks import common, models

STAGES, MICROBATCHES = 4, 4
LAYERS, WIDTH = 16, 2048  # 256 MiB of weights
AIM = 1.3
MIB = 1 << 20


def workers() -> list[psutil.Process]:
    """The worker processes: children of the one that they are forked from."""
    return [child for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]


def private(process: psutil.Process) -> int:
    """Bytes of memory that no other process shares."""
    return process.memory_full_info().uss


def peak(process: psutil.Process) -> int:
    """The most bytes that were resident at once since the process began."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure(layers: int, width: int) -> dict[str, list[int]]:
    """Bytes per worker: private and at most resident, once built, and private after a step, with gradients."""
    x = torch.randn(2 * MICROBATCHES, width)
    size = layers // STAGES
    with sf.Pipeline(
        partial(models.wide, layers, width),
        STAGES,
        MICROBATCHES,
        loss=F.mse_loss,
        launch="processes",
        boundaries=[str(size * stage) for stage in range(1, STAGES)],
        balance="parameters",
        example=x,
    ) as pipe:
        pipe.describe()  # builds it
        found = {"built": [private(each) for each in workers()], "peak": [peak(each) for each in workers()]}
        pipe.train_step(x, target=torch.randn_like(x))
        found["trained"] = [private(each) for each in workers()]
    return found


def plain(layers: int, width: int, answer: Connection) -> None:
    """In a process of its own: private bytes after the same step with only these layers and no pipeline."""
    torch.set_num_threads(1)
    model = models.wide(layers, width)
    for x in torch.randn(2 * MICROBATCHES, width).chunk(MICROBATCHES):
        F.mse_loss(model(x), x).backward()
    answer.send(private(psutil.Process()))


def measure_plain() -> int:
    """What one worker's share takes in a plain process, in bytes above the same process with next to nothing."""
    context = multiprocessing.get_context("spawn")
    sizes = []
    for layers, width in ((LAYERS // STAGES, WIDTH), (1, 1)):
        ours, theirs = context.Pipe()
        process = context.Process(target=plain, args=(layers, width, theirs))
        process.start()
        sizes.append(ours.recv())
        process.join()
    return sizes[0] - sizes[1]


def main() -> None:
    options = common.parser(__doc__, rounds=3).parse_args()
    found = common.environment()
    share = LAYERS // STAGES * WIDTH * WIDTH * 4
    shares = {"built": share, "peak": share, "trained": measure_plain()}
    above: dict[str, list[int]] = {name: [] for name in shares}
    for _ in range(options.rounds):
        empty, full = measure(STAGES, 1), measure(LAYERS, WIDTH)
        for name in shares:
            above[name] += [a - b for a, b in zip(sorted(full[name]), sorted(empty[name]), strict=True)]
    words = {
        "built": ("weights", "private memory once built"),
        "peak": ("weights", "most resident memory while being built"),
        "trained": ("a plain process", "private memory after a step"),
    }
    rows = [
        [
            what,
            f"{owns}, {shares[name] / MIB:.0f} MiB",
            f"{statistics.median(above[name]) / MIB:.0f} MiB",
            f"{statistics.median(above[name]) / shares[name]:.2f}",
            f"{max(above[name]) / shares[name]:.2f}",
        ]
        for name, (owns, what) in words.items()
    ]
    head = ["above an empty worker", "measured against", "median worker", "ratio", "worst worker"]
    markdown = f"{common.table(head, rows)}\n\nThe whole model is {STAGES * share / MIB:.0f} MiB. Aim: {AIM}."
    common.publish(options, __file__, found, {"share": shares, "above": above}, markdown)


if __name__ == "__main__":
    main()

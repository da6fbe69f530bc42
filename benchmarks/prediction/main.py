"""Does a step take what its plan says, in time and memory? Stages that sleep, and a transformer in two stages."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf
from benchmarks import common, contestants, models
from stageflow.cli.links import measure_links

# emulated devices: F, I and W of a block in seconds; every device gets two blocks
DEVICES, BLOCKS, MICROBATCHES, BLOCK_S = 4, 8, 16, 0.005
# a real transformer on two cores
LAYERS, WIDTH, LENGTH, SHORT, BATCH, PARTS = 8, 256, 256, 16, 32, 8
REAL = ("1f1b", "zb_h1", "zb_v", "auto")
STEPS, WARM_UP = 3, 2
AIMS = {"emulated": 0.05, "real": 0.10}
MIB = 1 << 20

sgd = partial(torch.optim.SGD, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One plan and what came of it: seconds of a step, and the fullest worker's peak."""

    schedule: str
    predicted: float
    measured: float
    peak_predicted: float
    peak_measured: float

    @property
    def error(self) -> float:
        """Of the step: above zero where it took longer than predicted."""
        return self.measured / self.predicted - 1

    @property
    def peak_error(self) -> float:
        """Of the memory."""
        return self.peak_measured / self.peak_predicted - 1


def spans(pipe: sf.Pipeline, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Seconds of steps as a plan counts them: from the first action on any worker to the end of the last."""
    taken = []
    for _ in range(steps):
        pipe.train_step(x, target=y)
        taken.append(pipe.last_step.measured.span)
    return taken


def emulated(names: Sequence[str], link: tuple[float, float], rounds: int) -> list[Case]:
    """Every schedule that trains on devices that sleep; memory counts activations of a stage."""
    model = models.sleepers(BLOCKS, BLOCK_S, BLOCK_S, BLOCK_S)
    x = torch.randn(MICROBATCHES, 16)
    y = torch.randn_like(x)
    profile = sf.profile_model(model, x, target=y, loss=F.mse_loss, microbatch=1, threads=1)
    cases = []
    for name in names:
        common.say(f"emulated {name}")
        plan = sf.make_plan(
            devices=DEVICES, profile=profile, schedule=name, microbatches=MICROBATCHES, link=link, progress=False
        )
        with sf.Pipeline(model, plan=plan, loss=F.mse_loss) as pipe:
            spans(pipe, x, y, WARM_UP)
            measured = statistics.median(spans(pipe, x, y, rounds * STEPS))
            peak = max(pipe.last_step.peak_in_flight)
        kept = max(plan.schedule.validate().peak_activations)
        cases.append(Case(_name(name, plan), plan.step, measured, kept, peak))
    return cases


def real(link: tuple[float, float], rounds: int) -> list[Case]:
    """A transformer on two cores; memory is what long sequences take above short ones, as the system counts it.

    What a worker process takes anyway (code, kernels, gradients) is in both, and so cancels out.
    """
    model = models.transformer(LAYERS, WIDTH)
    batches = [torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, SHORT, WIDTH)]
    long, short = (
        sf.profile_model(model, x, target=x, loss=F.mse_loss, optimizer=sgd, microbatch=BATCH // PARTS, threads=1)
        for x in batches
    )
    cases = []
    for name in REAL:
        common.say(f"transformer {name}")
        plan = sf.make_plan(devices=2, profile=long, schedule=name, microbatches=PARTS, link=link, progress=False)
        brief = replace(plan, blocks=short.blocks)
        with sf.Pipeline(model, plan=plan, loss=F.mse_loss, optimizer=sgd) as pipe:
            spans(pipe, batches[0], batches[0], WARM_UP)
            measured = statistics.median(spans(pipe, batches[0], batches[0], rounds * STEPS))
        most, least = (_grown(plan, model, x) for x in batches)
        peaks = [[a - b for a, b in zip(*pair, strict=True)] for pair in ((plan.memory, brief.memory), (most, least))]
        cases.append(Case(_name(name, plan), plan.step, measured, *map(max, peaks)))
    return cases


def _grown(plan: sf.Plan, model: nn.Module, x: Tensor) -> list[int]:
    """Per worker, the most bytes that were resident in a step above what it had once built, without the batch.

    That is input on the worker of the first stage and target on that of the last.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)  # so that freed tensors are given back, and not kept by malloc
    try:
        with sf.Pipeline(model, plan=plan, loss=F.mse_loss, optimizer=sgd, example=x) as pipe:
            pipe.state_dict()  # builds it
            built = [_resident(worker, "VmRSS") for worker in _workers()]
            spans(pipe, x, x, WARM_UP)
            most = [_resident(worker, "VmHWM") for worker in _workers()]
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    ends = (plan.placement[0], plan.placement[-1])
    return [a - b - x.nbytes * ends.count(w) for w, (a, b) in enumerate(zip(most, built, strict=True))]


def _name(wanted: str, plan: sf.Plan) -> str:
    return wanted if wanted != "auto" else f"auto: {plan.schedule.name}, {len(plan.stages)} stages"


def _workers() -> list[psutil.Process]:
    """The worker processes, oldest first: children of the one that they are forked from."""
    children = [child for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]
    return sorted(children, key=lambda child: (child.create_time(), child.pid))


def _resident(process: psutil.Process, what: str) -> int:
    """Bytes: VmRSS now, VmHWM the most since the process began."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what))


def report(title: str, cases: Sequence[Case], aim: float, memory: str, unit: float) -> str:
    rows = [
        [
            case.schedule,
            f"{1000 * case.predicted:.1f}",
            f"{1000 * case.measured:.1f}",
            f"{case.error:+.1%}",
            f"{case.peak_predicted / unit:.0f}",
            f"{case.peak_measured / unit:.0f}",
            f"{case.peak_error:+.1%}",
        ]
        for case in cases
    ]
    head = ["schedule", "step predicted, ms", "measured, ms", "error", f"{memory} predicted", "measured", "error"]
    worst = max(abs(error) for case in cases for error in (case.error, case.peak_error))
    within = sum(max(abs(case.error), abs(case.peak_error)) <= aim for case in cases)
    verdict = f"Aim {aim:.0%}: {within} of {len(cases)} are within it, the worst is {worst:.1%} off."
    return f"**{title}**\n\n{common.table(head, rows)}\n\n{verdict}"


def main() -> None:
    options = common.parser(__doc__, rounds=5).parse_args()
    found = common.environment()
    torch.set_num_threads(1)
    links = {link["bytes"]: link["seconds"] for link in measure_links()}
    small, large = min(links), max(links)
    link = (links[small], (large - small) / (links[large] - links[small]))
    names = [*contestants.stageflow_schedules(DEVICES), "auto"]
    sleeping, computing = emulated(names, link, options.rounds), real(link, options.rounds)
    results = {"emulated": [asdict(case) for case in sleeping], "real": [asdict(case) for case in computing]}
    parts = [
        report(
            f"{DEVICES} emulated devices, {MICROBATCHES} micro-batches", sleeping, AIMS["emulated"], "activations", 1
        ),
        report(f"transformer on 2 cores, {PARTS} micro-batches", computing, AIMS["real"], "MiB", MIB),
        f"Link, as measured here: {1e6 * link[0]:.0f} us and {link[1] / 1e9:.1f} GB/s.",
    ]
    common.publish(options, __file__, found, {"link": link, **results}, "\n\n".join(parts))


if __name__ == "__main__":
    main()

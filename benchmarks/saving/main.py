"""What a checkpoint costs a training run: nothing, one in the background, one that is waited for.

Each turn makes so many steps and saves once in them; the contestants take turns in the same pipeline.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import environment, parser, publish, say, table

import stageflow as sf

WIDTH, BLOCKS, BATCH, LENGTH = 256, 4, 16, 32
WAYS = {"no checkpoint": None, "in the background": True, "waited for": False}


def pipeline() -> sf.Pipeline:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    return sf.Pipeline(
        nn.Sequential(*blocks),
        stages=2,
        microbatches=4,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        timeout=120.0,
    )


def turn(pipe: sf.Pipeline, steps: int, background: bool | None, folder: Path) -> tuple[float, float]:
    """(seconds of a step on average, seconds that `save` took); ends when all is written."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    pause = 0.0
    start = time.perf_counter()
    for step in range(steps):
        pipe.train_step(x, target=x)
        if step == 0 and background is not None:
            before = time.perf_counter()
            pipe.save(folder, keep=2, background=background)
            pause = time.perf_counter() - before
    seconds = (time.perf_counter() - start) / steps
    pipe.finish_saving()
    return seconds, pause


def main() -> None:
    made = parser(__doc__, rounds=7)
    made.add_argument("--steps", type=int, default=20, help="from one checkpoint to the next")
    options = made.parse_args()
    found = environment()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    pauses: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, pipeline() as pipe:
        turn(pipe, 3, True, Path(folder))
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            order = list(WAYS)[number % 3 :] + list(WAYS)[: number % 3]
            for way in order:
                seconds, pause = turn(pipe, options.steps, WAYS[way], Path(folder))
                steps[way].append(seconds)
                pauses[way].append(pause)
        newest = max(Path(folder).iterdir())
        size = sum(path.stat().st_size for path in newest.iterdir())
    bare = min(steps["no checkpoint"])  # other work on the machine only ever adds
    rows, results = [], {}
    for way in WAYS:
        step, pause = min(steps[way]), min(pauses[way])
        results[way] = {"step": step, "pause": pause, "slower": step / bare - 1}
        shown = "" if WAYS[way] is None else f"{1000 * pause:.0f}"
        rows.append([way, f"{1000 * step:.1f}", f"{100 * (step / bare - 1):+.1f}%", shown])
    head = ["checkpoint", "step, ms", "against none", "`save` returns after, ms"]
    text = f"One checkpoint of {size / 2**20:.0f} MiB every {options.steps} steps.\n\n{table(head, rows)}"
    publish(options, __file__, found, results, text)


if __name__ == "__main__":
    main()

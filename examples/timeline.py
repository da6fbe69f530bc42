"""Look at the bubbles of a step: a picture in the terminal, an HTML page, a Perfetto trace, figures.

    python examples/timeline.py [folder]

Uses stages that only sleep, so that the picture is the same on any machine: F takes 10 ms, I and W 10 ms each. Prints
for 1F1B and for zb_h1 a lane per worker and the bubble, measured beside predicted. Writes 1f1b.html, 1f1b.json and
the same for zb_h1 into the folder (default: a temporary one, whose name is printed).
"""

import sys
import tempfile
from pathlib import Path

import torch

import stageflow as sf
from stageflow.testing.emulated import EmulatedStage


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="stageflow-timeline-"))
    folder.mkdir(parents=True, exist_ok=True)
    x = torch.zeros(8, 4)
    for schedule in ("1f1b", "zb_h1"):
        stages = [EmulatedStage(0.010, 0.010, 0.010) for _ in range(4)]
        with sf.Pipeline(
            stages, stages=4, microbatches=8, schedule=schedule, loss=lambda output: output.mean(), example=x
        ) as pipe:
            for _ in range(3):
                pipe.train_step(x)
            view = pipe.last_step
            print(f"{schedule}: bubble {view.measured.bubble:.0%} measured, {view.predicted.bubble:.0%} predicted")
            print(view)
            pipe.timeline(folder / f"{schedule}.html")
            pipe.trace(folder / f"{schedule}.json")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()

"""What does it cost to split a backward into I and W? One transformer layer, run as a middle stage of a pipeline."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import stageflow as sf
from benchmarks import common, models
from benchmarks.common import Turn
from stageflow.graph import Bundle
from stageflow.runtime.batch import MicroBatch
from stageflow.runtime.random import Generators
from stageflow.runtime.stage import Stage, StageOptions

SETTINGS = [(64, 1, 128, 20), (256, 2, 128, 6), (512, 2, 128, 3)]  # width, samples, length, repeats in a turn
AIM = 1.05
CPU = torch.device("cpu")


class MiddleStage:
    """The second of three stages, alone in this process; each turn gives it the same input and gradient."""

    def __init__(self, width: int, samples: int, length: int, repeats: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(samples, length, width)
        split = sf.split_model(models.transformer(3, width), (x,), stages=3, balance="parameters")
        self._stage = Stage(split.specs[1].build(CPU), split.graph, CPU, StageOptions(), Generators(CPU))
        self._stage.prepare_split_backward()
        self._received = {0: Bundle({"0": x}, [{"tensor": "0"}, ["0"]])}
        self._gradient = {2: Bundle({"0": torch.randn_like(x)})}
        self._repeats = repeats
        for parameter in self._stage.program.parameters.values():
            parameter.grad = torch.zeros_like(parameter)  # as after the first micro-batch

    def whole(self) -> Turn:
        """Seconds of one B."""
        return self._turn(split=False)

    def parts(self) -> Turn:
        """Seconds of one I and W."""
        return self._turn(split=True)

    def _turn(self, *, split: bool) -> Turn:
        stage, seconds = self._stage, []
        for _ in range(self._repeats):
            stage.forward(0, MicroBatch((), {}, None), self._received, (0, 0), train=True, split=split)
            started = time.perf_counter()
            if split:
                stage.backward_inputs(0, self._gradient, 1.0)
                stage.backward_weights(0)
            else:
                stage.backward(0, self._gradient, 1.0)
            seconds.append(time.perf_counter() - started)
        return Turn(statistics.median(seconds), 0.0)


def measure(rounds: int) -> dict[int, dict[str, float]]:
    """Per width, seconds of B and of I and W, and the median of their ratio, round by round."""
    found = {}
    for width, samples, length, repeats in SETTINGS:
        stage = MiddleStage(width, samples, length, repeats)
        turns = common.in_turn({"B": stage.whole, "I+W": stage.parts}, rounds, warm_up=2)
        ratios = [parts.seconds / whole.seconds for whole, parts in zip(turns["B"], turns["I+W"], strict=True)]
        found[width] = {name: common.median_seconds(taken) for name, taken in turns.items()}
        found[width]["ratio"] = statistics.median(ratios)
    return found


def main() -> None:
    torch.set_num_threads(1)
    options = common.parser(__doc__, rounds=15).parse_args()
    found = common.environment()
    results = measure(options.rounds)
    rows = [
        [f"width {width}", f"{1000 * r['B']:.2f}", f"{1000 * r['I+W']:.2f}", f"{r['ratio']:.2f}"]
        for width, r in results.items()
    ]
    figures = common.table(["", "B, ms", "I + W, ms", "(I + W) / B"], rows)
    common.publish(options, __file__, found, results, f"{figures}\n\nAim: at most {AIM}.")


if __name__ == "__main__":
    main()

"""Random draws depend on their key and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch

from stageflow.runtime.random import Drawn, Generators, mix


def _draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_keys_are_spread_and_fixed() -> None:
    keys = {mix(0, step, microbatch, layer) for step in range(8) for microbatch in range(8) for layer in range(-1, 15)}
    assert len(keys) == 8 * 8 * 16
    assert all(0 <= key < 2**63 for key in keys)
    assert mix(1, 2, 3) == 8767703585470966807


def test_the_same_key_gives_the_same_draws() -> None:
    generators = Generators(torch.device("cpu"))
    seed = generators.seeder(0, 1, 2, None)
    seed(5)
    first = _draw()
    seed(6)
    other = _draw()
    seed(5)
    assert _draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_watch_tells_which_generators_were_used() -> None:
    generators = Generators(torch.device("cpu"))

    def watch(draw) -> Drawn:
        def run(seed) -> None:
            seed(0)
            seed(1)
            draw()
            seed(2)

        return generators.watch(run, generators.seeder(0, 0, 0, None))

    assert watch(lambda: None) == Drawn(False, False, False)
    assert watch(lambda: torch.rand(3)) == Drawn(True, False, False)
    assert watch(random.random) == Drawn(False, True, False)
    assert watch(lambda: np.random.random()) == Drawn(False, False, True)


def test_preserved_leaves_the_streams_as_they_were() -> None:
    generators = Generators(torch.device("cpu"))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    want = _draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with generators.preserved():
        generators.seeder(0, 0, 0, None)(0)
        _draw()
    assert _draw() == want

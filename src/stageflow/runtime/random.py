"""Random draws that do not depend on where a model is cut.

Every draw is keyed by (seed, step, micro-batch, layer): whoever runs a layer, and whenever, first sets the random
generators from that key. So dropout masks are the same for any number of stages, any schedule, and again when the
layer is recomputed in the backward pass.
"""

from __future__ import annotations

import random as python_random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def mix(*parts: int) -> int:
    """Hash integers to 63 bits, equal on every machine (the finaliser of SplitMix64, Steele et al. 2014, Fig. 15)."""
    state = _START
    for part in parts:
        state = _absorb(state, part)
    return state >> 1


def _absorb(state: int, part: int) -> int:
    state = (state + (part & _MASK) * 0xBF58476D1CE4E5B9 + _START) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass(slots=True)
class Drawn:
    """Which generators a stage was seen to draw from in its forward."""

    torch: bool
    python: bool
    numpy: bool

    def __bool__(self) -> bool:
        return self.torch or self.python or self.numpy

    def __or__(self, other: Drawn) -> Drawn:
        return Drawn(self.torch or other.torch, self.python or other.python, self.numpy or other.numpy)


class Generators:
    """The process's random generators (torch's on the CPU and on one CUDA device, Python's, numpy's)."""

    def __init__(self, device: torch.device) -> None:
        self._torch = [torch.default_generator]
        self._step = (0, 0, _absorb(_absorb(_START, 0), 0))
        if device.type == "cuda":
            torch.cuda.init()
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._torch.append(torch.cuda.default_generators[index])

    def seeder(self, seed: int, step: int, microbatch: int, drawn: Drawn | None) -> Callable[[int], None]:
        """The function that a stage calls with a layer's number where that layer starts.

        drawn: which generators are worth setting; None: not known yet, set all of them.
        """
        if drawn is not None and not drawn:
            return _no_seed
        if self._step[:2] != (seed, step):
            self._step = (seed, step, _absorb(_absorb(_START, seed), step))
        base = _absorb(self._step[2], microbatch)  # mix(seed, step, microbatch, layer), but for its last part
        generators = self._torch
        rest = drawn is None or drawn.python or drawn.numpy

        def set_key(layer: int) -> None:
            key = _absorb(base, layer) >> 1
            for generator in generators:
                generator.manual_seed(key)
            if rest:
                python_random.seed(key)
                np.random.seed(key & 0xFFFFFFFF)

        return set_key

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave the caller's own random streams as they were."""
        states = [generator.get_state() for generator in self._torch]
        python_state, numpy_state = python_random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            for generator, state in zip(self._torch, states, strict=True):
                generator.set_state(state)
            python_random.setstate(python_state)
            np.random.set_state(numpy_state)

    def watch(self, run: Callable[[Callable[[int], None]], object], set_key: Callable[[int], None]) -> Drawn:
        """Call ``run(seed)`` and tell which generators it drew from, by comparing them where each layer ends."""
        drawn = Drawn(False, False, False)
        before: list[object] = []

        def look() -> None:
            if before:
                states, python_state, numpy_state = before[0]  # type: ignore[misc]
                pairs = zip(self._torch, states, strict=True)
                drawn.torch |= any(not torch.equal(generator.get_state(), state) for generator, state in pairs)
                drawn.python |= python_random.getstate() != python_state
                drawn.numpy |= not _same_numpy(np.random.get_state(), numpy_state)

        def snapshot() -> None:
            states = [generator.get_state() for generator in self._torch]
            before[:] = [(states, python_random.getstate(), np.random.get_state())]

        def seed_and_watch(layer: int) -> None:
            with torch._C.DisableTorchFunction():  # the stage may be watching torch calls itself
                look()
                set_key(layer)
                snapshot()

        snapshot()
        run(seed_and_watch)
        look()
        return drawn


class Turns:
    """Stages that share one process share its generators: one at a time may use them.

    A backward uses them too, wherever an activation checkpoint sets them back; so once any stage was seen to draw,
    backwards take turns as well.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._drawing = False

    def forward(self, drawn: Drawn | None) -> AbstractContextManager[Any]:
        """A turn for a forward that draws, or may (None)."""
        self._drawing |= bool(drawn)
        return self._lock if drawn is None or drawn else nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """A turn for a backward."""
        return self._lock if self._drawing else nullcontext()


def _no_seed(layer: int) -> None:
    """A stage that draws nothing needs no keys."""


def _same_numpy(a: object, b: object) -> bool:
    return a[2] == b[2] and np.array_equal(a[1], b[1])  # type: ignore[index]

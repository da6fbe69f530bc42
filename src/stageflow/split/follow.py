"""Following an example through a sequence of layers: what each costs and what passes between them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import FrameError, SplitError
from stageflow.split.measure import ROUNDS, SLOW_ROUND, smooth, timed, undisturbed
from stageflow.split.request import Request
from stageflow.split.state import named_state
from stageflow.transport.structure import flatten


@dataclass(frozen=True)
class Layer:
    """One module of the sequence; the same module may stand in it several times.

    number: position in the whole sequence. name: module path in the model.
    """

    number: int
    name: str
    module: nn.Module

    def state_names(self) -> Iterator[str]:
        """The layer's parameters and buffers by their names in the model, tied ones by each name."""
        for name, _, _ in named_state(self.module):
            yield f"{self.name}.{name}"


@dataclass
class Survey:
    """What is known of the layers and the values between them.

    costs: per layer, in ``unit``. allowed: before which layers a cut may be. obstacles: why not elsewhere.
    changed: ids of the buffers that some forward changes, or might. classes: what values between layers are made of.
    """

    costs: list[float]
    unit: str
    allowed: set[int]
    changed: set[int]
    obstacles: list[str] = field(default_factory=list)
    classes: dict[str, type] = field(default_factory=dict)

    @property
    def balanced_by(self) -> str:
        return "measured time" if self.unit == "s" else "parameters"


def follow(request: Request, layers: list[Layer]) -> Survey:
    """Learn from the request's example, if there is one, else assume what is safe.

    Raises SplitError, naming the layer, if the layers don't run on the example.
    """
    survey = Survey(_count_parameters(layers), "parameters", set(range(1, len(layers))), set())
    if request.example is None:
        survey.changed = {id(buffer) for layer in layers for buffer in layer.module.buffers()}
        return survey
    samples: list[list[float]] = [[] for _ in layers]
    with undisturbed(request.model, training=True):
        kinds = [kind for _, kind in _run(request, layers, survey)]
        if request.balance != "time":
            return survey
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for layer, (seconds, _) in enumerate(_run(request, layers, None)):
                samples[layer].append(seconds)
            if time.perf_counter() - start > SLOW_ROUND:
                break
    survey.costs, survey.unit = smooth(samples, kinds), "s"
    return survey


def _count_parameters(layers: list[Layer]) -> list[float]:
    # At least one each: many layers without parameters should still be shared out evenly.
    return [float(max(1, sum(p.numel() for p in layer.module.parameters()))) for layer in layers]


def _run(request: Request, layers: list[Layer], survey: Survey | None) -> Iterator[tuple[float, object]]:
    """Follow the example once; per layer its seconds and its kind, for `smooth`. Fills in ``survey`` if given."""
    assert request.example is not None
    value: Any = request.example
    for layer in layers:
        first = layer.number == 0
        module = layer.module if request.deferred is None else with_values(layer.module)
        before = [(buffer, buffer._version) for buffer in layer.module.buffers()]
        kind = (repr(module), _shapes(value))
        try:
            call = _spread(module) if first else module
            seconds, value = timed(call, value, module.parameters(), needs_input_grad=not first)
        except Exception as problem:
            raise SplitError(f"layer {layer.name!r} fails on the example: {problem}") from problem
        if survey is not None:
            survey.changed.update(_changed(layer.module, before))
            if layer is not layers[-1]:
                _note_value(survey, layer, value)
        yield seconds, kind


def _spread(first: nn.Module) -> Any:
    return lambda example: first(*example[0], **example[1])


def _note_value(survey: Survey, layer: Layer, value: Any) -> None:
    try:
        flatten(value, survey.classes, where=f"what {layer.name!r} gives")
    except FrameError as problem:
        survey.allowed.discard(layer.number + 1)
        survey.obstacles.append(str(problem))


def _changed(module: nn.Module, before: list[tuple[Tensor, int]]) -> Iterator[int]:
    now = {id(buffer) for buffer in module.buffers()}
    for buffer, version in before:
        if buffer._version != version or id(buffer) not in now:
            yield id(buffer)


def _shapes(value: Any) -> object:
    try:
        return tuple((tuple(t.shape), t.dtype) for t in flatten(value)[0].values())
    except FrameError:
        return None


def with_values(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters on the meta device have some values, good enough to measure its time."""

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        real = torch.empty_like(tensor, device="cpu")
        return real.normal_(std=0.02) if real.is_floating_point() else real.zero_()

    return copy.deepcopy(module)._apply(fill)

"""Taking a model apart as far as it goes: one stage per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import InputError, SplitError
from stageflow.split import ModelLike, Split, blocks, export, sequence
from stageflow.split.deferred import DeferredModel, as_model
from stageflow.split.replay.assembly import copy_model
from stageflow.split.request import Request, as_call
from stageflow.split.state import named_state

_WAYS: dict[str, Callable[[Request], Split]] = {"sequence": sequence.cut, "blocks": blocks.cut, "export": export.cut}


def take_apart(model: ModelLike, example: Any, way: str, at_least: int) -> tuple[str, Split]:
    """The model's class, and its split into as many stages as there can be.

    A module's weights are shared with the stages but its gradients, buffers and layers are not: they can be run.
    at_least: how many stages there should be. Raises SplitError with what stopped each way.
    """
    if way not in ("auto", *_WAYS):
        raise InputError(f"split must be one of auto, {', '.join(_WAYS)}, got {way!r}")
    if at_least < 1:
        raise InputError(f"at_least must be 1 or more, got {at_least}")
    deferred, whole = None, model
    if not isinstance(model, (nn.Module, list, tuple)) and callable(model):
        deferred, whole = DeferredModel.record(model)
    whole = as_model(whole)
    if deferred is None:
        whole = with_own_gradients(whole)
    request = _Everywhere(whole, as_call(example), at_least, "parameters", None, deferred)
    problems: dict[str, str] = {}
    for name, cut in _WAYS.items() if way == "auto" else [(way, _WAYS[way])]:
        try:
            return type(whole).__name__, _cut_everywhere(cut, request)
        except SplitError as problem:
            problems[name] = str(problem)
    listing = "".join(f"\n  {name}: {problem}" for name, problem in problems.items())
    raise SplitError(f"{type(whole).__name__} can't be taken apart:{listing}")


class _Asked(Exception):
    """Where there may be cuts."""

    def __init__(self, starts: list[int]) -> None:
        super().__init__()
        self.starts = starts


@dataclass(frozen=True)
class _Everywhere(Request):
    """Cuts wherever that can be asked for by name. asking: only tells where, and makes no cut."""

    asking: bool = True

    def choose_cuts(self, names: Sequence[str], costs: Sequence[float], allowed: set[int] | None = None) -> list[int]:
        places = range(1, len(names)) if allowed is None else sorted(i for i in allowed if 0 < i < len(names))
        # a name stands for the first piece of that name or within it, so the others can't begin a stage
        first: dict[str, int] = {}
        for number, name in enumerate(names):
            for end in [i for i, letter in enumerate(name) if letter == "."] + [len(name)]:
                first.setdefault(name[:end], number)
        starts = [place for place in places if first[names[place]] == place]
        if len(starts) + 1 < self.stages:
            raise SplitError(f"{len(names)} layers can be cut into at most {len(starts) + 1} blocks")
        if self.asking:
            raise _Asked(starts)
        return [0, *starts[: self.stages - 1], len(names)]


def _cut_everywhere(cut: Callable[[Request], Split], request: _Everywhere) -> Split:
    try:
        return cut(request)
    except _Asked as asked:
        return cut(replace(request, stages=len(asked.starts) + 1, asking=False))


def with_own_gradients(model: nn.Module) -> nn.Module:
    """A copy over the same memory for parameters, with gradients, hooks and buffers of its own."""
    replace: dict[int, Tensor] = {}
    for _, tensor, kind in named_state(model):
        inner = tensor.detach()
        replace[id(tensor)] = nn.Parameter(inner, tensor.requires_grad) if kind == "parameter" else inner.clone()
    return copy_model(model, replace)


def outline(model: nn.Module) -> nn.Module:
    """A copy on the meta device: shapes and no values."""
    replace: dict[int, Tensor] = {}
    for _, tensor, kind in named_state(model):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        replace[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if kind == "parameter" else empty
    return copy_model(model, replace)

"""Cutting a model into stages: three ways in, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from stageflow.errors import InputError, SplitError
from stageflow.graph import StageSpec
from stageflow.split import blocks, export, sequence
from stageflow.split.deferred import DeferredModel, as_model
from stageflow.split.hooks import carry_hooks
from stageflow.split.request import BALANCES, Balance, ExampleFailed, Request, as_call
from stageflow.split.spec import InputsUsed, LayerInfo, Split

__all__ = ["InputsUsed", "LayerInfo", "Split", "StageSpec", "split_model"]

Way = Literal["auto", "sequence", "blocks", "export"]
_WAYS: dict[str, Callable[[Request], Split]] = {"sequence": sequence.cut, "blocks": blocks.cut, "export": export.cut}

ModelLike = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module | Sequence[nn.Module]]
Example = tuple[Any, ...] | Mapping[str, Any] | tuple[tuple[Any, ...], Mapping[str, Any]]


def split_model(
    model: ModelLike,
    example: Example | torch.Tensor | None = None,
    *,
    stages: int,
    split: Way = "auto",
    balance: Balance = "time",
    boundaries: Sequence[str] | None = None,
    weights: str | Path | None = None,
) -> Split:
    """Cut ``model`` into ``stages`` stages that together do just what it does.

    model: an nn.Module; a list of modules, each fed with what the one before gives; or a function without arguments
        that builds one of these. With a function no process ever holds more weights than its own stages': each
        worker builds the model again from the same random state, so that the weights are those of a plain build.
    example: inputs of one call, of one micro-batch's size: a tuple of arguments, a dict of keyword arguments, or a
        pair of both. Without it a sequence is balanced by parameters.
    split: "sequence" for nn.Sequential or a list; "blocks" for repeated blocks anywhere in the module tree; "export"
        for a graph captured by torch.export; "auto" takes the first of these that works.
    balance: make the stages equal in measured time of forward and backward, or in "parameters".
    boundaries: module paths at which stages 1, 2, ... start, instead of balancing.
    weights: with a function: a safetensors file, or a folder of them, to load each stage's own weights from.

    Raises InputError for arguments that make no sense, SplitError with what stopped each way otherwise.
    """
    _check_arguments(stages, split, balance, boundaries)
    request = _request(model, example, stages, balance, boundaries, weights)
    problems: dict[str, str] = {}
    cause: BaseException | None = None
    for way in _WAYS if split == "auto" else (split,):
        try:
            result = _WAYS[way](request)
        except ExampleFailed as problem:
            layer = "" if cause is None else f" ({problems['sequence']})"
            raise SplitError(f"{problem}{layer}; nothing was cut and no stage has started") from problem.__cause__
        except SplitError as problem:
            problems[way], cause = str(problem), cause or problem.__cause__
            continue
        if request.deferred is None:  # else each worker's own build registers them
            carry_hooks(request.model, result)
        result.reason += "".join(f"; not by {other}: {problem}" for other, problem in problems.items())
        return result
    listing = "".join(f"\n  {way}: {problem}" for way, problem in problems.items())
    raise SplitError(f"{type(request.model).__name__} can't be cut into {stages} stages:{listing}") from cause


def _check_arguments(stages: int, split: str, balance: str, boundaries: Sequence[str] | None) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise InputError(f"stages must be a whole number of at least 1, got {stages!r}")
    if split not in get_args(Way):
        raise InputError(f"split must be one of {', '.join(get_args(Way))}, got {split!r}")
    if balance not in BALANCES:
        raise InputError(f"balance must be one of {', '.join(BALANCES)}, got {balance!r}")
    listed = isinstance(boundaries, Sequence) and not isinstance(boundaries, str)
    if boundaries is not None and not (listed and len(boundaries) == stages - 1):
        raise InputError(f"{stages} stages have {stages - 1} boundaries between them, got boundaries={boundaries!r}")


def _request(
    model: ModelLike,
    example: Any,
    stages: int,
    balance: Balance,
    boundaries: Sequence[str] | None,
    weights: str | Path | None,
) -> Request:
    deferred = None
    if not isinstance(model, (nn.Module, list, tuple)) and callable(model):
        deferred, whole = DeferredModel.record(model, Path(weights) if weights is not None else None)
    else:
        if weights is not None:
            raise InputError("weights= is for a model given as a function; a module brings its own: load them into it")
        whole = as_model(model)
        _check_devices(whole)
    cuts = None if boundaries is None else tuple(boundaries)
    return Request(whole, None if example is None else as_call(example), stages, balance, cuts, deferred)


def _check_devices(model: nn.Module) -> None:
    first: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.device, name)
    absent = first.get(torch.device("meta"))
    if absent is not None:
        raise SplitError(
            f"parameter {absent!r} is on the meta device and has no values: pass the function that builds the model "
            "instead (with weights= to load stored ones)"
        )
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise SplitError(f"the model is spread over several devices ({places}): move it to one, .to('cpu') will do")

"""What the pieces of a model cost, measured one by one on what they were given in the trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from stageflow.errors import FrameError
from stageflow.split.follow import with_values
from stageflow.split.measure import ROUNDS, SLOW_ROUND, smooth, timed
from stageflow.split.replay.events import TraceEvent
from stageflow.split.replay.interception import Stand, Timeline, intercept, tensors_in
from stageflow.transport.structure import flatten, unflatten


class NotMeasured(Exception):
    """Times can't be had; says why."""


class _Clock(Timeline):
    """Notes how long the model's own code runs between its atoms.

    between: before each call of an atom and after the last, in seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between: list[float] = []
        self._since = time.perf_counter()

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.stop()
        try:
            return forward(*args, **kwargs)
        finally:
            self._since = time.perf_counter()

    def stop(self) -> None:
        self.between.append(time.perf_counter() - self._since)


def measure(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], pieces: list[TraceEvent], hollow: bool
) -> list[float]:
    """Seconds of forward and backward of each piece, and of the model's own code after it.

    hollow: the model's parameters are on the meta device. Raises NotMeasured.
    """
    odd = next((piece.label for piece in pieces if not piece.is_atom), None)
    if odd is not None:
        raise NotMeasured(f"{odd!r} is no module, whose time could be taken by itself")
    kinds = [_kind(model, piece) for piece in pieces]
    samples: list[list[float]] = [[] for _ in pieces]
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for number, piece in enumerate(pieces):
            try:
                samples[number].append(_seconds(model, piece, hollow, first=number == 0))
            except Exception as problem:
                what = f"{type(problem).__name__}: {problem}"
                raise NotMeasured(f"{piece.label!r} does not run by itself: {what}") from problem
        if time.perf_counter() - start > SLOW_ROUND:
            break
    costs = smooth(samples, kinds)
    if hollow or not pieces:  # without weights there is no whole model that could run
        return costs
    return [cost + own for cost, own in zip(costs, _own_code(model, arguments, pieces, kinds), strict=True)]


def _own_code(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], pieces: list[TraceEvent], kinds: list[object]
) -> list[float]:
    """Seconds of the code between the pieces, each with the piece before it, where a cut leaves it; that before the
    first one with the first. The backward of it, which can't be timed apart, counts as twice its forward.
    """
    samples: list[list[float]] = [[] for _ in pieces]
    for _ in range(ROUNDS):
        start = time.perf_counter()
        between = _run_with_clock(model, arguments, {piece.name for piece in pieces})
        if len(between) != len(pieces) + 1:  # chance chose another path this time
            return [0.0] * len(pieces)
        for number, seconds in enumerate([between[0] + between[1], *between[2:]]):
            samples[number].append(3 * seconds)
        if time.perf_counter() - start > SLOW_ROUND:
            break
    followers = [*kinds[1:], None]
    return smooth(samples, [(number == 0, *pair) for number, pair in enumerate(zip(kinds, followers, strict=True))])


def _run_with_clock(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], atoms: set[str]
) -> list[float]:
    stand = Stand()
    undo = [intercept(model.get_submodule(path), path, stand) for path in sorted(atoms)]
    args, kwargs = _copied(arguments)
    clock = stand.current = _Clock()
    try:
        model(*args, **kwargs)
    finally:
        for step in undo:
            step()
    clock.stop()
    return clock.between


def _copied(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With tensors of their own, which the model may change; as they are where they have no plain form."""
    classes: dict[str, type] = {}
    try:
        tensors, outline = flatten(arguments, classes)
    except FrameError:
        return arguments
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return unflatten(outline, copies, classes)  # type: ignore[no-any-return]


def count_parameters(model: nn.Module, pieces: list[TraceEvent]) -> list[float]:
    """Parameters of each piece; at least one, so that many pieces without any are still shared out evenly."""
    return [float(max(1, _size(model, piece))) for piece in pieces]


def _seconds(model: nn.Module, piece: TraceEvent, hollow: bool, first: bool) -> float:
    module = model.get_submodule(piece.name)
    if hollow:
        module = with_values(module)
    seconds, _ = timed(lambda e: module(*e[0], **e[1]), piece.example, module.parameters(), needs_input_grad=not first)
    return seconds


def _size(model: nn.Module, piece: TraceEvent) -> int:
    if piece.is_atom:
        return sum(p.numel() for p in model.get_submodule(piece.name).parameters())
    return sum(value.tensor.numel() for value in piece.uses if value.key.startswith("s:"))


def _kind(model: nn.Module, piece: TraceEvent) -> object:
    """Pieces of one kind should take equally long."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_in(piece.example))
    return repr(model.get_submodule(piece.name)), shapes

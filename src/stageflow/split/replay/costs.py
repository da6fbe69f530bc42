"""What the pieces of a model cost, measured one by one on what they were given in the trace."""

from __future__ import annotations

import time

from torch import nn

from stageflow.split.follow import with_values
from stageflow.split.measure import ROUNDS, SLOW_ROUND, smooth, timed
from stageflow.split.replay.events import TraceEvent
from stageflow.split.replay.interception import tensors_in


def measure(model: nn.Module, pieces: list[TraceEvent], hollow: bool) -> list[float] | None:
    """Seconds of forward and backward of each piece, or None if they can't be had: a piece is no call of a module, or
    does not run by itself.

    hollow: the model's parameters are on the meta device.
    """
    if not all(piece.is_atom for piece in pieces):
        return None
    kinds = [_kind(model, piece) for piece in pieces]
    samples: list[list[float]] = [[] for _ in pieces]
    try:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for number, piece in enumerate(pieces):
                samples[number].append(_seconds(model, piece, hollow, first=number == 0))
            if time.perf_counter() - start > SLOW_ROUND:
                break
    except Exception:
        return None
    return smooth(samples, kinds)


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

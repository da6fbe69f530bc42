"""What the events of a timeline gave: enough to make the same timeline up where nothing is computed.

Stage s sends stage s + 1 the log of everything before its cut, as one text that stands for itself: no history of
earlier messages is needed to read it, so micro-batches may come in any order and be lost. Both sides keep a table of
the texts they met, so that making and reading one costs a look-up as long as shapes repeat.
"""

from __future__ import annotations

import base64
import builtins
import json
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stageflow.split.replay.ghost import Ghost
from stageflow.transport.structure import flatten, unflatten


class Fresh(NamedTuple):
    """A new tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Outcome(NamedTuple):
    """What one event gave.

    outline: of the result, in JSON, with tensors left out (see `transport.structure`); empty for one bare tensor; or
        one of the marks below.
    slots: per tensor of the result, `Fresh`, or the position of the argument that it is itself.
    """

    outline: str
    slots: tuple[Fresh | int, ...]

    @property
    def handed_back(self) -> dict[int, int]:
        """Which of the result's tensors is which of the arguments'."""
        return {position: slot for position, slot in enumerate(self.slots) if isinstance(slot, int)}

    @property
    def is_error(self) -> bool:
        """Whether the event raised an exception."""
        return self.outline.startswith(_RAISED)


NOTHING = Outcome("null", ())
OPAQUE = Outcome("?", ())  # a result that is neither tensor nor plain, such as the handle of a hook
_RAISED = "!"  # and the exception
_ARRAY = "#"  # and the values: numpy's arrays are for Python code to look into


class Log(NamedTuple):
    """The events of a timeline, from its start: their names and outcomes."""

    names: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    def to_text(self) -> str:
        plain = [self.names, [[outline, [_slot_out(slot) for slot in slots]] for outline, slots in self.outcomes]]
        return base64.b64encode(zlib.compress(json.dumps(plain).encode())).decode()

    @classmethod
    def from_text(cls, text: str) -> Log:
        names, outcomes = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(tuple(names), tuple(Outcome(outline, tuple(map(_slot_in, slots))) for outline, slots in outcomes))


def _slot_out(slot: Fresh | int) -> Any:
    return slot if isinstance(slot, int) else [list(slot.shape), str(slot.dtype)[6:], slot.requires_grad]


def _slot_in(slot: Any) -> Fresh | int:
    return slot if isinstance(slot, int) else Fresh(tuple(slot[0]), getattr(torch, slot[1]), slot[2])


def describe(result: Any, arguments: Sequence[Tensor], classes: dict[str, type] | None) -> tuple[Outcome, list[Tensor]]:
    """The outcome of an event and the tensors of its result, in order.

    arguments: the event's tensor arguments, in order. classes: as in `flatten`.
    Raises FrameError if the result has no plain form.
    """
    if isinstance(result, Tensor):
        return Outcome("", (_slot(result, arguments),)), [result]
    if result is None:
        return NOTHING, []
    if isinstance(result, (np.ndarray, np.generic)):
        return Outcome(_ARRAY + _array_out(result), ()), []
    tensors, meta = flatten(result, classes)
    found = list(tensors.values())
    return Outcome(json.dumps(meta), tuple(_slot(t, arguments) for t in found)), found


def _slot(tensor: Tensor, arguments: Sequence[Tensor]) -> Fresh | int:
    for position, argument in enumerate(arguments):
        if argument is tensor:
            return position
    return Fresh(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def raised(problem: Exception) -> Outcome:
    """The outcome of an event that raised: the model's code may catch it and go on."""
    return Outcome(_RAISED + json.dumps([type(problem).__name__, str(problem)]), ())


def _array_out(array: np.ndarray | np.generic) -> str:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return json.dumps([array.dtype.str, list(array.shape), isinstance(array, np.generic), data])


def _array_in(text: str) -> Any:
    dtype, shape, is_scalar, data = json.loads(text)
    array = np.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape)
    return array[()] if is_scalar else array


class Unavailable:
    """Stands for the handle of a hook that was set on a ghost."""

    def remove(self) -> None:
        """There is no hook."""


def conjure(
    outcome: Outcome,
    arguments: Sequence[Tensor],
    make: Callable[[int, Fresh], Ghost],
    classes: dict[str, type],
) -> Any:
    """A result that looks like the one described.

    make: (position, what it looks like) -> the ghost of a new tensor.
    """
    tensors: list[Tensor] = [
        arguments[slot] if isinstance(slot, int) else make(position, slot)
        for position, slot in enumerate(outcome.slots)
    ]
    outline = outcome.outline
    if not outline:
        return tensors[0]
    if outline == OPAQUE.outline:
        return Unavailable()
    if outline.startswith(_ARRAY):
        return _array_in(outline[1:])
    if outcome.is_error:
        kind, text = json.loads(outline[1:])
        cls = getattr(builtins, kind, RuntimeError)
        raise (cls if isinstance(cls, type) and issubclass(cls, Exception) else RuntimeError)(text)
    return unflatten(_outline(outline), {str(k): t for k, t in enumerate(tensors)}, classes)


@lru_cache(maxsize=4096)
def _outline(text: str) -> Any:
    return json.loads(text)

"""What the live part of a replay leaves behind: its log, and the values it made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stageflow.errors import FrameError
from stageflow.split.replay.interception import tensors_in
from stageflow.split.replay.log import OPAQUE, Fresh, Log, Outcome, describe, raised

Refs = tuple[weakref.ref[Tensor], ...]


class Record:
    """Grows by one event at a time.

    names, outcomes: of the events, from the first live one.
    """

    def __init__(self, first: int, expected: Log | None) -> None:
        """first: number of the first live event. expected: the log of the last run on inputs like these."""
        self.names: list[str] = []
        self.outcomes: list[Outcome] = []
        self._first = first
        self._expected = expected
        self._born: dict[int, Refs] = {}
        self._born_without_grad: list[tuple[int, Refs]] = []
        self._grad = torch.is_grad_enabled()

    def note(self, number: int, name: str, result: Any, args: Any, kwargs: Any, deep: bool) -> None:
        """Write down an event, and remember the tensors it made as long as anybody holds them.

        deep: what it gives back may be something that it was handed within a list, a tuple or a dict.
        """
        expected = self._expect(number, name)
        if type(result) is Tensor and not _is_among(result, args, kwargs, deep):
            outcome = _outcome_of(result, expected)
            refs: Refs = (weakref.ref(result),)
        elif result is None:
            outcome, refs = describe(None, (), None)[0], ()
        else:
            try:
                outcome, tensors = describe(result, tensors_in((args, kwargs)), None)
            except FrameError:
                outcome, tensors = OPAQUE, []
            refs = tuple(map(weakref.ref, tensors))
        if refs:
            self._born[number] = refs
            if self._grad and not torch.is_grad_enabled():
                self._born_without_grad.append((number, refs))
                outcome = _but_for_grad(outcome, expected)
        self._append(name, outcome, expected)

    def note_error(self, number: int, name: str, problem: Exception) -> None:
        """Write down an event that raised."""
        self._append(name, raised(problem), self._expect(number, name))

    def _expect(self, number: int, name: str) -> Outcome | None:
        if self._expected is None:
            return None
        names, outcomes = self._expected
        return outcomes[number] if number < len(names) and names[number] == name else None

    def _append(self, name: str, outcome: Outcome, expected: Outcome | None) -> None:
        if outcome is not expected and outcome != expected:
            self._expected = None
        self.names.append(name)
        self.outcomes.append(outcome)

    def settle(self) -> None:
        """To be called when the stage is over.

        An autograd.Function runs its forward without grad, and only then makes what that gave require grad.
        """
        for number, refs in self._born_without_grad:
            outcome = self.outcomes[number - self._first]
            slots = tuple(map(_with_grad_now, outcome.slots, refs))
            if slots != outcome.slots:
                self.outcomes[number - self._first] = outcome._replace(slots=slots)
                self._expected = None

    def is_as_expected(self) -> bool:
        """Whether everything went as the last time."""
        return self._expected is not None and len(self._expected.names) == self._first + len(self.names)

    def find(self, number: int, position: int) -> Tensor | None:
        """A tensor that an event made, if it is still there."""
        refs = self._born.get(number)
        return refs[position]() if refs is not None and position < len(refs) else None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that are still there, by key; what an event gave back as it was has the key that it had."""
        for number, refs in self._born.items():
            slots = self.outcomes[number - self._first].slots
            for position, (slot, ref) in enumerate(zip(slots, refs, strict=True)):
                tensor = ref()
                if tensor is not None and not isinstance(slot, int):
                    yield f"{number}.{position}", tensor


def _is_among(result: Tensor, args: Any, kwargs: Any, deep: bool) -> bool:
    """Whether a result is, or may be, one of the arguments."""
    for argument in (*args, *kwargs.values()) if kwargs else args:
        if argument is result or (deep and type(argument) in (list, tuple, dict)):
            return True
    return False


def _outcome_of(result: Tensor, expected: Outcome | None) -> Outcome:
    looks = (result.shape, result.dtype, result.requires_grad)
    if expected is not None and not expected.outline and expected.slots[0] == looks:
        return expected
    return Outcome("", (Fresh(tuple(looks[0]), looks[1], looks[2]),))


def _with_grad_now(slot: Fresh | int, ref: weakref.ref[Tensor]) -> Fresh | int:
    tensor = ref()
    return slot if tensor is None or isinstance(slot, int) else slot._replace(requires_grad=tensor.requires_grad)


def _but_for_grad(outcome: Outcome, expected: Outcome | None) -> Outcome:
    """The expected outcome, if only what requires grad differs."""
    if expected is None or expected.outline != outcome.outline or len(expected.slots) != len(outcome.slots):
        return outcome
    for slot, other in zip(outcome.slots, expected.slots, strict=True):
        if slot != other and (isinstance(slot, int) or isinstance(other, int) or slot[:2] != other[:2]):
            return outcome
    return expected

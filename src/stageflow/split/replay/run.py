"""One replay: one micro-batch through one stage. Everything here is paid for at each event, so it is lean."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stageflow.errors import SplitError
from stageflow.split.replay.ghost import METADATA, Ghost, GhostTouched, become, has_ghost
from stageflow.split.replay.interception import StageExit, Timeline, known, over_what, tensors_in
from stageflow.split.replay.log import Fresh, Outcome, conjure
from stageflow.split.replay.record import Record

if TYPE_CHECKING:
    from stageflow.split.replay.program import ReplayProgram


class Run(Timeline):
    """First the past, made up from the log of the stages before; then, live, this stage's own part.

    log: of the past. record: of the live part.
    arrived: the received values, as the model holds them.
    strayed: an atom that was called in another thread than the rest.
    kept, spare, text: once the stage is over, what is to be sent, by key; which of it only in case; and the log.
    """

    def __init__(
        self, program: ReplayProgram, before: str, look: Any, received: dict[str, Tensor], seed: Callable[[int], None]
    ) -> None:
        """before: the log of the past, as text. look: what inputs like these have in common."""
        super().__init__()
        self.program = program
        self.before = before
        self.look = look
        self.log = program.read_log(before)
        self.past = len(self.log.names)
        self.expected = program.expect(look)
        self.record = Record(self.past, None if self.expected is None else self.expected[0])
        self.arrived: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.spare: list[str] = []
        self.text = ""
        self.strayed: str | None = None
        self._received = received
        self._came = {int(key.partition(".")[0]) for key in received if key[0].isdigit()}
        self._count = 0  # events so far
        self._live = False
        part = self._part = program.part
        self._index, self._stage_of = part.index, part.stage_of
        self._end = sys.maxsize if part.end is None else part.end
        self._calls: dict[str, int] = defaultdict(int)
        self._seed = seed
        self._layer = 0  # counts what may draw random numbers
        self._seed_due = True

    # -- events

    def begin(self) -> None:
        """To be called first, as the active mode."""
        for name, table, ghost in self.program.ghost_buffers:
            if ghost.key in self._received:
                table[name] = self._ghost(ghost.key, Fresh(tuple(ghost.shape), ghost.dtype, False))
        if not self.past:
            self._go_live()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if self.inside or func in METADATA:
            return func(*args, **kwargs)
        iterated = over_what(func)
        if iterated is not None:
            return iter(self.__torch_function__(iterated, types, (args[0], 0)))
        name, random = known(func)
        number = self._count
        if self._live:
            result = self._present_function(number, name, func, args, kwargs)
            key = random and number not in self._part.within_checkpoints
        else:
            result = self._past_function(number, name, random, func, args, kwargs)
            key = random
        self._step(random, key)
        return result

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            self.strayed = path  # what is raised here is lost with its thread
            raise SplitError(f"{path!r} is called in a thread of its own")
        call = self._calls[path]
        self._calls[path] = call + 1
        number = self._count
        if self._live:
            if self._stage_of.get((path, call), 0) > self._index or number >= self._end:
                self.leave()
                raise StageExit
            result = self.run_inside(forward, args, kwargs)
            self.record.note(number, path, result, args, kwargs, deep=True)
        else:
            result = self._conjure(number, self._recall(number, path), args, kwargs)
        self._step(counts=True, key=True)
        return result

    def _step(self, counts: bool, key: bool) -> None:
        """One more event is over.

        counts: it may have drawn random numbers. key: what follows is to draw by a key of its own.
        """
        self._count += 1
        if counts:
            self._layer += 1
            self._seed_due = True
            if key and (self._live or self._part.draws_unseen):
                self._set_seed()
        if not self._live and self._count == self.past:
            self._go_live()

    # -- the past

    def _past_function(self, number: int, name: str, random: bool, func: Any, args: Any, kwargs: Any) -> Any:
        outcome = self._recall(number, name)
        if outcome.is_error:
            self._step(counts=False, key=False)
        if number in self._came or has_ghost(args) or (kwargs and has_ghost(kwargs)):
            result = self._conjure(number, outcome, args, kwargs)
            self._forget_changed(name, outcome, args, kwargs)
            return result
        if random and self._seed_due:
            self._set_seed()
        return func(*args, **kwargs)

    def _recall(self, number: int, name: str) -> Outcome:
        if self.log.names[number] != name:
            raise SplitError(
                f"stage {self._index} replays the model's forward and meets {name!r} as event {number}, where stage "
                f"{self._index - 1} met {self.log.names[number]!r}: the forward depends on something that differs "
                "between workers, such as the time, a global, or the number of calls so far"
            )
        return self.log.outcomes[number]

    def _conjure(self, number: int, outcome: Outcome, args: Any, kwargs: Any) -> Any:
        slots = outcome.slots
        if not outcome.outline and isinstance(slots[0], Fresh):  # the usual case: one new tensor
            return self._ghost(f"{number}.0", slots[0])

        def make(position: int, looks: Fresh) -> Ghost:
            return self._ghost(f"{number}.{position}", looks)

        arguments = tensors_in((args, kwargs)) if any(isinstance(slot, int) for slot in slots) else ()
        for position, slot in enumerate(slots):
            # Dropout, for one, makes a new tensor in training, the only case that the trace saw, and none otherwise.
            if isinstance(slot, int) and f"{number}.{position}" in self._received and type(arguments[slot]) is Ghost:
                self.arrived[f"{number}.{position}"] = arguments[slot]
        return conjure(outcome, arguments, make, self._part.classes)

    def _ghost(self, key: str, looks: Fresh) -> Ghost:
        ghost = Ghost(key, looks.shape, looks.dtype, self.program.device, looks.requires_grad)
        if key in self._received:
            self.arrived[key] = ghost
        return ghost

    def _forget_changed(self, name: str, outcome: Outcome, args: Any, kwargs: Any) -> None:
        """A real tensor that was changed in place by values which are not here is real no more."""
        changed = [s for s in outcome.slots if isinstance(s, int)] if name[-1] == "_" or "out" in kwargs else []
        if name == "__setitem__":
            changed = [0]
        arguments = tensors_in((args, kwargs)) if changed else ()
        for position in changed:
            tensor = arguments[position]
            if type(tensor) is Tensor:
                become(tensor, Ghost.of("?", tensor, tensor.device))

    # -- the present

    def _go_live(self) -> None:
        """The ghosts of values that arrived become these values, wherever the model holds them."""
        self._live = self.inside = True
        for key, ghost in self.arrived.items():
            value = self._received[key]
            # A view, because a re-entrant checkpoint around the last event would detach any other tensor it returns.
            with torch.set_grad_enabled(value.requires_grad):
                real = value.view_as(value)
            become(ghost, real)
        self.inside = False
        if self._seed_due:
            self._set_seed()

    def _present_function(self, number: int, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if number >= self._end:
            self.leave()
            raise StageExit
        try:
            result = func(*args, **kwargs)
        except GhostTouched:
            raise
        except Exception as problem:  # the model may catch it
            self.record.note_error(number, name, problem)
            self._step(counts=False, key=False)
            raise
        self.record.note(number, name, result, args, kwargs, deep=False)
        return result

    def leave(self, output: Any = None) -> None:
        """Hold on to what later stages need, before the frames that hold it are gone.

        output: the model's, where it comes to its end before the last stage.
        """
        if not self._live:
            raise SplitError(f"stage {self._index} came to the end of the model's forward before its own part began")
        self.record.settle()
        self.program.keep(self, output)

    def find(self, key: str) -> Tensor | None:
        """A value of this run, if it is still there."""
        tensor = self.arrived.get(key)
        if tensor is not None:
            return tensor
        if key.startswith("s:"):
            return self.program.buffer_now(key[2:])
        number, _, position = key.partition(".")
        return self.record.find(int(number), int(position)) if number.isdigit() else None

    def where(self) -> str:
        """The part of the model that is running, for messages."""
        names = self.record.names
        return f"the code after {names[-1]!r}" if names else "the beginning of the stage"

    # -- random numbers

    def _set_seed(self) -> None:
        self._seed_due = False
        if self._count - 1 in self._part.within_checkpoints:
            self.program.stand.key_after(partial(self._seed, self._layer))
        else:
            self._seed(self._layer)

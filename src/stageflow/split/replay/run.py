"""One replay: one micro-batch through one stage. Everything here is paid for at each event, so it is lean."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stageflow.errors import FrameError, SplitError
from stageflow.split.replay.ghost import METADATA, Ghost, GhostTouched, become, has_ghost
from stageflow.split.replay.interception import StageExit, Timeline, draws, name_of, open_iteration, tensors_in
from stageflow.split.replay.log import OPAQUE, Fresh, Outcome, conjure, describe, raised
from stageflow.split.replay.reach import reachable

if TYPE_CHECKING:
    from types import FrameType

    from stageflow.split.replay.program import ReplayProgram


class Run(Timeline):
    """First the past, made up from the log of the stages before; then, live, this stage's own part.

    names, outcomes: of the live events.
    before, look: the log of the past, as text; what inputs like these have in common.
    kept, spare, text: at the end, values that the trace says later stages need; further ones that they might; the log.
    """

    def __init__(
        self,
        program: ReplayProgram,
        before: str,
        look: Any,
        received: dict[str, Tensor],
        seed: Callable[[int], None],
    ) -> None:
        super().__init__()
        self.program = program
        self._plan = program.plan
        self.before = before
        self.look = look
        self.log = program.read_log(before)
        self.text = ""
        self.frame: FrameType = sys._getframe(1)
        self.spare: dict[str, Tensor] = {}
        self.received = received
        self.names: list[str] = []
        self.outcomes: list[Outcome] = []
        self.kept: dict[str, Tensor] = {}
        self.expected = program.expect(look)
        self.count = 0  # events so far
        self.live = False
        self._surprised = False
        self._past = len(self.log.names)
        self._index = program.index
        self._stage_of = self._plan.stage_of
        self._end = sys.maxsize if self._plan.end is None else self._plan.end
        self._calls: dict[str, int] = defaultdict(int)
        self._born: dict[int, tuple[weakref.ref[Tensor] | None, ...]] = {}
        self._born_without_grad: list[tuple[int, tuple[weakref.ref[Tensor] | None, ...]]] = []
        self._grad = torch.is_grad_enabled()
        self._arrived: dict[str, Tensor] = {}
        self._came = {int(key.split(".")[0]) for key in received if key[0].isdigit()}
        self._seed = seed
        self._layer = 0
        self._seed_due = True

    # -- events

    def begin(self) -> None:
        """To be called first, as the active mode."""
        for module, name, table, ghost in self.program.ghost_states:
            if ghost.key in self.received:
                table[name] = self._ghost(ghost.key, Fresh(tuple(ghost.shape), ghost.dtype, False))
        if not self._past:
            self._go_live()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if self.inside or func in METADATA:
            return func(*args, **kwargs)
        iteration = open_iteration(func, args)
        if iteration is not None:
            return iteration[2](self.__torch_function__(iteration[0], types, iteration[1]))
        name = name_of(func)
        random = draws(name)
        number = self.count
        if self.live:
            if number >= self._end:
                self.leave()
                raise StageExit
            result = self._present_function(number, name, func, args, kwargs)
        else:
            result = self._past_function(number, name, random, func, args, kwargs)
        self._step(random, key=not self.live or number not in self._plan.within_checkpoints)
        return result

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls[path]
        self._calls[path] = call + 1
        number = self.count
        if self.live:
            if self._stage_of.get((path, call), 0) > self._index or number >= self._end:
                self.leave()
                raise StageExit
            result = self.run_inside(forward, args, kwargs)
            self._note(number, path, result, args, kwargs)
        else:
            result = self._conjure(number, self._recall(number, path), args, kwargs)
        self._step(counts=True, key=True)
        return result

    def _step(self, counts: bool, key: bool) -> None:
        """One more event is over.

        counts: it may have drawn random numbers. key: what follows is to draw by a key of its own.
        """
        self.count += 1
        if counts:
            self._layer += 1
            self._seed_due = True
            if key and (self.live or self._plan.draws_unseen):
                self._set_seed()
        if not self.live and self.count == self._past:
            self._go_live()

    def _present_function(self, number: int, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
        except GhostTouched:
            raise
        except Exception as problem:  # the model may catch it
            self._append(name, raised(problem), self._expect(number, name))
            self._step(counts=False, key=False)
            raise
        self._note(number, name, result, args, kwargs)
        return result

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
                "between workers, such as a random number that torch does not draw, the time, or a global"
            )
        return self.log.outcomes[number]

    def _conjure(self, number: int, outcome: Outcome, args: Any, kwargs: Any) -> Any:
        def make(position: int, looks: Fresh) -> Ghost:
            return self._ghost(f"{number}.{position}", looks)

        arguments = tensors_in((args, kwargs)) if any(isinstance(s, int) for s in outcome.slots) else ()
        return conjure(outcome, arguments, make, self._plan.classes)

    def _ghost(self, key: str, looks: Fresh) -> Ghost:
        ghost = Ghost(key, looks.shape, looks.dtype, self.program.device, looks.requires_grad)
        if key in self.received:
            self._arrived[key] = ghost
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
        self.live = self.inside = True
        for key, ghost in self._arrived.items():
            value = self.received[key]
            # A view, because a re-entrant checkpoint around the last event would detach any other tensor it returns.
            with torch.set_grad_enabled(value.requires_grad):
                real = value.view_as(value)
            become(ghost, real)
        self.inside = False
        if self._seed_due:
            self._set_seed()

    def _note(self, number: int, name: str, result: Any, args: Any, kwargs: Any) -> None:
        expected = self._expect(number, name)
        if type(result) is Tensor and not kwargs and not any(result is a for a in args):
            looks = (result.shape, result.dtype, result.requires_grad)
            if expected is not None and not expected.outline and expected.slots[0] == looks:
                outcome = expected
            else:
                outcome = Outcome("", (Fresh(tuple(looks[0]), looks[1], looks[2]),))
            tensors = [result]
        else:
            try:
                outcome, tensors = describe(result, tensors_in((args, kwargs)), None)
            except FrameError:
                outcome, tensors = OPAQUE, []
        if tensors:
            # What an event was handed and gives back has a key of its own already.
            pairs = zip(outcome.slots, tensors, strict=True)
            refs = self._born[number] = tuple(None if isinstance(s, int) else weakref.ref(t) for s, t in pairs)
            if self._grad and not torch.is_grad_enabled():
                self._born_without_grad.append((number, refs))
                outcome = _like(outcome, expected)
        self._append(name, outcome, expected)

    def _expect(self, number: int, name: str) -> Outcome | None:
        if self._surprised or self.expected is None:
            return None
        names, outcomes = self.expected[0]
        return outcomes[number] if number < len(names) and names[number] == name else None

    def _append(self, name: str, outcome: Outcome, expected: Outcome | None) -> None:
        if outcome is not expected and outcome != expected:
            self._surprised = True
        self.names.append(name)
        self.outcomes.append(outcome)

    def _update_grad(self) -> None:
        """An autograd.Function runs its forward without grad, and makes what that gave require grad afterwards."""
        for number, refs in self._born_without_grad:
            place = number - self._past
            outcome = self.outcomes[place]
            slots = tuple(
                slot._replace(requires_grad=tensor.requires_grad)
                if isinstance(slot, Fresh) and ref is not None and (tensor := ref()) is not None
                else slot
                for slot, ref in zip(outcome.slots, refs, strict=True)
            )
            if slots != outcome.slots:
                self.outcomes[place] = outcome._replace(slots=slots)
                self._surprised = True

    def as_expected(self) -> bool:
        """Whether the log is the one last seen for such inputs."""
        return (
            not self._surprised
            and self.expected is not None
            and len(self.expected[0].names) == self._past + len(self.names)
        )

    def leave(self) -> None:
        """Hold on to what later stages need, before the frames that hold it are gone."""
        if not self.live:
            raise SplitError(f"stage {self._index} came to the end of the model's forward before its own part began")
        for wanted in self._plan.sends.values():
            for key in wanted:
                tensor = self._find(key)
                if tensor is not None:
                    self.kept[key] = tensor
        if self._index + 1 < self._plan.n_stages:
            self._update_grad()
            log, self.text = self.program.write_log(self)
            typical = self.program.is_typical(self.text, log)
            if self._plan.cautious or not typical:
                self.spare = self._alive(self._plan.common if typical else frozenset())

    def _find(self, key: str) -> Tensor | None:
        tensor = self._arrived.get(key)
        if tensor is None and key.startswith("s:"):
            return self.program.state_value(key)
        if tensor is None:
            number, _, position = key.partition(".")
            refs = self._born.get(int(number))
            ref = refs[int(position)] if refs is not None else None
            tensor = ref() if ref is not None else None
        return tensor

    def _alive(self, common: frozenset[str]) -> dict[str, Tensor]:
        """Every value that the model's code can still get at, but for those that each stage makes by itself."""
        held = reachable(sys._getframe(1), self.frame, self.program.module)
        found = {key: tensor for key, tensor in self._arrived.items() if id(tensor) in held}
        for number, refs in self._born.items():
            for position, ref in enumerate(refs):
                tensor = ref() if ref is not None else None
                key = f"{number}.{position}"
                if tensor is not None and key not in common and id(tensor) in held:
                    found[key] = tensor
        return found

    # -- random numbers

    def _set_seed(self) -> None:
        self._seed_due = False
        if self.count - 1 in self._plan.within_checkpoints:
            self.program.stand.key_after(partial(self._seed, self._layer))
        else:
            self._seed(self._layer)

    def where(self) -> str:
        """The part of the model that is running, for messages."""
        return repr(self.names[-1]) + " or after" if self.names else "the beginning of the stage"


def _like(outcome: Outcome, expected: Outcome | None) -> Outcome:
    """The expected outcome, if only what requires grad differs: that is settled later."""
    if expected is None or expected.outline != outcome.outline or len(expected.slots) != len(outcome.slots):
        return outcome
    for slot, other in zip(outcome.slots, expected.slots, strict=True):
        if slot != other and (isinstance(slot, int) or isinstance(other, int) or slot[:2] != other[:2]):
            return outcome
    return expected

"""One run of the model on its example, recorded: the events, and which values each makes, uses and changes."""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # type: ignore[attr-defined]

from stageflow.errors import FrameError
from stageflow.split.replay.events import TraceEvent, Value
from stageflow.split.replay.ghost import METADATA, Ghost
from stageflow.split.replay.interception import (
    Stand,
    Timeline,
    intercept,
    is_compiled,
    known,
    lend,
    over_what,
    tensors_in,
    walk_atoms,
)
from stageflow.split.replay.log import OPAQUE, describe, raised
from stageflow.split.replay.reach import contents
from stageflow.split.replay.surroundings import Surroundings
from stageflow.split.state import named_state


class Trace(Timeline):
    """Records a timeline while the model computes for real.

    escapes: atoms that hand out tensors in other ways than by their result, and so have to be opened; with reasons.
    surroundings: knows which modules must not be opened.
    draws_unseen: whether Python's or numpy's random numbers were drawn.
    output: the values in the model's output.
    """

    def __init__(
        self, model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], hollow: bool = False
    ) -> None:
        super().__init__()
        self._hollow = hollow
        self._model = model
        self.events: list[TraceEvent] = []
        self.escapes: dict[str, str] = {}
        self.surroundings = Surroundings(model)
        self.draws_unseen = False
        self.classes: dict[str, type] = {}
        self.output: list[Value] = []
        self.inputs: list[Value] = []
        self.states: dict[str, Value] = {}
        self.opened: frozenset[str] = frozenset()
        self.atom_paths: list[str] = []
        self._values: dict[int, Value] = {}
        self._calls: dict[str, int] = defaultdict(int)
        self._atom: TraceEvent | None = None
        self._transforming = False
        self._used: set[Value] = set()
        self._compiled = {path for path, module in model.named_modules() if is_compiled(module)}
        for name, tensor, _ in named_state(model):
            if id(tensor) not in self._values:
                self.states[name] = self._enter(Value(f"s:{name}", -1, tensor, isinstance(tensor, nn.Parameter)))
        for position, tensor in enumerate(tensors_in(arguments)):
            if id(tensor) not in self._values:
                self.inputs.append(self._enter(Value(f"i{position}", -1, tensor, True)))

    def _enter(self, value: Value) -> Value:
        self._values[id(value.tensor)] = value
        return value

    # -- events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if self._atom is not None:
            return self._inside_atom(func, args, kwargs)
        iterated = over_what(func)
        if iterated is not None:
            return iter(self.__torch_function__(iterated, types, (args[0], 0)))
        name, random = known(func)
        return self._record(TraceEvent(len(self.events), name, random=random), func, args, kwargs)

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            self.surroundings.seal_in_thread(f"it calls {path!r} in a thread of its own", self.thread)
            return forward(*args, **kwargs)
        event = TraceEvent(len(self.events), path, call=self._calls[path], example=(args, kwargs))
        self._calls[path] += 1

        def run(*args: Any, **kwargs: Any) -> Any:
            if path in self._compiled:
                return self.run_inside(forward, args, kwargs)
            self._atom, self._used, self.inside = event, set(), True
            try:
                return forward(*args, **kwargs)
            finally:
                self._atom, self.inside = None, False

        if path in self._compiled:
            return self._record(event, run, args, kwargs)
        before = self._contents()
        result = self._record(event, run, args, kwargs)
        after = self._contents()
        changed = next((held for i, (held, ids) in before.items() if i in after and after[i][1] != ids), None)
        if changed is not None:
            self.escapes.setdefault(path, f"it changes a {type(changed).__name__} that others can see")
        return result

    def _contents(self) -> dict[int, tuple[Any, tuple[int, ...]]]:
        # From the code that calls the atom, past this method, `atom` and the wrapper around the atom's forward.
        with torch._C.DisableTorchFunction():
            return contents(sys._getframe(4), run_trace.__code__, self._model)

    def _record(self, event: TraceEvent, func: Any, args: Any, kwargs: Any) -> Any:
        event.region = self.surroundings.look(at_module=event.is_atom)
        self.events.append(event)
        arguments = tensors_in((args, kwargs))
        event.uses = [self._known(tensor, event) for tensor in arguments]
        watched = {v: v.tensor._version for v in event.uses} if not event.is_atom else self._versions()
        state = torch.default_generator.get_state()
        try:
            result = self._call(event, func, args, kwargs)
        except Exception as problem:
            event.outcome, event.extracts = raised(problem), True
            raise
        if event.is_atom:
            event.uses.extend(sorted(self._used - set(event.uses), key=lambda v: (v.born, v.key)))
        event.changes = [v for v, version in watched.items() if v.tensor._version != version]
        if not event.is_atom:  # views share memory and version
            changed = {_memory(v.tensor) for v in event.changes}
            event.changes = [v for v in self._values.values() if changed and _memory(v.tensor) in changed]
        chance = event.random or self._unequal(state, torch.default_generator.get_state())
        tainted = event.is_atom or chance or any(v.tainted for v in event.uses)
        for changed in event.changes:
            changed.tainted |= tainted
        self._note_result(event, result, arguments, tainted)
        return result

    def _call(self, event: TraceEvent, func: Any, args: Any, kwargs: Any) -> Any:
        if self._hollow and not event.is_atom:
            args, kwargs = lend(args), lend(kwargs)
        return func(*args, **kwargs)

    def _unequal(self, a: Tensor, b: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return not torch.equal(a, b)

    def _versions(self) -> dict[Value, int]:
        return {v: v.tensor._version for v in self._values.values() if not v.tensor.is_inference()}

    def _note_result(self, event: TraceEvent, result: Any, arguments: list[Tensor], tainted: bool) -> None:
        try:
            event.outcome, found = describe(result, arguments, self.classes)
        except FrameError as problem:
            event.outcome = OPAQUE
            if event.is_atom:
                self.escapes.setdefault(event.name, f"its result {problem}")
            return
        for position, (slot, tensor) in enumerate(zip(event.outcome.slots, found, strict=True)):
            if isinstance(slot, int):
                continue
            known = self._values.get(id(tensor))
            if known is None:
                value = Value(f"{event.number}.{position}", event.number, tensor, tainted)
                event.makes.append(self._enter(value))
            elif not known.key.startswith("s:"):
                # An atom gives a tensor it was not handed but knows from elsewhere: a second name for one value.
                self.escapes.setdefault(event.name, "it gives a tensor that it did not get as an argument")
        event.extracts = tainted and not event.is_atom and event.outcome.outline not in ("", "null") and not found

    # -- the end

    def finish(self, model: nn.Module, output: Any) -> None:
        """Note what can be seen only at the end."""
        self.surroundings.forget()
        end = TraceEvent(len(self.events), "the model's output")
        self.output = [self._known(tensor, end) for tensor in tensors_in(output)]
        for name, tensor, _ in named_state(model):
            state = self.states.get(name)
            if state is not None and state.tensor is not tensor:
                self.events[self._maker_of(tensor)].changes.append(state)

    def _maker_of(self, tensor: Tensor) -> int:
        value = self._values.get(id(tensor))
        if value is not None:
            return max(value.born, 0)
        maker = tensor.__dict__.get("_made_inside")
        return maker[2] if maker is not None and maker[0] is self else 0

    # -- tensors

    def _known(self, tensor: Tensor, event: TraceEvent) -> Value:
        value = self._values.get(id(tensor))
        if value is not None:
            return value
        if functorch.is_functorch_wrapped_tensor(tensor):
            return self._wrapped(tensor, event)
        maker = tensor.__dict__.get("_made_inside")
        if maker is not None and maker[0] is self:
            reason = f"a tensor made inside it reaches {event.name!r} in another way than by its result"
            self.escapes.setdefault(maker[1], reason)
        elif tensor.grad_fn is not None:
            maker_name = tensor.grad_fn.name()
            self.surroundings.seal(
                f"{event.name!r} uses a tensor of {maker_name} that no call of torch in this thread made",
                # what a transform of torch.func gives at its end is made again by each stage that goes through it
                called=event.name if event.is_atom and not self._transforming else None,
            )
        return self._enter(Value(f"c{len(self._values)}", -1, tensor, tainted=False))

    def _wrapped(self, tensor: Tensor, event: TraceEvent) -> Value:
        """What a transform of torch.func made of a tensor stands for that tensor; a ghost can't be transformed."""
        self._transforming = True
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        value = self._values.get(id(tensor))
        if value is None:
            value = Value(f"c{len(self._values)}", -1, tensor, tainted=False)
        elif tensor.requires_grad:
            event.transforms = not self.surroundings.seal("it uses transforms of torch.func", unless_whole=True)
        return value

    def _inside_atom(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self._atom is not None
        for tensor in tensors_in((args, kwargs)):
            value = self._values.get(id(tensor))
            if value is not None:
                self._used.add(value)
            else:
                maker = tensor.__dict__.get("_made_inside")
                if maker is not None and maker[0] is self and maker[1:] != (self._atom.name, self._atom.number):
                    reason = f"a tensor made inside it is used inside {self._atom.name!r}"
                    self.escapes.setdefault(maker[1], reason)
        result = func(*lend(args), **lend(kwargs)) if self._hollow else func(*args, **kwargs)
        for tensor in tensors_in(result):
            if id(tensor) not in self._values:
                vars(tensor).setdefault("_made_inside", (self, self._atom.name, self._atom.number))  # type: ignore[attr-defined]
        return result


def run_trace(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    opened: frozenset[str],
    hollow: bool = False,
) -> Trace:
    """Run ``model`` once, with everything in ``opened`` taken apart, and record it.

    hollow: the model's parameters are ghosts.
    """
    args, kwargs = arguments
    stand = Stand()
    atoms = dict(walk_atoms(model, opened))
    undo = [intercept(module, path, stand) for path, module in atoms.items()]
    trace = Trace(model, arguments, hollow)
    trace.opened, trace.atom_paths = opened, list(atoms)
    stand.current = trace
    before = _unseen_state()
    try:
        with trace:
            output = model(*args, **kwargs)
    finally:
        for step in undo:
            step()
    trace.finish(model, output)
    trace.draws_unseen = _unseen_state() != before
    return trace


def _unseen_state() -> Any:
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(words), rest  # type: ignore[arg-type]


def _memory(tensor: Tensor) -> int:
    """Equal for tensors over the same memory."""
    if isinstance(tensor, Ghost) or tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)
    return tensor.untyped_storage()._cdata

"""What Python code is running around an event: activation checkpoints, autograd functions, modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction, checkpoint

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_REENTRANT = CheckpointFunction.forward.__code__


class Surroundings:
    """Looks at the frames of the running code, for one trace.

    sealed: modules that must not be taken apart, by path, with reasons.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sealed: dict[str, str] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._checkpoints: dict[int, FrameType] = {}

    def look(self, at_module: bool) -> tuple[int, ...]:
        """The calls of torch.utils.checkpoint that are running.

        at_module: a module is called; if an autograd.Function does so, its forward and backward belong together.
        """
        found = []
        for frame in _out_from(sys._getframe(1)):
            if frame.f_code is _CHECKPOINT:
                found.append(id(frame))
                self._checkpoints[id(frame)] = frame  # kept, so that its id stays taken
            elif at_module and frame.f_code is not _REENTRANT and _is_function_forward(frame):
                self._seal("it calls modules inside an autograd.Function", frame)
        return tuple(found)

    def seal(self, reason: str, *, called: str | None = None, unless_whole: bool = False) -> bool:
        """Keep the module whose code is running in one piece.

        called: the module that this code calls, if it does. unless_whole: not if the code is the whole model's.
        Returns whether it is sealed.
        """
        return self._seal(reason, sys._getframe(1), called, unless_whole)

    def seal_in_thread(self, reason: str, thread: int) -> None:
        """Keep the module in one piece whose code is running in another thread, by that thread's number."""
        frame = sys._current_frames().get(thread)
        if frame is not None:
            self._seal(reason, frame)

    def _seal(self, reason: str, frame: FrameType, called: str | None = None, unless_whole: bool = False) -> bool:
        paths = (self._paths.get(id(outer.f_locals.get("self"))) for outer in _out_from(frame))
        path = next((path for path in paths if path is not None and path != called), "")
        if path or not unless_whole:
            self.sealed.setdefault(path, reason)
        return bool(path) or not unless_whole

    def forget(self) -> None:
        """Let go of what the frames looked at hold."""
        for frame in self._checkpoints.values():
            frame.clear()
        self._checkpoints.clear()


def _out_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_function_forward(frame: FrameType) -> bool:
    """Whether this is the forward of an autograd.Function."""
    code = frame.f_code
    return (
        code.co_name == "forward"
        and code.co_argcount > 0
        and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx)
    )

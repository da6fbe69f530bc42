"""What running Python code can still get at.

A tensor that autograd keeps for the backward pass is alive, too, but no later line of the model can name it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})
_LEAVES = (int, float, complex, str, bytes, type(None), type)


def reachable(frame: FrameType | None, stop: CodeType, model: nn.Module, more: Any = None) -> set[int]:
    """Ids of the tensors that frames from ``frame`` out to the one that runs ``stop``, attributes of the model's
    modules, or ``more`` lead to."""
    return {id(item) for item in _walk(frame, stop, model, more) if isinstance(item, Tensor)}


def contents(frame: FrameType | None, stop: CodeType, model: nn.Module) -> dict[int, tuple[Any, tuple[int, ...]]]:
    """The lists, dicts and sets that code can get at: id -> (the container, ids of what is in it)."""
    return {
        id(item): (item, tuple(map(id, _held_by(item))))
        for item in _walk(frame, stop, model)
        if isinstance(item, (list, dict, set))
    }


def _walk(frame: FrameType | None, stop: CodeType, model: nn.Module, more: Any = None) -> Iterator[Any]:
    seen: set[int] = set()
    todo = [v for module in model.modules() for k, v in vars(module).items() if k not in _OF_EVERY_MODULE]
    todo.append(more)
    while frame is not None and frame.f_code is not stop:
        if not _is_machinery(frame):
            todo.extend(frame.f_locals.values())
        frame = frame.f_back
    while todo:
        item = todo.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if not isinstance(item, Tensor):
            todo.extend(_held_by(item))


def _held_by(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return dict.values(item)  # as they lie there: a subclass may make things up in its own method
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if isinstance(item, FunctionType):
        return [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__]
    if isinstance(item, CellType):
        try:
            return [item.cell_contents]
        except ValueError:  # not yet set
            return ()
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return frame.f_locals.values() if frame is not None and not _is_machinery(frame) else ()
    if isinstance(item, (nn.Module, ModuleType)):
        return ()
    held = list(item.__dict__.values()) if isinstance(getattr(item, "__dict__", None), dict) else []
    slots = [name for cls in type(item).__mro__ for name in vars(cls).get("__slots__", ()) if hasattr(item, name)]
    return held + [getattr(item, name) for name in slots]


def _is_machinery(frame: FrameType) -> bool:
    """Whether this is torch's own code around the model's, such as that of activation checkpoints."""
    return frame.f_globals.get("__name__", "").startswith(("torch.utils.", "torch.autograd.", "torch._"))

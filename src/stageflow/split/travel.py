"""Pickling models that pickle, and cloudpickle too, won't take, though all that is in them can travel."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from contextvars import ContextVar
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def needs_packing(model: nn.Module) -> bool:
    """Whether the model has what only `pack` may be able to pickle: hooks, parametrized weights."""
    return any(m._forward_hooks or m._forward_pre_hooks or is_parametrized(m) for m in model.modules())


def pack(value: Any) -> bytes:
    """As cloudpickle.dumps, and more.

    Context variables travel by the name under which a module holds them: a hook defined inside a function travels with
    the globals it uses, and those of transformers' output recorder are context variables.

    Modules with parametrized weights (weight_norm, spectral_norm, ...) are of a class that torch made for each of them
    and that refuses to be pickled, because pickle would not find it; cloudpickle takes the class along.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value that `pack` made these bytes of."""
    return pickle.loads(data)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ContextVar):
            return _named, _name_of(obj)
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return object.__new__, (type(obj),), obj.__dict__
        return super().reducer_override(obj)


def _named(module: str, *path: str) -> Any:
    value = importlib.import_module(module)
    for name in path:
        value = getattr(value, name)
    return value


def _name_of(variable: ContextVar[Any]) -> tuple[str, ...]:
    """Where a module holds the variable, itself or in an attribute of an object."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                return module_name, name
            if type(value).__module__ == module_name and isinstance(getattr(value, "__dict__", None), dict):
                attribute = next((k for k, v in value.__dict__.items() if v is variable), None)
                if attribute is not None:
                    return module_name, name, attribute
    raise pickle.PicklingError(f"{variable!r}, which a hook of the model uses, belongs to no imported module")

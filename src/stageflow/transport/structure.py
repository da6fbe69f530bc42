"""Nested Python values as named tensors plus a plain description, and back.

``flatten`` takes a value apart into tensors (which travel as they are) and ``meta``: a JSON-able outline of
everything else. In the outline None, bool, int, finite float, str and list stand for themselves; anything else is a
dict with exactly one key, the kind:

    {"tensor": "0"}   {"tuple": [...]}   {"dict": {"a": ...}}   {"items": [[key, value], ...]}   {"slice": [0, 4, None]}

Classes are named, never shipped: ``unflatten`` looks a name up in the table it is given or in modules that are
already imported, takes it only if it is a dataclass, named tuple, enum or the like, and fills its fields without
calling its code. A hostile outline can therefore build odd values but run nothing. Objects of any other class (the
key-value caches of transformers, for one) travel only between parties that share a table of classes: one that lists
a class vouches for it.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageflow.errors import FrameError

Classes = Mapping[str, type]
MAX_DEPTH = 100


def flatten(value: Any, classes: dict[str, type] | None = None, where: str = "value") -> tuple[dict[str, Tensor], Any]:
    """Take a nested value apart.

    classes: if given, every class met is added to it under its name, ready to be handed to `unflatten` where a
        class can't be found by importing (one defined inside a function, or in a notebook). Only with it do plain
        objects have a form: ones of ordinary Python classes, without slots, that are no modules.
    where: what to call the value in an error.
    Returns (tensors, meta). The tensors are the value's own, not copies, named "0", "1", ... in order of appearance;
    a tensor that appears twice is listed once. Raises FrameError for a value without a plain form, naming its place.
    """
    if isinstance(value, Tensor):
        return {"0": value}, {"tensor": "0"}
    walk = _Flattener(classes)
    try:
        meta = walk.encode(value)
    except _NoPlainFormError as problem:
        raise FrameError(f"{where}{''.join(walk.path)} {problem}") from None
    return walk.tensors, meta


def unflatten(meta: Any, tensors: Mapping[str, Tensor], classes: Classes | None = None) -> Any:
    """Put together what `flatten` took apart.

    tensors: by the names `flatten` gave them; they become part of the result, not copied.
    classes: name ("module:qualname") -> class, looked at before imported modules.
    Raises FrameError if meta is no such outline, a tensor is missing, or a class can't be found here.
    """
    walk = _Unflattener(tensors, classes or {})
    try:
        return walk.decode(meta)
    except FrameError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError, RuntimeError) as problem:
        raise FrameError(f"this is no outline of a value: {problem} (in {str(meta)[:200]})") from problem


def class_name(cls: type) -> str:
    """The name a class travels under."""
    return f"{cls.__module__}:{cls.__qualname__}"


def imported(name: str) -> Any:
    """What modules that are already imported here have under a class's name; None where they have nothing."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


class _NoPlainFormError(Exception):
    """Says what is wrong with the value at the walk's path."""


def is_model_output(cls: type) -> bool:
    """Whether a class is a transformers ModelOutput or the like: a dataclass that is an ordered dict of its fields."""
    return issubclass(cls, OrderedDict) and dataclasses.is_dataclass(cls)


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _is_return_type(cls: type) -> bool:
    # What torch.max(x, dim) and its kin give: tuples with field names, made in C.
    return issubclass(cls, tuple) and cls.__module__ == "torch.return_types"


class _Blank:
    """An object that is nothing but its ``__dict__``."""


def _is_plain_object(cls: type) -> bool:
    """Whether an instance is nothing but its ``__dict__``: no slots, nothing built in, nothing that runs at its end."""
    same_make = (cls.__basicsize__, cls.__dictoffset__) == (_Blank.__basicsize__, _Blank.__dictoffset__)
    return same_make and not issubclass(cls, torch.nn.Module) and not hasattr(cls, "__del__")


class _Flattener:
    def __init__(self, classes: dict[str, type] | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.path: list[str] = []
        self._classes = classes
        self._names: dict[int, str] = {}  # id of a tensor -> its name; the tensors dict keeps them alive
        self._arrays: list[Tensor] = []

    def encode(self, value: Any) -> Any:
        cls = type(value)
        if cls in _AS_IS:
            return value
        encode = _ENCODERS.get(cls)
        if encode is not None:
            return encode(self, value)
        return self._encode_other(cls, value)

    def _encode_other(self, cls: type, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, enum.Enum):
            return self._enum(cls, value)
        if is_model_output(cls):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            fields |= {key: value[key] for key in value}
            return {"output": [self._name(cls), self._fields(fields), list(value)]}
        if dataclasses.is_dataclass(cls):
            return {"dataclass": [self._name(cls), self._fields(_attributes(value))]}
        if _is_namedtuple(cls):
            return {"namedtuple": [self._name(cls), self._list(value)]}
        if _is_return_type(cls):
            return {"returned": [self._name(cls), self._list(value)]}
        if isinstance(value, np.generic):
            return {"numpy_scalar": self._array(np.asarray(value))}
        if self._classes is not None:
            if isinstance(value, type):
                return {"class": self._name(value)}
            if _is_plain_object(cls):
                return {"object": [self._name(cls), self._fields(vars(value))]}
        raise _NoPlainFormError(
            f"is a {cls.__module__}.{cls.__qualname__}, which can't travel between stages: only tensors, numbers, "
            "strings, lists, tuples, dicts, sets, dataclasses, named tuples, enums and numpy arrays can"
        )

    def tensor(self, value: Tensor) -> dict[str, str]:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = str(len(self.tensors))
            self.tensors[name] = value
        return {"tensor": name}

    def _array(self, value: np.ndarray) -> str:
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
        except TypeError:
            raise _NoPlainFormError(f"is a numpy array of {value.dtype}, for which torch has no type") from None
        return self.tensor(tensor)["tensor"]

    def _name(self, cls: type) -> str:
        name = class_name(cls)
        if self._classes is not None:
            self._classes[name] = cls
        return name

    def _enum(self, cls: type, value: enum.Enum) -> Any:
        if value.name not in cls.__members__:
            raise _NoPlainFormError(f"is {value!r}, a mixture of members, which has no name of its own")
        return {"enum": [self._name(cls), value.name]}

    def _at(self, step: str, value: Any) -> Any:
        self.path.append(step)
        if len(self.path) > MAX_DEPTH:
            del self.path[4:]
            raise _NoPlainFormError(f"is nested more than {MAX_DEPTH} levels deep, or contains itself")
        encoded = self.encode(value)
        self.path.pop()
        return encoded

    def _list(self, values: Iterable[Any]) -> list[Any]:
        return [self._at(f"[{i}]", v) for i, v in enumerate(values)]

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._at(f".{name}", v) for name, v in fields.items()}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": {key: self._at(f"[{key!r}]", v) for key, v in value.items()}}
        return {"items": self._items(value)}

    def _items(self, value: dict[Any, Any]) -> list[Any]:
        return [[self._at(f".keys()[{i}]", k), self._at(f"[{k!r}]", v)] for i, (k, v) in enumerate(value.items())]

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"float": str(value)}


def _attributes(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that are set, and whatever else its instance carries."""
    found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return found | getattr(value, "__dict__", {})


_AS_IS = frozenset({type(None), bool, int, str})
_ENCODERS: dict[type, Callable[[_Flattener, Any], Any]] = {
    Tensor: _Flattener.tensor,
    torch.nn.Parameter: _Flattener.tensor,
    list: _Flattener._list,
    tuple: lambda walk, v: {"tuple": walk._list(v)},
    dict: _Flattener._dict,
    float: _Flattener._float,
    OrderedDict: lambda walk, v: {"ordered": walk._items(v)},
    set: lambda walk, v: {"set": walk._list(v)},
    frozenset: lambda walk, v: {"frozenset": walk._list(v)},
    complex: lambda walk, v: {"complex": [repr(v.real), repr(v.imag)]},
    bytes: lambda walk, v: {"bytes": base64.b64encode(v).decode("ascii")},
    slice: lambda walk, v: {"slice": walk._list((v.start, v.stop, v.step))},
    range: lambda walk, v: {"range": [v.start, v.stop, v.step]},
    torch.Size: lambda walk, v: {"size": list(v)},
    torch.dtype: lambda walk, v: {"dtype": str(v).removeprefix("torch.")},
    torch.device: lambda walk, v: {"device": str(v)},
    type(Ellipsis): lambda walk, v: {"ellipsis": None},
    np.ndarray: lambda walk, v: {"numpy": walk._array(v)},
}


class _Unflattener:
    def __init__(self, tensors: Mapping[str, Tensor], classes: Classes) -> None:
        self.tensors = tensors
        self._classes = classes

    def decode(self, meta: Any) -> Any:
        cls = type(meta)
        if cls in _AS_IS or cls is float:
            return meta
        if cls is list:
            return [self.decode(item) for item in meta]
        if cls is not dict or len(meta) != 1:
            raise FrameError(f"an outline holds plain values and dicts with one key, not {str(meta)[:200]}")
        ((kind, body),) = meta.items()
        decode = _DECODERS.get(kind)
        if decode is None:
            raise FrameError(f"unknown kind of value {kind!r} in an outline: the sender runs another version?")
        return decode(self, body)

    def tensor(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise FrameError(f"the outline names tensor {name!r}, but only {sorted(self.tensors)} came") from None

    def array(self, name: str) -> Any:
        """A numpy array; in place of one whose values did not come (see `Batch.bundle`) its tensor on meta, for which
        numpy has nothing, so that code which reads it all the same fails."""
        tensor = self.tensor(name)
        return tensor if tensor.is_meta else tensor.cpu().numpy()

    def each(self, body: list[Any]) -> Iterable[Any]:
        return map(self.decode, _expect(list, body))

    def pairs(self, body: list[Any]) -> Iterable[tuple[Any, Any]]:
        return ((self.decode(k), self.decode(v)) for k, v in _expect(list, body))

    def fields(self, body: dict[str, Any]) -> dict[str, Any]:
        return {name: self.decode(v) for name, v in _expect(dict, body).items()}

    def find(self, name: str, fits: Callable[[type], bool], what: str) -> type:
        """The class of that name, if it is known here and of the right sort."""
        found = self._classes.get(name)
        if found is None:
            found = imported(name)
        if found is None:
            raise FrameError(
                f"class {name!r} is not known in this process: define it at the top level of a module that is "
                "imported here too, or pass it in `classes`"
            )
        if not (isinstance(found, type) and fits(found)):
            raise FrameError(f"{name!r} is not {what}")
        return found

    def dataclass(self, body: list[Any]) -> Any:
        name, fields = body
        cls = self.find(name, lambda c: dataclasses.is_dataclass(c) and not is_model_output(c), "a dataclass")
        value = object.__new__(cls)
        for key, item in self.fields(fields).items():
            object.__setattr__(value, key, item)
        return value

    def output(self, body: list[Any]) -> Any:
        name, fields, keys = body
        value = OrderedDict.__new__(self.find(name, is_model_output, "a dataclass that is an ordered dict"))
        decoded = self.fields(fields)
        for key, item in decoded.items():
            object.__setattr__(value, key, item)
        for key in keys:
            OrderedDict.__setitem__(value, key, decoded[key])
        return value

    def namedtuple(self, body: list[Any]) -> Any:
        name, items = body
        cls = self.find(name, _is_namedtuple, "a named tuple")
        values = tuple(self.each(items))
        if len(values) != len(cls._fields):  # type: ignore[attr-defined]
            raise FrameError(f"{name!r} has fields {cls._fields}, but {len(values)} values came")  # type: ignore[attr-defined]
        return tuple.__new__(cls, values)

    def returned(self, body: list[Any]) -> Any:
        name, items = body
        return self.find(name, _is_return_type, "one of torch's result types")(tuple(self.each(items)))

    def enum(self, body: list[Any]) -> Any:
        name, member = body
        cls = self.find(name, lambda c: issubclass(c, enum.Enum), "an enum")
        return cls.__members__[member]  # type: ignore[attr-defined]

    def listed(self, name: str) -> type:
        """A class that the table vouches for."""
        if name not in self._classes:
            raise FrameError(f"class {name!r} is not in the table of classes that may be used here")
        return self._classes[name]

    def object(self, body: list[Any]) -> Any:
        name, fields = body
        cls = self.listed(name)
        if not _is_plain_object(cls):
            raise FrameError(f"{name!r} is not a plain class")
        value = object.__new__(cls)
        vars(value).update(self.fields(fields))
        return value

    def dtype(self, body: str) -> torch.dtype:
        return _expect(torch.dtype, getattr(torch, _expect(str, body)))


def _expect(cls: type, value: Any) -> Any:
    if not isinstance(value, cls):
        raise FrameError(f"expected a {cls.__name__} in an outline, found {str(value)[:200]}")
    return value


_DECODERS: dict[str, Callable[[_Unflattener, Any], Any]] = {
    "tensor": _Unflattener.tensor,
    "tuple": lambda walk, b: tuple(walk.each(b)),
    "dict": _Unflattener.fields,
    "items": lambda walk, b: dict(walk.pairs(b)),
    "ordered": lambda walk, b: OrderedDict(walk.pairs(b)),
    "set": lambda walk, b: set(walk.each(b)),
    "frozenset": lambda walk, b: frozenset(walk.each(b)),
    "float": lambda walk, b: float(_expect(str, b)),
    "complex": lambda walk, b: complex(float(b[0]), float(b[1])),
    "bytes": lambda walk, b: base64.b64decode(b, validate=True),
    "slice": lambda walk, b: slice(*walk.each(b)),
    "range": lambda walk, b: range(*b),
    "size": lambda walk, b: torch.Size(b),
    "dtype": _Unflattener.dtype,
    "device": lambda walk, b: torch.device(_expect(str, b)),
    "ellipsis": lambda walk, b: Ellipsis,
    "numpy": _Unflattener.array,
    "numpy_scalar": lambda walk, b: walk.array(b)[()],
    "output": _Unflattener.output,
    "dataclass": _Unflattener.dataclass,
    "namedtuple": _Unflattener.namedtuple,
    "returned": _Unflattener.returned,
    "enum": _Unflattener.enum,
    "object": _Unflattener.object,
    "class": _Unflattener.listed,
}

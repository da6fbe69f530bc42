"""Packing what goes to a worker process, and naming what can't.

cloudpickle takes lambdas, local classes and what a notebook or script defined in ``__main__`` along by value. Used
between the driver and its own children only.
"""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from stageflow.errors import LaunchError
from stageflow.launch.failure import Failure, RemoteError

_DEPTH = 12


def pack(value: object, name: str) -> bytes:
    """Bytes of ``value``. Raises LaunchError that says which part of ``name`` can't travel, and why."""
    try:
        return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        path, part, reason = culprit(value, name, error)
        raise LaunchError(
            f"{path} can't travel to another process: {type(part).__module__}.{type(part).__qualname__} object, "
            f"{type(reason).__name__}: {reason}. Make it in the worker instead, inside the factory"
        ) from error


def unpack(data: bytes) -> Any:
    """What `pack` packed."""
    return pickle.loads(data)


def culprit(value: object, name: str, error: Exception) -> tuple[str, object, Exception]:
    """The innermost part of a value that fails to pack: its path, itself, and its own error."""
    seen: set[int] = set()
    for _ in range(_DEPTH):
        seen.add(id(value))
        for label, part in _parts(value):
            if id(part) in seen:
                continue
            failure = _failure(part)
            if failure is not None:
                name, value, error = name + label, part, failure
                break
        else:
            break
    return name, value, error


def _failure(part: object) -> Exception | None:
    try:
        cloudpickle.dumps(part)
    except Exception as error:
        return error
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What packing a value would pack with it, each with how one writes the way there."""
    match value:
        case Mapping():
            yield from ((f"[{key!r}]", item) for key, item in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
        case functools.partial():
            yield ".func", value.func
            yield from ((f".args[{index}]", item) for index, item in enumerate(value.args))
            yield from ((f".keywords[{key!r}]", item) for key, item in value.keywords.items())
        case types.MethodType():
            yield ".__self__", value.__self__
        case types.FunctionType():
            yield from _parts_of_function(value)
        case type():
            yield from ((f".{key}", item) for key, item in vars(value).items() if isinstance(item, Callable))
        case _:
            yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())
            for slot in getattr(type(value), "__slots__", ()):
                if isinstance(slot, str) and hasattr(value, slot):
                    yield f".{slot}", getattr(value, slot)
            yield f".__class__({type(value).__qualname__})", type(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<variable {variable}>", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from ((f".<default {index}>", item) for index, item in enumerate(function.__defaults__ or ()))
    for variable in function.__code__.co_names:
        if variable in function.__globals__:
            yield f".<global {variable}>", function.__globals__[variable]


def pack_failure(failure: Failure) -> bytes:
    """Bytes of a worker's failure; an exception that does not survive the way is replaced by a `RemoteError`."""
    try:
        data = cloudpickle.dumps(failure, protocol=pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)
    except Exception:
        stand_in = RemoteError(failure.what)
        data = cloudpickle.dumps(replace(failure, error=stand_in), protocol=pickle.HIGHEST_PROTOCOL)
    return data


def unpack_failure(data: bytes) -> Failure:
    """What `pack_failure` packed; the exception bears its remote traceback as a note."""
    failure: Failure = pickle.loads(data)
    failure.error.add_note(f"\nTraceback on worker {failure.rank}:\n{failure.text.rstrip()}")
    return failure

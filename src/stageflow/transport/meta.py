"""The plain part of a message as JSON: nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

from stageflow.errors import FrameError

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode_meta(meta: Any) -> bytes:
    """Plain values as JSON. Raises FrameError for anything that would come back changed."""
    if meta is None:
        return b""
    _check_plain(meta, 0)
    return _to_json(meta).encode("ascii")


def decode_meta(data: bytes) -> Any:
    """The inverse of `encode_meta`."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError) as problem:
        raise FrameError(f"the plain part of a message is damaged: {problem}") from None


def _check_plain(meta: Any, depth: int) -> None:
    cls = type(meta)
    if cls is str or cls is int or cls is float or cls is bool or meta is None:
        return
    if depth > 400:
        raise FrameError("the plain part of a message is nested too deep")
    if cls is list:
        for item in meta:
            _check_plain(item, depth + 1)
    elif cls is dict and all(type(key) is str for key in meta):
        for item in meta.values():
            _check_plain(item, depth + 1)
    else:
        raise FrameError(
            f"the meta of a bundle holds a {cls.__name__} ({str(meta)[:80]}): only None, bool, int, float, str, lists "
            "and dicts with str keys are plain; use transport.structure.flatten for other values"
        )

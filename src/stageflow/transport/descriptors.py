"""What a frame says of each tensor: name, dtype, shape, order of its dimensions in memory, where its bytes start."""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stageflow.errors import FrameError

ALIGNMENT = 64
MAX_DIMENSIONS = 64
_DESCRIPTOR = struct.Struct("<HBBQ")  # bytes of name, dtype code, dimensions, offset

# The number of a dtype on the wire. Append only.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES = {code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")
}
_NUMPY_DIMENSIONS = 32  # numpy 1 knows no more

Buffer = np.ndarray | bytearray
"""Writable bytes that tensors can lie in."""


class Described(NamedTuple):
    """One tensor of a frame, checked to lie within it.

    simple: numpy's dtype, where numpy can lay the tensor out by itself, which takes half the time.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    offset: int
    numel: int
    simple: np.dtype[Any] | None


def dimension_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory, as in a result computed from it; None: as numbered."""
    return None if tensor.is_contiguous() else _order_of_strides(torch.empty_like(tensor, device="meta").stride())


@functools.lru_cache(1024)
def _order_of_strides(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    numbered = tuple(range(len(strides)))
    order = tuple(sorted(numbered, key=lambda dim: -strides[dim]))
    return None if order == numbered else order


def in_order_of_memory(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of memory, contiguous."""
    order = dimension_order(tensor)
    return (tensor if order is None else tensor.permute(order)).contiguous()


def describe(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], Sequence[int] | None]], offsets: list[int] | None = None
) -> tuple[bytes, int]:
    """(descriptors of tensors laid one after the other, bytes they take together); see `parse_descriptors`.

    tensors: (name, dtype, shape, see `dimension_order`) of each. offsets: is extended by where each one starts.
    """
    pieces, at = [], 0
    for name, dtype, shape, order in tensors:
        code = _CODES.get(dtype)
        if code is None:
            raise FrameError(f"tensor {name!r} has dtype {dtype}, which has no place in a frame")
        if len(shape) > MAX_DIMENSIONS:
            raise FrameError(f"tensor {name!r} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
        text = name.encode()
        pieces += [_DESCRIPTOR.pack(len(text), code, len(shape), at), struct.pack(f"<{len(shape)}Q", *shape)]
        pieces += [bytes(order or range(len(shape))), text]
        if offsets is not None:
            offsets.append(at)
        at = aligned(at + math.prod(shape) * dtype.itemsize)
    return b"".join(pieces), at


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def parse_descriptors(count: int, payload: int, data: bytes) -> tuple[Described, ...]:
    """Read and check the descriptors of ``count`` tensors that lie in ``payload`` bytes. Raises FrameError."""
    found, at = [], 0
    try:
        for _ in range(count):
            n_name, code, n_dims, offset = _DESCRIPTOR.unpack_from(data, at)
            at += _DESCRIPTOR.size
            shape = struct.unpack_from(f"<{n_dims}Q", data, at)
            at += 8 * n_dims
            order = tuple(data[at : at + n_dims])
            at += n_dims
            name = data[at : at + n_name].decode()
            at += n_name
            found.append(_checked(name, code, shape, order, offset, payload))
    except (struct.error, UnicodeDecodeError) as problem:
        raise FrameError(f"the descriptors of a frame are damaged: {problem}") from None
    if at != len(data) or len({d.name for d in found}) != count:
        raise FrameError(f"the descriptors of a frame are damaged: {count} tensors in {at} of {len(data)} bytes")
    return tuple(found)


def _checked(
    name: str, code: int, shape: tuple[int, ...], order: tuple[int, ...], offset: int, payload: int
) -> Described:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise FrameError(f"tensor {name!r} has the dtype number {code}, unknown to torch {torch.__version__}")
    numel = math.prod(shape)
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > sys.maxsize or offset % ALIGNMENT:
        raise FrameError(f"tensor {name!r} has an impossible shape {shape} or offset {offset}")
    if offset + numel * dtype.itemsize > payload:
        raise FrameError(f"tensor {name!r} of {dtype} {shape} at {offset} does not fit {payload} bytes of payload")
    numbered = tuple(range(len(shape)))
    if tuple(sorted(order)) != numbered:
        raise FrameError(f"tensor {name!r} of shape {shape} has an impossible order of dimensions {order}")
    simple = _NUMPY.get(dtype) if order == numbered and numel and len(shape) <= _NUMPY_DIMENSIONS else None
    return Described(name, dtype, shape, None if order == numbered else order, offset, numel, simple)


def tensor_at(memory: Buffer, start: int, described: Described) -> Tensor:
    """The tensor whose bytes lie at ``start + described.offset`` of ``memory``, which it keeps alive."""
    _, dtype, shape, _, offset, numel, simple = described
    if simple is not None:
        return torch.from_numpy(np.ndarray(shape, simple, memory, start + offset))
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    return laid_out(torch.frombuffer(memory, dtype=dtype, count=numel, offset=start + offset), described)


def laid_out(flat: Tensor, described: Described) -> Tensor:
    """The tensor whose values lie in ``flat`` as they lie in memory."""
    shape, order = described.shape, described.order
    if order is None:
        return flat if len(shape) == 1 else flat.view(shape)
    back = [order.index(dim) for dim in range(len(order))]
    return flat.view([shape[dim] for dim in order]).permute(back)

"""Self-describing frames: one message as bytes that any receiver can read without having been told a shape.

    ┌────────┬──────────────┬───────────┬──┬──────────────┬──┬──────────────┬──┐
    │ prefix │ descriptors  │ meta JSON │░░│ tensor bytes │░░│ tensor bytes │░░│     ░ pads to 64 bytes
    └────────┴──────────────┴───────────┴──┴──────────────┴──┴──────────────┴──┘

prefix: magic, version, the tag, the sizes of what follows, and a checksum of prefix, descriptors and meta.
descriptors: one per tensor: name, dtype, shape, order of its dimensions in memory, offset of its bytes from the start
of the frame. The bytes have no gaps; the order travels because results depend on it: dropout hands out its mask as
values lie in memory, and ``view`` takes some orders only.

Everything is little endian. Nothing is ever unpickled, and every number that was read is checked before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import json
import marshal
import math
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stageflow.errors import FrameError
from stageflow.graph import Bundle
from stageflow.transport.base import Tag

memmove = ctypes.memmove  # lets other threads run while it copies

MAGIC = b"sflw"
VERSION = 1
ALIGNMENT = 64
MAX_DIMENSIONS = 64
_ORDINARY = (Tensor, torch.nn.Parameter)
_GLANCE = 512  # bytes read at once: most headers are shorter

_PREFIX = struct.Struct("<4sHHIIQq8siiqI4x")
PREFIX_SIZE = _PREFIX.size
_CHECKSUM = struct.Struct("<I4x")  # the end of the prefix
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_DESCRIPTOR = struct.Struct("<HBBQ")  # bytes of name, dtype code, dimensions, offset

# The number of a dtype on the wire. Append only.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES = {code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Frame(NamedTuple):
    """A message ready to be copied out.

    head: prefix, descriptors and meta.
    parts: (offset in the frame, contiguous CPU tensor) in ascending order; the frame refers to them, not to copies.
    size: bytes of the whole frame; bytes between the parts are undefined.
    """

    tag: Tag
    head: bytes
    parts: tuple[tuple[int, Tensor], ...]
    size: int

    def copy_to(self, address: int) -> None:
        """Copy the frame to ``size`` bytes of memory at an address."""
        memmove(address, self.head, len(self.head))
        for offset, tensor in self.parts:
            memmove(address + offset, tensor.data_ptr(), tensor.nbytes)

    def copy_piece(self, address: int, start: int, stop: int) -> None:
        """Copy bytes ``start`` to ``stop`` of the frame to an address."""
        for offset, source, length in self._segments():
            first, last = max(offset, start), min(offset + length, stop)
            if first < last:
                memmove(address + first - start, source + first - offset, last - first)

    def _segments(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the frame, address, bytes) of everything that has to be copied."""
        yield 0, ctypes.cast(ctypes.c_char_p(self.head), ctypes.c_void_p).value or 0, len(self.head)
        for offset, tensor in self.parts:
            yield offset, tensor.data_ptr(), tensor.nbytes


class _Layout(NamedTuple):
    """The part of a frame that repeats from one micro-batch to the next."""

    descriptors: bytes  # with offsets relative to the first payload byte
    offsets: tuple[int, ...]
    payload: int


class Encoder:
    """Makes frames; remembers descriptors and metas, since both repeat from micro-batch to micro-batch."""

    def __init__(self, remember: int = 256) -> None:
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._metas: dict[bytes, bytes] = {}
        self._remember = remember

    def encode(self, tag: Tag, bundle: Bundle) -> Frame:
        """The frame of one message. Raises FrameError for what has no frame, naming the tensor and the tag."""
        tensors = bundle.tensors
        try:
            ready = [t if _is_plain(t) else _made_plain(t) for t in tensors.values()]
            key = tuple([(name, t.dtype, t.shape, dimension_order(t)) for name, t in zip(tensors, ready, strict=True)])
            layout = self._layouts.get(key)
            if layout is None:
                layout = self._remembered(key)
            meta = self._encoded(bundle.meta)
            head, start = _head(tag, layout, meta)
        except FrameError as problem:
            raise FrameError(f"can't send {tuple(tag)}: {problem}") from None
        parts = tuple([(start + offset, _in_order(t)) for offset, t in zip(layout.offsets, ready, strict=True)])
        return Frame(tag, head, parts, start + layout.payload)

    def _encoded(self, meta: Any) -> bytes:
        """As `encode_meta`. One seen before is known by its marshalled form, made in a tenth of the time."""
        if meta is None:
            return b""
        try:
            form = marshal.dumps(meta, 2)  # without references, so equal values of equal types look the same
        except ValueError:
            return encode_meta(meta)
        known = self._metas.get(form)
        if known is None:
            known = encode_meta(meta)
            if len(form) <= _GLANCE:
                if len(self._metas) >= self._remember:
                    self._metas.clear()
                self._metas[form] = known
        return known

    def _remembered(self, key: tuple[Any, ...]) -> _Layout:
        if len(self._layouts) >= self._remember:
            self._layouts.clear()
        layout = self._layouts[key] = _layout(key)
        return layout


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes at data_ptr are the tensor's values in order."""
    return (
        type(tensor) in _ORDINARY
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _made_plain(tensor: Tensor) -> Tensor:
    return _dense(tensor).detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def dimension_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory, as in a result computed from it; None: as numbered."""
    return None if tensor.is_contiguous() else _order_of_strides(torch.empty_like(tensor, device="meta").stride())


@functools.lru_cache(1024)
def _order_of_strides(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    numbered = tuple(range(len(strides)))
    order = tuple(sorted(numbered, key=lambda dim: -strides[dim]))
    return None if order == numbered else order


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of memory, contiguous."""
    order = dimension_order(tensor)
    return (tensor if order is None else tensor.permute(order)).contiguous()


def _dense(tensor: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        raise FrameError(f"a {type(tensor).__name__} can't travel: send the ordinary tensors it is made of")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise FrameError(f"a {kind} tensor of shape {tuple(tensor.shape)} can't travel: only dense ones with data can")
    return tensor


def portable_copy(tag: Tag, bundle: Bundle) -> Bundle:
    """What a receiver would get of a message, without the detour over bytes: own, without gaps, on the same device.

    Raises the same FrameErrors as encoding would.
    """
    _kind_bytes(tag.kind)
    _layout(tuple((name, t.dtype, t.shape, None) for name, t in bundle.tensors.items()))
    tensors = {
        name: _dense(t).detach().as_subclass(Tensor).resolve_conj().resolve_neg().clone()
        for name, t in bundle.tensors.items()
    }
    return Bundle(tensors, decode_meta(encode_meta(bundle.meta)))


def _layout(key: tuple[Any, ...]) -> _Layout:
    offsets: list[int] = []
    descriptors, payload = describe(key, offsets)
    return _Layout(descriptors, tuple(offsets), payload)


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
        at = _aligned(at + math.prod(shape) * dtype.itemsize)
    return b"".join(pieces), at


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _head(tag: Tag, layout: _Layout, meta: bytes) -> tuple[bytes, int]:
    """(prefix, descriptors and meta; where the payload starts)."""
    step, kind, source, target, microbatch = tag
    body = layout.descriptors + meta
    start = _aligned(PREFIX_SIZE + len(body))
    word = _kind_bytes(kind)
    sizes = (len(layout.offsets), len(layout.descriptors), len(meta), start + layout.payload)
    try:
        prefix = _PREFIX.pack(MAGIC, VERSION, *sizes, step, word, source, target, microbatch, 0)
    except struct.error as problem:
        raise FrameError(f"a number is too large for a frame: {problem}") from None
    checksum = zlib.crc32(body, zlib.crc32(prefix[:-8]))
    return b"".join((prefix[:-8], _CHECKSUM.pack(checksum), body)), start


@functools.cache
def _kind_bytes(kind: str) -> bytes:
    if not 0 < len(kind) <= 8 or not kind.isascii() or not kind.isprintable():
        raise FrameError(f"the kind of a tag is 1 to 8 printable ASCII characters, got {kind!r}")
    return kind.encode("ascii")


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


class Header(NamedTuple):
    """What stands in the first bytes of a frame."""

    tag: Tag
    n_tensors: int
    descriptors: int  # bytes
    meta: int  # bytes
    size: int  # bytes of the whole frame
    checksum: int


def read_header(prefix: bytes) -> Header:
    """Read the first PREFIX_SIZE bytes of a frame; the checksum is checked by `decode`. Raises FrameError."""
    if len(prefix) != PREFIX_SIZE:
        raise FrameError(f"a frame has at least {PREFIX_SIZE} bytes, got {len(prefix)}")
    magic, version, n, descriptors, meta, size, step, kind, source, target, microbatch, check = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, these bytes with {magic!r}")
    if version != VERSION:
        raise FrameError(f"this is a frame of version {version}, understood here is {VERSION}: install one stageflow")
    if PREFIX_SIZE + descriptors + meta > size:
        raise FrameError(f"a frame of {size} bytes can't hold {descriptors} + {meta} bytes of header")
    word = kind.rstrip(b"\0")
    if not word.isascii():
        raise FrameError(f"the kind of a tag is ASCII, got {word!r}")
    return Header(Tag(step, word.decode("ascii"), source, target, microbatch), n, descriptors, meta, size, check)


class Described(NamedTuple):
    """One tensor of a frame, checked to lie within it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    offset: int
    numel: int


class Decoder:
    """Reads frames; remembers descriptors it has seen, since shapes repeat."""

    def __init__(self, remember: int = 256) -> None:
        self._seen: dict[tuple[int, int, bytes], tuple[Described, ...]] = {}
        self._remember = remember

    def decode(self, memory: np.ndarray) -> tuple[Tag, Bundle]:
        """Read one frame.

        memory: 1-d uint8, writable, of exactly the frame's size. The tensors are views of it and keep it alive.
        Raises FrameError if the bytes are no whole, undamaged frame (the tensors' own bytes bear no checksum).
        """
        first = memory[:_GLANCE].tobytes()
        header = read_header(first[:PREFIX_SIZE])
        if header.size != len(memory):
            raise FrameError(f"a frame of {header.size} bytes came with {len(memory)}")
        end = PREFIX_SIZE + header.descriptors
        stop = end + header.meta
        body = first[PREFIX_SIZE:stop] if stop <= _GLANCE else memory[PREFIX_SIZE:stop].tobytes()
        if zlib.crc32(body, zlib.crc32(first[: PREFIX_SIZE - _CHECKSUM.size])) != header.checksum:
            raise FrameError(f"the checksum of message {tuple(header.tag)} is wrong: its header was damaged on the way")
        start = _aligned(stop)
        described = self._described(header, start, body[: header.descriptors])
        meta = decode_meta(body[header.descriptors :])
        return header.tag, Bundle({d.name: tensor_at(memory, start, d) for d in described}, meta)

    def _described(self, header: Header, start: int, descriptors: bytes) -> tuple[Described, ...]:
        key = (header.n_tensors, header.size - start, descriptors)
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= self._remember:
                self._seen.clear()
            found = self._seen[key] = parse_descriptors(header.n_tensors, header.size - start, descriptors)
        return found


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
    return Described(name, dtype, shape, None if order == numbered else order, offset, numel)


def tensor_at(memory: np.ndarray, start: int, described: Described) -> Tensor:
    """The tensor whose bytes lie at ``start + described.offset`` of ``memory``, which it keeps alive."""
    _, dtype, shape, _, offset, numel = described
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

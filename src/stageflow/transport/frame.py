"""Self-describing frames: one message as bytes that any receiver can read without having been told a shape.

    ┌────────┬──────────────┬───────────┬──┬──────────────┬──┬──────────────┬──┐
    │ prefix │ descriptors  │ meta JSON │░░│ tensor bytes │░░│ tensor bytes │░░│     ░ pads to 64 bytes
    └────────┴──────────────┴───────────┴──┴──────────────┴──┴──────────────┴──┘

prefix: magic, version, the sizes of what follows, the tag, and a checksum of prefix, descriptors and meta.
descriptors: one per tensor: name, dtype, shape, order of its dimensions in memory, offset of its bytes from the start
of the payload. The bytes have no gaps; the order travels because results depend on it: dropout hands out its mask as
values lie in memory, and ``view`` takes some orders only.

From one micro-batch to the next only step and micro-batch change. All else is a message's form, which both ends
remember: the sender to write it, the receiver to know it by its bytes and not read it again.

Everything is little endian. Nothing is ever unpickled, and every number that was read is checked before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import marshal
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stageflow.errors import FrameError
from stageflow.graph import Bundle
from stageflow.transport.base import Tag
from stageflow.transport.descriptors import (
    Buffer,
    Described,
    aligned,
    describe,
    dimension_order,
    in_order_of_memory,
    parse_descriptors,
    tensor_at,
)
from stageflow.transport.meta import decode_meta, encode_meta

memmove = ctypes.memmove  # lets other threads run while it copies

MAGIC = b"sflw"
VERSION = 2
_ORDINARY = (Tensor, torch.nn.Parameter)
_GLANCE = 512  # bytes read at once: most headers are shorter, and only those are remembered

# magic, version, tensors, bytes of descriptors, of meta, of the whole frame, kind, source, target
_FORM = struct.Struct("<4sHHIIQ8sii")
_WHEN = struct.Struct("<qq")  # step, micro-batch
_LENGTHS = struct.Struct("<8xII")  # of descriptors and of meta
_CHECKSUM = struct.Struct("<I4x")
_WHEN_END = _FORM.size + _WHEN.size
_WHEN_AND_CHECKSUM = struct.Struct("<qqI")
PREFIX_SIZE = _WHEN_END + _CHECKSUM.size


class Frame(NamedTuple):
    """A message ready to be copied out.

    head: prefix, descriptors and meta.
    parts: (offset in the frame, contiguous CPU tensor) in ascending order; the frame refers to them, not to copies.
    size: bytes of the whole frame; bytes between the parts are undefined.
    """

    tag: Tag
    head: bytes
    parts: list[tuple[int, Tensor]]
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


class _Written(NamedTuple):
    """The form of a message as its sender remembers it.

    offsets: of each tensor from the start of the frame. checksum: of first and body.
    """

    first: bytes
    body: bytes
    checksum: int
    offsets: tuple[int, ...]
    size: int


class Encoder:
    """Makes frames; remembers their forms, since those repeat from micro-batch to micro-batch."""

    def __init__(self, remember: int = 256) -> None:
        self._forms: dict[tuple[Any, ...], _Written] = {}
        self._remember = remember

    def encode(self, tag: Tag, bundle: Bundle) -> Frame:
        """The frame of one message. Raises FrameError for what has no frame, naming the tensor and the tag."""
        step, kind, source, target, microbatch = tag
        try:
            described, ready = [], []
            for name, tensor in bundle.tensors.items():
                if _lies_in_order(tensor):
                    described.append((name, tensor.dtype, tensor.shape, None))
                    ready.append(tensor)
                else:
                    plain = _made_plain(tensor)
                    described.append((name, plain.dtype, plain.shape, dimension_order(plain)))
                    ready.append(in_order_of_memory(plain))
            form = self._form(kind, source, target, tuple(described), bundle.meta)
            try:
                when = _WHEN.pack(step, microbatch)
            except struct.error as problem:
                raise _too_large(problem) from None
        except FrameError as problem:
            raise FrameError(f"can't send {tuple(tag)}: {problem}") from None
        head = b"".join((form.first, when, _CHECKSUM.pack(zlib.crc32(when, form.checksum)), form.body))
        return Frame(tag, head, list(zip(form.offsets, ready, strict=True)), form.size)

    def _form(self, kind: str, source: int, target: int, tensors: tuple[Any, ...], meta: Any) -> _Written:
        try:
            # without references, so that equal values of equal types look the same
            key = (kind, source, target, tensors, marshal.dumps(meta, 2))
        except ValueError:
            return _written(kind, source, target, tensors, meta)  # says what is wrong with the meta
        form = self._forms.get(key)
        if form is None:
            form = _written(kind, source, target, tensors, meta)
            if len(form.body) <= _GLANCE:
                if len(self._forms) >= self._remember:
                    self._forms.clear()
                self._forms[key] = form
        return form


def _written(kind: str, source: int, target: int, tensors: tuple[Any, ...], meta: Any) -> _Written:
    offsets: list[int] = []
    descriptors, payload = describe(tensors, offsets)
    text = encode_meta(meta)
    body = descriptors + text
    start = aligned(PREFIX_SIZE + len(body))
    sizes = (len(offsets), len(descriptors), len(text), start + payload)
    try:
        first = _FORM.pack(MAGIC, VERSION, *sizes, _kind_bytes(kind), source, target)
    except struct.error as problem:
        raise _too_large(problem) from None
    checksum = zlib.crc32(body, zlib.crc32(first))
    return _Written(first, body, checksum, tuple([start + offset for offset in offsets]), start + payload)


def _too_large(problem: struct.error) -> FrameError:
    return FrameError(f"a number is too large for a frame: {problem}")


def _lies_in_order(tensor: Tensor) -> bool:
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
    describe([(name, t.dtype, t.shape, None) for name, t in bundle.tensors.items()])
    tensors = {
        name: _dense(t).detach().as_subclass(Tensor).resolve_conj().resolve_neg().clone()
        for name, t in bundle.tensors.items()
    }
    return Bundle(tensors, decode_meta(encode_meta(bundle.meta)))


@functools.cache
def _kind_bytes(kind: str) -> bytes:
    if not 0 < len(kind) <= 8 or not kind.isascii() or not kind.isprintable():
        raise FrameError(f"the kind of a tag is 1 to 8 printable ASCII characters, got {kind!r}")
    return kind.encode("ascii")


class Header(NamedTuple):
    """What stands in the first bytes of a frame, but for when and checksum; descriptors, meta and size in bytes."""

    n_tensors: int
    descriptors: int
    meta: int
    size: int
    kind: str
    source: int
    target: int


def read_header(prefix: bytes) -> Header:
    """Read the first PREFIX_SIZE bytes of a frame; the checksum is checked by `decode`. Raises FrameError."""
    if len(prefix) != PREFIX_SIZE:
        raise FrameError(f"a frame has at least {PREFIX_SIZE} bytes, got {len(prefix)}")
    magic, version, n, descriptors, meta, size, kind, source, target = _FORM.unpack_from(prefix)
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, these bytes with {magic!r}")
    if version != VERSION:
        raise FrameError(f"this is a frame of version {version}, understood here is {VERSION}: install one stageflow")
    if PREFIX_SIZE + descriptors + meta > size:
        raise FrameError(f"a frame of {size} bytes can't hold {descriptors} + {meta} bytes of header")
    word = kind.rstrip(b"\0")
    if not word.isascii():
        raise FrameError(f"the kind of a tag is ASCII, got {word!r}")
    return Header(n, descriptors, meta, size, word.decode("ascii"), source, target)


class _Read(NamedTuple):
    """The form of a message as its receiver remembers it. meta: shared by all messages of the form."""

    header: Header
    start: int
    described: tuple[Described, ...]
    meta: Any
    checksum: int


class Decoder:
    """Reads frames; remembers forms it has seen, since they repeat."""

    def __init__(self, remember: int = 256) -> None:
        self._forms: dict[bytes, _Read] = {}
        self._remember = remember

    def decode(self, memory: Buffer) -> tuple[Tag, Bundle]:
        """Read one frame.

        memory: of exactly the frame's size (an array is 1-d uint8). The tensors are views of it and keep it alive. The
            meta may be that of other messages too: not to be changed.
        Raises FrameError if the bytes are no whole, undamaged frame (the tensors' own bytes bear no checksum).
        """
        glance = bytes(memory[:_GLANCE])
        if len(glance) < PREFIX_SIZE:
            raise FrameError(f"a frame has at least {PREFIX_SIZE} bytes, got {len(glance)}")
        descriptors, meta = _LENGTHS.unpack_from(glance)
        stop = PREFIX_SIZE + descriptors + meta
        form = self._forms.get(glance[: _FORM.size] + glance[PREFIX_SIZE:stop])
        if form is None or stop > _GLANCE:
            form = self._read(glance, memory)
        header = form.header
        if header.size != len(memory):
            raise _wrong_length(header, memory)
        step, microbatch, checksum = _WHEN_AND_CHECKSUM.unpack_from(glance, _FORM.size)
        tag = Tag(step, header.kind, header.source, header.target, microbatch)
        if zlib.crc32(glance[_FORM.size : _WHEN_END], form.checksum) != checksum:
            raise FrameError(f"the checksum of message {tuple(tag)} is wrong: its header was damaged on the way")
        start = form.start
        return tag, Bundle({each.name: tensor_at(memory, start, each) for each in form.described}, form.meta)

    def _read(self, glance: bytes, memory: Buffer) -> _Read:
        """The form of a frame not seen before; remembered only once its checksum was found right."""
        header = read_header(glance[:PREFIX_SIZE])
        if header.size != len(memory):
            raise _wrong_length(header, memory)
        first, stop = glance[: _FORM.size], PREFIX_SIZE + header.descriptors + header.meta
        body = bytes(memory[PREFIX_SIZE:stop])
        checksum = zlib.crc32(body, zlib.crc32(first))
        if zlib.crc32(glance[_FORM.size : _WHEN_END], checksum) != _CHECKSUM.unpack_from(glance, _WHEN_END)[0]:
            raise FrameError(
                f"the checksum of a message {header.kind!r} from {header.source} to {header.target} is wrong: its "
                "header was damaged on the way"
            )
        start = aligned(stop)
        described = parse_descriptors(header.n_tensors, header.size - start, body[: header.descriptors])
        form = _Read(header, start, described, decode_meta(body[header.descriptors :]), checksum)
        if stop <= _GLANCE:
            if len(self._forms) >= self._remember:
                self._forms.clear()
            self._forms[first + body] = form
        return form


def _wrong_length(header: Header, memory: Buffer) -> FrameError:
    return FrameError(f"a frame of {header.size} bytes came with {len(memory)}")

"""Writes a safetensors file in one pass that keeps a checksum and holds no lock of Python's while it writes.

    u64: bytes of the header | header: JSON, name -> {dtype, shape, data_offsets} | the tensors' bytes

A worker trains on while a thread of it writes. What the safetensors package offers copies all bytes first and then
keeps Python's lock until the file is complete, so the training would wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stageflow.checkpoint.layout import FileRecord

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The dtypes that have a safetensors form, as the format calls them."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_CHUNK = 1 << 22


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write contiguous CPU tensors and have them on the medium; returns the file's size and checksum.

    tensors: of dtypes in `NAMES`. Raises OSError.
    """
    # wide elements first, so that each tensor starts at a multiple of its element size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    with open(path, "wb", buffering=0) as file:
        out = _Hashing(file.fileno())
        out.write(_header(ordered))
        for _, tensor in ordered:
            if tensor.numel():
                out.write(tensor.reshape(-1).view(torch.uint8).numpy())
        os.fsync(file.fileno())
    return out.record()


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        described[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


class _Hashing:
    """Writes to a descriptor and remembers size and checksum."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self._size += len(view)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(self._descriptor, chunk) :]

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())

"""One file of tensors, written by the worker that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from stageflow.checkpoint.disk import record, sync
from stageflow.checkpoint.layout import FileRecord, ShardKind, shard_name
from stageflow.errors import CheckpointError, FrameError
from stageflow.transport.structure import flatten

_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)


@dataclass(frozen=True)
class ShardEntry:
    """What whoever finishes the save must know of a shard; small, and travels by pickle.

    names: of its tensors. tensor_bytes: their sum. record: of the file. rest: outline of the plain part, if any.
    """

    kind: ShardKind
    index: int
    count: int
    names: tuple[str, ...]
    tensor_bytes: int
    record: FileRecord
    rest: Any = None

    @property
    def file(self) -> str:
        return shard_name(self.kind, self.index, self.count)


def write_shard(
    directory: str | Path, kind: ShardKind, index: int, count: int, tensors: Mapping[str, Tensor], rest: Any = None
) -> ShardEntry:
    """Write shard ``index`` (from 0) of ``count`` into ``directory`` and have it on the medium.

    directory: `Saving.path`; the same for all writers. tensors: of any device and strides, may overlap; a model's
    under its names without the tied ones, an optimizer's as "parameter/key".
    rest: nested plain values that belong to them; tensors in it are stored too.

    Raises CheckpointError for a tensor that has no safetensors form, before anything is written, and for a full disk
    and the like.
    """
    inner, outline = _outline(rest)
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*tensors.items(), *((f"/{key}", tensor) for key, tensor in inner.items())]:
        stored[name] = _storable(name, tensor, seen)
    path = Path(directory) / shard_name(kind, index, count)
    try:
        save_file(stored, path, metadata={"format": "pt"})
        sync(path)
        written = record(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} could not be written to {path.parent}: {error}") from error
    return ShardEntry(kind, index, count, tuple(stored), sum(t.nbytes for t in stored.values()), written, outline)


def _outline(rest: Any) -> tuple[dict[str, Tensor], Any]:
    try:
        return flatten(rest, where="optimizer state")
    except FrameError as error:
        raise CheckpointError(f"can't be saved: {error}") from error


def _storable(name: str, tensor: Tensor, seen: set[int]) -> Tensor:
    """A dense CPU tensor of the same value that shares its memory with no other of the shard."""
    tensor = tensor.detach()
    problem = _problem(tensor)
    if problem:
        raise CheckpointError(f"{name!r} can't be saved: it {problem}")
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    memory = tensor.untyped_storage().data_ptr()
    if memory in seen or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        memory = tensor.untyped_storage().data_ptr()
    seen.add(memory)
    return tensor


def _problem(tensor: Tensor) -> str | None:
    if type(tensor) is not Tensor:
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; only dense tensors have a safetensors form"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values"
    if tensor.dtype not in _DTYPES:
        return f"is of {tensor.dtype}, which safetensors does not know"
    return None

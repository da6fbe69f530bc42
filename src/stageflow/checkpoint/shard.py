"""One file of tensors, written by the worker that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stageflow.checkpoint.layout import FileRecord, ShardKind, shard_name
from stageflow.checkpoint.stream import NAMES, write_tensors
from stageflow.errors import CheckpointError, FrameError
from stageflow.transport.structure import flatten


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


@dataclass(frozen=True)
class Shard:
    """What goes into one file, ready to be written. Made by `Shard.of`.

    tensors: dense CPU tensors that share no memory. rest: outline of the plain part.
    """

    kind: ShardKind
    index: int
    count: int
    tensors: Mapping[str, Tensor]
    rest: Any

    @classmethod
    def of(
        cls,
        kind: ShardKind,
        index: int,
        count: int,
        tensors: Mapping[str, Tensor],
        rest: Any = None,
        *,
        copy: bool = False,
    ) -> Shard:
        """Shard ``index`` (from 0) of ``count``.

        tensors: of any device and strides, may overlap; a model's under its names without the tied ones, an
        optimizer's as "parameter/key". rest: nested plain values that belong to them; tensors in it are stored too.
        copy: have values of its own, so that what they come from may change before they are written.

        Raises CheckpointError for a tensor that has no safetensors form.
        """
        inner, outline = _outline(rest)
        stored: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in [*tensors.items(), *((f"/{key}", tensor) for key, tensor in inner.items())]:
            stored[name] = _storable(name, tensor, seen, copy)
        return cls(kind, index, count, stored, outline)

    @property
    def file(self) -> str:
        return shard_name(self.kind, self.index, self.count)

    def write(self, directory: str | Path) -> ShardEntry:
        """Write the file and have it on the medium. directory: `Saving.path`; the same for all writers.

        Raises CheckpointError for a full disk and the like.
        """
        path = Path(directory) / self.file
        try:
            written = write_tensors(path, self.tensors)
        except OSError as error:
            raise CheckpointError(f"{path.name} could not be written to {path.parent}: {error}") from error
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        return ShardEntry(self.kind, self.index, self.count, tuple(self.tensors), size, written, self.rest)


def write_shard(
    directory: str | Path, kind: ShardKind, index: int, count: int, tensors: Mapping[str, Tensor], rest: Any = None
) -> ShardEntry:
    """Write a shard at once; see `Shard`. What can't be stored is refused before anything is written."""
    return Shard.of(kind, index, count, tensors, rest).write(directory)


def _outline(rest: Any) -> tuple[dict[str, Tensor], Any]:
    try:
        return flatten(rest, where="optimizer state")
    except FrameError as error:
        raise CheckpointError(f"can't be saved: {error}") from error


def _storable(name: str, tensor: Tensor, seen: set[int], copy: bool) -> Tensor:
    """A dense CPU tensor of the same value that shares its memory with no other of the shard.

    copy: nor with the tensor itself.
    """
    tensor = tensor.detach()
    problem = _problem(tensor)
    if problem:
        raise CheckpointError(f"{name!r} can't be saved: it {problem}")
    source = tensor.untyped_storage().data_ptr()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    memory = tensor.untyped_storage().data_ptr()
    if memory in seen or not tensor.is_contiguous() or (copy and memory == source):
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
    if tensor.dtype not in NAMES:
        return f"is of {tensor.dtype}, which safetensors does not know"
    return None

"""Buffers that a forward both changes in place and lets autograd keep for the backward.

One device runs a micro-batch's backward right after its forward. Here forwards of later micro-batches come in between
and move the buffer on, so what was kept has to be a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stageflow.graph import StageProgram


class SavedBuffers:
    """Copies the buffers of one stage where autograd keeps them, if a forward was seen to change them."""

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._at_risk: dict[bool, list[str]] = {}  # by train/eval mode; absent: not seen yet

    def protected(self, training: bool) -> AbstractContextManager[None]:
        """To be open around a forward that builds a graph."""
        names = self._at_risk.get(training)
        return nullcontext() if names == [] else self._copying(training, names)

    @contextmanager
    def _copying(self, training: bool, names: list[str] | None) -> Iterator[None]:
        buffers = self._program.buffers
        versions = {name: buffers[name]._version for name in (buffers if names is None else names)}
        memory = {buffers[name].untyped_storage()._cdata: name for name in versions}
        saved: set[str] = set()

        def pack(tensor: Tensor) -> tuple[Tensor, int | None]:
            with torch._C.DisableTorchFunction():  # the stage may be watching torch calls itself
                name = memory.get(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else None
            if name is None:
                return tensor, tensor._version
            saved.add(name)
            return tensor.detach().clone(), None

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        if names is None:
            self._at_risk[training] = [name for name in saved if buffers[name]._version != versions[name]]


def _unpack(packed: tuple[Tensor, Any]) -> Tensor:
    """Autograd leaves its check for changes in place to those who set hooks."""
    tensor, version = packed
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified by an in-place operation: "
            f"it is at version {tensor._version}, expected version {version}"
        )
    return tensor

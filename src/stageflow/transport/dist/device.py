"""The tensors of a message that lie on a GPU: one packed transfer over NCCL, announced by a frame over gloo.

NCCL has no tags, so each ordered pair of workers has a process group of its own, in which order alone tells messages
apart. A receive is started only once its frame has come: a receive that waits inside NCCL would hold a part of the GPU
and make every ``torch.cuda.synchronize()`` wait for the peer. Packing happens on the caller's stream, which is when
the tensors have their values; sending and receiving on streams of their own, so that they run beside the computation.
The host never waits for the data: `Arrival.claim` makes the caller's stream do so.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageflow.errors import FrameError
from stageflow.graph import Bundle
from stageflow.transport.dist.lane import Group, Work
from stageflow.transport.descriptors import (
    ALIGNMENT,
    Described,
    describe,
    dimension_order,
    laid_out,
    parse_descriptors,
)

_KEY = "on device"


class Arrival(NamedTuple):
    """A message whose device tensors may still be on their way.

    memory: what they lie in. ready: the CUDA event after which they are there, None on a CPU.
    """

    bundle: Bundle
    memory: Tensor
    ready: Any

    def claim(self) -> Bundle:
        """Order what the caller's stream does from now on after the arrival."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.memory.device)
            stream.wait_event(self.ready)
            self.memory.record_stream(stream)
        return self.bundle


class DevicePath:
    """Moves packed device tensors between this worker and its peers.

    to_peer, from_peer: peer -> (group, the peer's rank in it). device: where tensors are sent from and put.
    """

    def __init__(
        self, to_peer: dict[int, tuple[Group, int]], from_peer: dict[int, tuple[Group, int]], device: torch.device
    ) -> None:
        self.device = device
        self._to, self._from = to_peer, from_peer
        on_gpu = device.type == "cuda"
        self._sending = {peer: torch.cuda.Stream(device) if on_gpu else None for peer in to_peer}
        self._receiving = {peer: torch.cuda.Stream(device) if on_gpu else None for peer in from_peer}

    def take_out(self, bundle: Bundle) -> tuple[Bundle, Tensor | None]:
        """(what goes by frame, the device tensors packed into one, or None if there are none)."""
        there = {name: t for name, t in bundle.tensors.items() if t.device.type == self.device.type}
        if not there:
            return bundle, None
        described, size = describe((name, t.dtype, t.shape, dimension_order(t)) for name, t in there.items())
        packed = torch.empty(size, dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            for (name, t), where in zip(there.items(), parse_descriptors(len(there), size, described), strict=True):
                _part(packed, where).copy_(t)
        order = list(bundle.tensors)
        meta = {_KEY: [len(there), size, described.hex(), order], "meta": bundle.meta}
        return Bundle({name: t for name, t in bundle.tensors.items() if name not in there}, meta), packed

    def send(self, peer: int, packed: Tensor) -> Work:
        """Start sending, after the frame that announces it: the first time, NCCL waits for the peer to join in."""
        group, there = self._to[peer]
        stream = self._sending[peer]
        if stream is None:
            return group.send([packed], there, 0)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            return _OnStream(group.send([packed], there, 0), stream)

    def receive(self, peer: int, bundle: Bundle) -> Arrival | None:
        """Start receiving the device tensors that a frame announces; None if it announces none."""
        meta = bundle.meta
        if not isinstance(meta, dict) or _KEY not in meta:
            return None
        count, size, described, order = meta[_KEY]
        parts = parse_descriptors(count, size, bytes.fromhex(described))
        group, there = self._from[peer]
        stream = self._receiving[peer]
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            packed = torch.empty(size, dtype=torch.uint8, device=self.device)
            group.recv([packed], there, 0).wait()  # on a GPU the stream waits, not the host
            ready = stream.record_event() if stream is not None else None
        tensors = bundle.tensors | {where.name: _part(packed, where) for where in parts}
        if sorted(tensors) != sorted(order):
            raise FrameError(f"a message names tensors {order} and holds {list(tensors)}")
        return Arrival(Bundle({name: tensors[name] for name in order}, meta["meta"]), packed, ready)


class _OnStream:
    """A work of NCCL together with the stream it was started on."""

    def __init__(self, work: Work, stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream

    def wait(self) -> Any:
        """Let the host wait, which a work of NCCL by itself does not."""
        with torch.cuda.stream(self._stream):
            self._work.wait()
        self._stream.record_event().synchronize()


def _part(packed: Tensor, where: Described) -> Tensor:
    length = math.prod(where.shape) * where.dtype.itemsize
    assert where.offset % ALIGNMENT == 0
    return laid_out(packed[where.offset : where.offset + length].view(where.dtype), where)

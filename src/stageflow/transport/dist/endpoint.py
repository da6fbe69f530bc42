"""A worker's door to the others over torch.distributed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from stageflow.errors import LaunchError, StageflowError, TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Interrupt, Tag
from stageflow.transport.dist.device import Arrival, DevicePath
from stageflow.transport.dist.lane import Group, Lane
from stageflow.transport.frame import Encoder
from stageflow.transport.inbox import Inbox

BACKLOG_BYTES = 1 << 30
_CHECK_EVERY = 0.05  # seconds between looks at the interrupt while waiting
_GRACE = 1.0  # seconds in which somebody who knows more may speak before a lost peer is reported
_FAREWELL = 2.0  # seconds that close waits for a peer that does not answer
_FOR_EVER = timedelta(days=3650)  # the listeners wait as long as the endpoint lives; timeouts are made here


class DistEndpoint(Endpoint):
    """Made by `create` on every rank of a group.

    `send` copies the tensors before it returns and never waits, unless more than ``backlog_bytes`` are on their way.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        size: int,
        interrupt: Interrupt | None = None,
        device_path: DevicePath | None = None,
        backlog_bytes: int = BACKLOG_BYTES,
        patience: float = 60.0,
    ) -> None:
        """group: gloo, used by nothing else. device_path: for tensors on GPUs; without it they go by way of the CPU."""
        self.rank, self.size = rank, size
        self._interrupt = interrupt or Interrupt()
        self._device_path = device_path
        self._backlog_bytes, self._patience = backlog_bytes, patience
        self._encoder = Encoder()
        self._inbox = Inbox(rank)
        self._arrivals: dict[int, Arrival] = {}  # id of a bundle -> its device part
        self._problem: StageflowError | None = None
        self._lost_since: float | None = None
        self._changed = threading.Condition()
        self._open = True
        self._lanes = {peer: Lane(group, rank, peer, self._deliver, self._wake) for peer in range(size) if peer != rank}

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        interrupt: Interrupt | None = None,
        device: torch.device | str = "cpu",
        **options: float,
    ) -> DistEndpoint:
        """Make the endpoint of this rank; to be called on every rank of the group at the same time.

        group: whose ranks become the workers, in its order; None for all. `torch.distributed` must be initialised, as
            under torchrun. Process groups of the endpoint's own are made, so nothing else in the program is disturbed.
        device: where this rank's tensors live. On "cuda" they go over NCCL.
        options: ``backlog_bytes`` and ``patience`` (seconds) of the constructor.
        """
        if not dist.is_initialized():
            raise LaunchError(
                "torch.distributed is not initialised: start the script with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]
        rank = ranks.index(dist.get_rank())
        gloo = dist.new_group(ranks, timeout=_FOR_EVER, backend="gloo")
        device = torch.device(device)
        path = _device_path(ranks, rank, device) if device.type == "cuda" else None
        return cls(gloo, rank, len(ranks), interrupt, path, **options)  # type: ignore[arg-type]

    def send(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        lane = self._lane(peer, tag)
        path = self._device_path
        bundle, packed = path.take_out(bundle) if path is not None else (bundle, None)
        frame = self._encoder.encode(tag, bundle)
        if lane.pending_bytes and self._pending_bytes() + frame.size > self._backlog_bytes:
            self._wait_for_room(lane, tag, frame.size)
        follow = None if path is None or packed is None else partial(path.send, peer, packed)
        try:
            lane.send(frame, follow, packed)
        except RuntimeError as problem:
            raise self._unreachable(peer, f"can't send {tag}") from problem

    def recv(self, tag: Tag, timeout: float) -> Bundle:
        found: list[Bundle] = []

        def ready() -> bool:
            bundle = self._inbox.pop(tag)
            if bundle is not None:
                found.append(bundle)
            return bool(found)

        self._wait(ready, timeout, lambda: self._inbox.timed_out(tag, timeout, self._describe_peers()))
        arrival = self._arrivals.pop(id(found[0]), None)
        return found[0] if arrival is None else arrival.claim()

    def flush(self, timeout: float) -> None:
        self._wait(lambda: not self._pending_bytes(), timeout, lambda: self._not_taken("flush", timeout))

    def forget(self, before_step: int) -> None:
        with self._changed:
            self._inbox.forget(before_step)
            kept = self._inbox.ids()
            self._arrivals = {key: arrival for key, arrival in self._arrivals.items() if key in kept}

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        deadline = time.monotonic() + _FAREWELL
        closers = [
            threading.Thread(target=lane.close, args=(max(0.0, deadline - time.monotonic()),))
            for lane in self._lanes.values()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        with self._changed:
            self._inbox.clear()
            self._arrivals.clear()

    def _lane(self, peer: int, tag: Tag) -> Lane:
        self._require_open()
        lane = self._lanes.get(peer)
        if lane is None:
            raise TransportError(f"worker {self.rank} can't send {tag} to worker {peer}: its peers: {[*self._lanes]}")
        if lane.left or lane.lost:
            raise self._unreachable(peer, f"can't send {tag}")
        return lane

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError(f"the endpoint of worker {self.rank} is closed")

    def _deliver(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        """Called by a lane's listener."""
        arrival = self._device_path.receive(peer, bundle) if self._device_path is not None else None
        if arrival is not None:
            bundle = arrival.bundle
        with self._changed:
            try:
                self._inbox.put(tag, bundle)
            except TransportError as problem:
                self._problem = problem
            if arrival is not None and tag in self._inbox:
                self._arrivals[id(bundle)] = arrival
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: float, too_late: Callable[[], Exception]) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                self._require_open()
                if self._problem is not None:
                    raise self._problem
                if ready():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise too_late()
                self._changed.wait(min(left, _CHECK_EVERY))
            self._interrupt.check()
            self._look_for_lost_peers()

    def _look_for_lost_peers(self) -> None:
        lost = [peer for peer, lane in self._lanes.items() if lane.lost]
        if lost and self._lost_since is None:
            self._lost_since = time.monotonic()
        if lost and self._lost_since is not None and time.monotonic() - self._lost_since > _GRACE:
            raise self._unreachable(lost[0], "can't go on")

    def _unreachable(self, peer: int, doing: str) -> TransportError:
        lane = self._lanes[peer]
        if lane.left:
            return TransportError(f"worker {self.rank} {doing}: worker {peer} has closed its endpoint")
        error = TransportError(f"worker {self.rank} {doing}: the connection to worker {peer} was lost ({lane.lost})")
        error.__cause__ = lane.lost
        return error

    def _pending_bytes(self) -> int:
        return sum(lane.pending_bytes for lane in self._lanes.values())

    def _wait_for_room(self, lane: Lane, tag: Tag, size: int) -> None:
        patience = self._patience
        self._wait(
            lambda: self._pending_bytes() + size <= self._backlog_bytes or not lane.pending_bytes,
            patience,
            lambda: self._not_taken(f"sending {size} bytes to worker {lane.peer} as {tag}", patience),
        )

    def _not_taken(self, doing: str, timeout: float) -> TransferTimeout:
        behind = {peer: lane.pending_bytes for peer, lane in self._lanes.items() if lane.pending_bytes}
        return TransferTimeout(
            f"worker {self.rank}, {doing}: the network took too little for {timeout:g} s; bytes on their way, by "
            f"receiver: {behind} (limit {self._backlog_bytes})"
        )

    def _describe_peers(self) -> str:
        left = [str(peer) for peer, lane in self._lanes.items() if lane.left]
        return f"Workers closed: {', '.join(left)}." if left else ""


def _device_path(ranks: list[int], rank: int, device: torch.device) -> DevicePath:
    """Make the groups of all ordered pairs, in the same order on every rank."""
    to_peer: dict[int, tuple[Group, int]] = {}
    from_peer: dict[int, tuple[Group, int]] = {}
    for sender in range(len(ranks)):
        for receiver in range(len(ranks)):
            if sender == receiver:
                continue
            pair = sorted((ranks[sender], ranks[receiver]))
            group = dist.new_group(pair, timeout=_FOR_EVER, backend="nccl")
            if rank == sender:
                to_peer[receiver] = (group, pair.index(ranks[receiver]))  # type: ignore[assignment]
            elif rank == receiver:
                from_peer[sender] = (group, pair.index(ranks[sender]))  # type: ignore[assignment]
    return DevicePath(to_peer, from_peer, device)

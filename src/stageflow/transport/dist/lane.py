"""The two directions between this worker and one peer, over a process group of gloo."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stageflow.errors import StageflowError
from stageflow.graph import Bundle
from stageflow.transport.base import Tag
from stageflow.transport.frame import PREFIX_SIZE, Decoder, Encoder, Frame, read_header

HEAD_BYTES = 2048
_AHEAD = 4  # receives posted before anything was announced
_HEAD, _BODY = 0, 1  # gloo's own tags
_BYE, _BYE_TOO = "bye", "byetoo"


class Work(Protocol):
    def wait(self) -> Any: ...


class Group(Protocol):
    """What is used of a process group. Ranks are those within the group."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work: ...


class Lane:
    """Sends frames to one peer and listens to it.

    deliver: called in the listener's thread with each message.
    changed: called in either thread when the peer was lost or memory of sent messages became free.
    lost: why the peer can't be reached any more, else None. left: the peer has closed its endpoint properly.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        peer: int,
        deliver: Callable[[int, Tag, Bundle], None],
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.lost: Exception | None = None
        self.left = False
        self.pending_bytes = 0
        self._group = group
        self._rank = rank
        self._deliver = deliver
        self._changed = changed
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._lock = threading.Lock()  # sending, by the worker and, for a farewell, by the listener
        self._sent: queue.SimpleQueue[tuple[list[Work], int, Any] | None] = queue.SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._listen, name=f"stageflow-dist-{rank}-from-{peer}", daemon=True),
            threading.Thread(target=self._reap, name=f"stageflow-dist-{rank}-to-{peer}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame, follow: Callable[[], Work] | None = None, keep: Any = None) -> None:
        """Copy a frame and start sending it.

        follow: starts sending what the frame announces; it may wait until the peer has read the frame.
        keep: kept alive until all of it has been sent.
        """
        memory = torch.empty(max(frame.size, HEAD_BYTES), dtype=torch.uint8)
        frame.copy_to(memory.data_ptr())
        with self._lock:
            works = [self._group.send([memory[:HEAD_BYTES]], self.peer, _HEAD)]
            if frame.size > HEAD_BYTES:
                works.append(self._group.send([memory[HEAD_BYTES:]], self.peer, _BODY))
            if follow is not None:
                works.append(follow())
            self.pending_bytes += len(memory)
            self._sent.put((works, len(memory), (memory, keep)))

    def close(self, patience: float) -> None:
        """Say goodbye, so that both listeners end. Threads whose peer hangs are left behind after ``patience`` s."""
        self._closing = True
        if self.lost is None and not self.left:
            self._say(_BYE)
        self._threads[0].join(patience)
        self._sent.put(None)
        self._threads[1].join(patience)

    def _say(self, kind: str) -> None:
        with contextlib.suppress(RuntimeError):  # a peer that is gone needs no farewell
            self.send(self._encoder.encode(Tag(0, kind, self._rank, self.peer, 0), Bundle()))

    def _listen(self) -> None:
        try:
            ahead = deque(self._post_head() for _ in range(_AHEAD))
            while True:
                head, work = ahead.popleft()
                work.wait()
                ahead.append(self._post_head())
                tag, bundle = self._decoder.decode(self._whole(head))
                if tag.kind in (_BYE, _BYE_TOO):
                    break
                if not self._closing:
                    self._deliver(self.peer, tag, bundle)
            self.left = True
            if tag.kind == _BYE and not self._closing:
                self._say(_BYE_TOO)
        except (RuntimeError, StageflowError) as problem:
            self.lost = problem
        self._changed()

    def _post_head(self) -> tuple[np.ndarray, Work]:
        head = np.empty(HEAD_BYTES, np.uint8)
        return head, self._group.recv([torch.from_numpy(head)], self.peer, _HEAD)

    def _whole(self, head: np.ndarray) -> np.ndarray:
        """The memory of the whole frame of which ``head`` is the start."""
        size = read_header(head[:PREFIX_SIZE].tobytes()).size
        if size <= HEAD_BYTES:
            return head[:size]
        memory = np.empty(size, np.uint8)
        work = self._group.recv([torch.from_numpy(memory[HEAD_BYTES:])], self.peer, _BODY)
        memory[:HEAD_BYTES] = head
        work.wait()
        return memory

    def _reap(self) -> None:
        """Let go of the memory of messages once they are sent."""
        while (item := self._sent.get()) is not None:
            works, size, kept = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as problem:
                self.lost = self.lost or problem
            del item, works, kept
            with self._lock:
                self.pending_bytes -= size
            self._changed()

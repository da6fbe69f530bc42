"""The one small interface through which tensors move between two workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from stageflow.graph import Bundle


class Tag(NamedTuple):
    """Names one message; no two messages to one worker bear the same tag.

    step: number of the call this belongs to (train step, evaluation, ...); bounds the life of a message: `Endpoint.
        forget` drops what an aborted call left behind.
    kind: "F" activations, "B" gradients, or another short ASCII word (at most 8 characters).
    source, target: stages (or workers, for kinds that concern workers).
    microbatch: or another counter.
    """

    step: int
    kind: str
    source: int
    target: int
    microbatch: int


class Interrupt:
    """Lets somebody outside end a wait.

    fd: becomes readable when the waiter should call `check`; None where there is nothing to watch.
    check: returns, or raises what should end the wait (usually errors.Aborted).
    """

    def __init__(self, check: Callable[[], None] | None = None, fd: int | None = None) -> None:
        self.fd = fd
        self._check = check

    def check(self) -> None:
        if self._check is not None:
            self._check()


class Endpoint(ABC):
    """One worker's door to all others. Used by one thread."""

    rank: int
    size: int

    @abstractmethod
    def send(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        """Hand a message over and return; never waits for the receiver.

        The tensors may be changed by the caller as soon as this returns, unless the transport documents that it
        keeps a reference until delivered (then it must not need them unchanged after `flush`).
        Raises TransportError when the peer is known to be gone.
        """

    @abstractmethod
    def recv(self, tag: Tag, timeout: float) -> Bundle:
        """Wait for the message with this tag, from whomever it comes.

        timeout: seconds. Raises TransferTimeout (says what it waited for and what has arrived instead), TransportError,
        or what the endpoint's `Interrupt` raises. Tensors of the bundle belong to the caller.
        """

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until everything sent has left this worker's own memory."""

    @abstractmethod
    def forget(self, before_step: int) -> None:
        """Drop every message, arrived or yet to arrive, whose tag.step < before_step."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; never raises, may be called twice."""

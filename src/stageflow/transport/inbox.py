"""Messages that have arrived and wait for somebody to ask for them, by tag."""

from __future__ import annotations

from stageflow.errors import TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Tag


class Inbox:
    """What one endpoint has received and not yet handed out. Not thread-safe."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._messages: dict[Tag, Bundle] = {}
        self._oldest_step: int | None = None

    def wants(self, tag: Tag) -> bool:
        """Whether a message with this tag should be kept: not so once its step was forgotten."""
        return self._oldest_step is None or tag.step >= self._oldest_step

    def put(self, tag: Tag, bundle: Bundle) -> None:
        """Keep an arrived message, unless its step was forgotten. Raises TransportError for a second one like it."""
        if not self.wants(tag):
            return
        if tag in self._messages:
            raise TransportError(
                f"worker {self._rank} got a second message {tag}: tags must be unique, or the first would be lost"
            )
        self._messages[tag] = bundle

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._messages

    def pop(self, tag: Tag) -> Bundle | None:
        """Hand out the message with this tag, or None if it has not arrived."""
        return self._messages.pop(tag, None)

    def forget(self, before_step: int) -> None:
        """Drop messages of earlier steps, and from now on those that arrive."""
        self._oldest_step = before_step if self._oldest_step is None else max(before_step, self._oldest_step)
        for tag in [tag for tag in self._messages if tag.step < before_step]:
            del self._messages[tag]

    def ids(self) -> set[int]:
        """The identities of the bundles that wait."""
        return {id(bundle) for bundle in self._messages.values()}

    def clear(self) -> None:
        self._messages.clear()

    def timed_out(self, tag: Tag, timeout: float, more: str = "") -> TransferTimeout:
        """The error of a wait that took too long: what was awaited and what came instead.

        more: what the transport knows besides, for instance about its peers.
        """
        arrived = sorted(self._messages)
        listed = ", ".join(map(_short, arrived[:8])) + (f" and {len(arrived) - 8} more" if len(arrived) > 8 else "")
        return TransferTimeout(
            f"worker {self._rank} waited {timeout:g} s for message {_short(tag)} and it did not come. "
            f"Arrived and not asked for: {listed or 'nothing'}.{' ' + more if more else ''} "
            "If the sender is merely slow, raise the timeout."
        )


def _short(tag: Tag) -> str:
    return f"{tag.kind} from {tag.source} to {tag.target}, micro-batch {tag.microbatch}, step {tag.step}"

"""Messages of several parts over a socket between the driver and one of its own processes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_HEAD = struct.Struct("<IQ")  # parts, bytes of all that follows the head
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 18


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end. A message is a list of byte strings; nothing is copied together for sending.

        head: parts, bytes | length of each part | parts

    The other side is trusted: it is this program's own.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *parts: bytes, timeout: float | None = None) -> None:
        """Send one message, whole. Raises Closed when the other side is gone, TimeoutError when it does not read."""
        sizes = b"".join(_LENGTH.pack(len(part)) for part in parts)
        head = _HEAD.pack(len(parts), len(sizes) + sum(map(len, parts)))
        self._socket.settimeout(timeout)
        try:
            small = b"".join((head, sizes, *parts)) if sum(map(len, parts)) < _CHUNK else b""
            if small:
                self._socket.sendall(small)
                return
            for piece in (head + sizes, *parts):
                self._socket.sendall(piece)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error

    def recv(self) -> list[bytes]:
        """Wait for one message. Raises Closed."""
        self._socket.settimeout(None)
        while (message := self._take()) is None:
            self._fill()
        return message

    def pending(self) -> Iterator[list[bytes]]:
        """The messages that are here, without waiting. Raises Closed after the last one of a side that is gone."""
        self._socket.settimeout(0.0)
        while True:
            while (message := self._take()) is not None:
                yield message
            try:
                self._fill()
            except BlockingIOError:
                return

    def _fill(self) -> None:
        try:
            data = self._socket.recv(max(_CHUNK, self._missing()))
        except BlockingIOError:
            raise
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._buffer += data

    def _missing(self) -> int:
        if len(self._buffer) < _HEAD.size:
            return 0
        _, body = _HEAD.unpack_from(self._buffer)
        return min(_HEAD.size + body - len(self._buffer), 1 << 26)

    def _take(self) -> list[bytes] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        count, body = _HEAD.unpack_from(self._buffer)
        end = _HEAD.size + body
        if len(self._buffer) < end:
            return None
        offset = _HEAD.size + count * _LENGTH.size
        parts: list[bytes] = []
        with memoryview(self._buffer) as view:
            for index in range(count):
                (size,) = _LENGTH.unpack_from(view, _HEAD.size + index * _LENGTH.size)
                parts.append(bytes(view[offset : offset + size]))
                offset += size
        del self._buffer[:end]
        return parts

    def close(self) -> None:
        self._socket.close()

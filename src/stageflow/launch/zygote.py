"""The process that worker processes are forked from.

It imports torch once, starts no thread, and then only forks, signals and reaps on request, so that a worker starts in
a few milliseconds, never runs the user's script again, and can't inherit a thread pool or a lock of the driver.
Nobody else starts or reaps the workers, so a process id it signals is always still theirs.

    driver ──main socket──► "import", "group" + a socket for that group
           ──group socket─► "spawn" + descriptors, "signal"
           ◄─group socket── {"rank", "pid"}, {"rank", "exit"}, or {"rank", "refused"} where the system has no room

When a group's socket ends, its workers are killed; when the main socket ends or the driver is no longer the parent,
all are. On Linux the kernel kills the workers too should this process itself be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

STACKS_SIGNAL = signal.SIGUSR1
"""What a worker answers by writing its stacks to its fault log."""

_SIZE = struct.Struct("<I")
_MOST_FDS = 200
_PARENT_CHECK = 0.5  # seconds; also catches a driver whose own children still hold its end of the socket
_PR_SET_PDEATHSIG = 1


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one small message with copies of descriptors. Raises OSError."""
    body = json.dumps(message).encode()
    socket.send_fds(sock, [_SIZE.pack(len(body))], list(fds))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; None at the end."""
    try:
        head, fds, _, _ = socket.recv_fds(sock, _SIZE.size, _MOST_FDS)
        if len(head) < _SIZE.size:
            return None
        (left,) = _SIZE.unpack(head)
        body = b""
        while len(body) < left:
            if not (chunk := sock.recv(left - len(body))):
                return None
            body += chunk
    except OSError:
        return None
    return json.loads(body), fds


class Zygote:
    """The loop. ``work`` is what a forked child does, and never returns."""

    def __init__(self, main: socket.socket, work: Callable[[dict[str, Any], list[int]], NoReturn]) -> None:
        self._main = main
        self._work = work
        self._pid = os.getpid()
        self._parent = os.getppid()
        self._children: dict[int, tuple[socket.socket, int]] = {}
        self._groups: set[socket.socket] = set()
        self._ended: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._alarm = socket.socketpair()

    def run(self) -> None:
        """Serve until the driver is gone; then no child is left."""
        self._alarm.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._main, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            while self._turn():
                pass
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)

    def _turn(self) -> bool:
        for key, _ in self._selector.select(_PARENT_CHECK):
            sock = key.fileobj
            if sock is self._wake:
                self._wake.recv(4096)
            elif sock is self._main:
                if not self._serve_driver():
                    return False
            elif isinstance(sock, socket.socket):
                self._serve(sock)
        self._reap()
        return os.getppid() == self._parent

    def _serve_driver(self) -> bool:
        """One request on the main socket; False at its end."""
        if (received := receive(self._main)) is None:
            return False
        message, fds = received
        if message["do"] == "import":
            sys.path[:] = message["path"]
            for name in message["modules"]:
                with contextlib.suppress(Exception):  # the worker that needs it will say what is wrong
                    importlib.import_module(name)
            gc.freeze()
        else:
            group = socket.socket(fileno=fds[0])
            self._groups.add(group)
            self._selector.register(group, selectors.EVENT_READ)
        return True

    def _serve(self, group: socket.socket) -> None:
        """One request of one group, or its end."""
        received = receive(group)
        if received is None:
            self._selector.unregister(group)
            self._ended.add(group)
            for pid, (owner, _) in self._children.items():
                if owner is group:
                    os.kill(pid, signal.SIGKILL)
            return
        message, fds = received
        if message["do"] == "spawn":
            self._spawn(group, message, fds)
        for pid, (owner, rank) in self._children.items():
            if message["do"] == "signal" and owner is group and rank in message["ranks"]:
                os.kill(pid, message["signal"])

    def _spawn(self, group: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, too little memory
            self._report(group, {"rank": message["rank"], "refused": str(error)})
            return
        finally:
            if os.getpid() == self._pid:
                for fd in fds:
                    os.close(fd)
        if pid == 0:
            self._become_worker(message, fds)
        self._children[pid] = (group, message["rank"])
        self._report(group, {"rank": message["rank"], "pid": pid})

    def _become_worker(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent()
            self._selector.close()
            for sock in (self._main, self._wake, self._alarm, *self._groups):
                sock.close()
            if os.getppid() == self._pid:  # else the zygote died before the kernel knew whom to tell
                self._work(message, fds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in self._children:
                group, rank = self._children.pop(pid)
                self._report(group, {"rank": rank, "exit": os.waitstatus_to_exitcode(status)})
        for group in list(self._ended):
            if all(owner is not group for owner, _ in self._children.values()):
                self._ended.discard(group)
                self._groups.discard(group)
                group.close()

    @staticmethod
    def _report(group: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a driver that is gone needs no report
            send(group, message)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(fd: int, preload: Sequence[str]) -> None:
    """Import, say so, serve. Run by `server.WorkerServer` in a fresh interpreter."""
    sock = socket.socket(fileno=fd)
    try:
        for name in preload:
            importlib.import_module(name)
        from stageflow.launch.worker import work
    except BaseException:
        send(sock, {"error": traceback.format_exc()})
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what was imported stays shared with the workers, pages untouched by their garbage collector
    send(sock, {"ready": True, "threads": threading.active_count()})
    server = Zygote(sock, work)
    server.run()
    os._exit(0)  # torch takes long to unload, and the driver waits

"""What a group holds of the system is given back, also where starting it stops halfway."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from stageflow.errors import LaunchError
from stageflow.launch import processes, server, zygote
from stageflow.launch.processes import ProcessGroup
from stageflow.testing.leaks import no_leaks


class Server:
    """Stands for the process that starts workers: holds its ends of the sockets and never answers."""

    def __init__(self) -> None:
        self.lost = False
        self.theirs: list[socket.socket] = []

    def preload(self, modules: Sequence[str]) -> None:
        """Nothing to import."""

    def open_group(self, timeout: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.theirs.append(theirs)
        return ours

    def obituary(self) -> str:
        return "the process that starts workers is gone"


@pytest.fixture
def lease(monkeypatch):
    class Lease:
        released = 0
        server = Server()

        def release(self) -> None:
            Lease.released += 1
            for sock in self.server.theirs:
                sock.close()

    monkeypatch.setattr(processes, "Lease", Lease)
    return Lease


def start(size: int = 3) -> ProcessGroup:
    options: dict[str, Any] = {"timeout": 1.0, "wiring": None, "threads": 1, "env": {}, "preload": (), "grace": 0.1}
    return ProcessGroup(dict, size, devices=["cpu"] * size, **options)


def failing_after(calls: int, function: Any) -> Any:
    """The function, until it was called so many times; then the system has no more descriptors."""
    left = [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("where", "calls"),
    [("StatusBoard", 0), ("StopSignal", 0), *((w, n) for w in ("anonymous_file", "socketpair") for n in range(3))],
)
def test_a_system_without_room_is_a_launch_error_and_nothing_stays(lease, monkeypatch, where, calls):
    holder = socket if where == "socketpair" else processes
    with no_leaks(), monkeypatch.context() as patch:
        patch.setattr(holder, where, failing_after(calls, getattr(holder, where)))
        with pytest.raises(LaunchError, match="the system has no room for 3 workers: .*Too many open files"):
            start()
        assert lease.released == 1


def test_a_server_that_goes_while_it_is_asked_is_a_launch_error_and_nothing_stays(lease):
    class Gone(Server):
        def open_group(self, timeout: float) -> socket.socket:
            ours = super().open_group(timeout)
            self.theirs.pop().close()
            return ours

    lease.server = Gone()
    with no_leaks(), pytest.raises(LaunchError, match="the process that starts workers is gone"):
        start()
    assert lease.server.lost
    assert lease.released == 1


def test_a_server_that_can_not_be_started_is_a_launch_error(monkeypatch):
    monkeypatch.setattr(server.subprocess, "Popen", failing_after(0, None))
    with no_leaks(), pytest.raises(LaunchError, match="could not be started itself: .*Too many open files"):
        server.WorkerServer()


def test_a_fork_that_the_system_refuses_is_told_and_the_server_goes_on(monkeypatch):
    main, _main = socket.socketpair()
    ours, theirs = socket.socketpair()
    machine = zygote.Zygote(main, lambda *_: os._exit(1))
    monkeypatch.setattr(os, "fork", failing_after(0, None))
    given = os.dup(0)
    machine._spawn(theirs, {"do": "spawn", "rank": 2}, [given])
    received = zygote.receive(ours)
    assert received is not None
    assert received[0] == {"rank": 2, "refused": "[Errno 24] Too many open files"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given)
    for sock in (main, _main, ours, theirs, machine._wake, machine._alarm):
        sock.close()
    machine._selector.close()

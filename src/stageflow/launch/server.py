"""The driver's side of the zygote: one per driver process while any group needs it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

from stageflow.errors import LaunchError
from stageflow.launch import zygote

PRELOAD = ("torch", "cloudpickle", "stageflow.launch.worker")
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from stageflow.launch.zygote import main
main(int(sys.argv[1]), json.loads(sys.argv[3]))
"""


class WorkerServer:
    """A running zygote (see zygote.py). Raises LaunchError when it can't be started."""

    def __init__(self) -> None:
        if not sys.executable:
            raise LaunchError("worker processes need a Python interpreter, but sys.executable is not known here")
        self.pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._ready = False
        self._turn = threading.Lock()  # threads that start groups at a time share the socket, and one "ready"
        self.lost = False  # set by a group whose socket ended, which is a moment before poll() tells
        arguments = [str(theirs.fileno()), json.dumps(import_path()), json.dumps(PRELOAD)]
        # OpenMP reads these once, when its library is loaded, which is in the zygote: waiting threads must sleep,
        # because there are more workers than cores as often as not.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # the terminal's Ctrl-C is the driver's to handle
                )
        except OSError as error:
            self._socket.close()
            raise LaunchError(f"the process that starts workers could not be started itself: {error}") from error

    @property
    def alive(self) -> bool:
        return not self.lost and self._process.poll() is None

    def preload(self, modules: Sequence[str]) -> None:
        """Import these before the next worker is forked; they must not start threads. What fails is left to workers."""
        with self._turn, contextlib.suppress(OSError):  # gone: the next open_group says so
            zygote.send(self._socket, {"do": "import", "modules": list(modules), "path": import_path()})

    def open_group(self, timeout: float) -> socket.socket:
        """A socket on which one group's workers are asked for. Waits until the imports are done."""
        with self._turn:
            if not self._ready:
                self._wait_ready(timeout)
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    zygote.send(self._socket, {"do": "group"}, [theirs.fileno()])
            except OSError as error:
                ours.close()
                self.lost = True
                raise LaunchError(self.obituary()) from error
            return ours

    def obituary(self) -> str:
        """What became of it, for an error."""
        try:
            code: int | None = self._process.wait(0.5)  # its socket ends a moment before it does
        except subprocess.TimeoutExpired:
            code = None
        how = "is gone" if code is None else f"died of signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the process that starts workers {how}; the next start makes a new one. Was it killed?"

    def _wait_ready(self, timeout: float) -> None:
        self._socket.settimeout(timeout)
        received = zygote.receive(self._socket)
        self._socket.settimeout(None)
        if received is None:
            if self._process.poll() is None:
                raise LaunchError(f"the process that starts workers was not ready after {timeout:g} s")
            self.lost = True
            raise LaunchError(self.obituary())
        if "error" in received[0]:
            raise LaunchError(
                f"the process that starts workers could not import what they need:\n{received[0]['error']}"
            )
        self._ready = True

    def stop(self) -> None:
        """End it and every worker it started; may be called twice."""
        self._socket.close()
        if self.pid != os.getpid():
            return  # a fork of the driver: not ours to wait for
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def import_path() -> list[str]:
    """The driver's sys.path, with the current folder where it says ''."""
    return [entry or os.getcwd() for entry in sys.path]


class _Shared:
    """The server that all groups of this process use at a time, as long as anybody holds a lease."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: WorkerServer | None = None
        self._leases = 0

    def acquire(self) -> WorkerServer:
        with self._lock:
            if self._server is not None and self._server.pid != os.getpid():
                self._leases = 0  # this process is a fork: those leases are its parent's
            if self._server is not None and (self._server.pid != os.getpid() or not self._server.alive):
                self._server.stop()
                self._server = None
            if self._server is None:
                self._server = WorkerServer()
            self._leases += 1
            return self._server

    def release(self, pid: int) -> None:
        """Give back a lease that was taken in process ``pid``."""
        with self._lock:
            if pid != os.getpid():
                return
            self._leases -= 1
            if self._leases == 0 and self._server is not None:
                server, self._server = self._server, None
                server.stop()


# The one process-wide thing in this package, and a cache only: importing torch takes more than a second, and several
# pipelines in one process need not each wait for it. Lives while a group or a keep_warm() does.
_shared = _Shared()


class Lease:
    """A share of the process's server; gives it back on `release`, or when dropped."""

    def __init__(self) -> None:
        self.server = _shared.acquire()
        self.release = weakref.finalize(self, _shared.release, os.getpid())


@contextlib.contextmanager
def keep_warm(preload: Sequence[str] = ()) -> Iterator[None]:
    """Keep the process that forks workers between groups, so that each further group starts in milliseconds.

    preload: modules that workers shall find imported; see `start_processes`.
    """
    lease = Lease()
    if preload:
        lease.server.preload(preload)
    try:
        yield
    finally:
        lease.release()

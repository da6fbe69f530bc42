"""What the launch tests run in workers; imports little, because every worker imports it."""

import ctypes
import os
import select
import signal
import time
from pathlib import Path

from stageflow.errors import TransferTimeout, TransportError
from stageflow.transport.base import Endpoint


def still_running(pids, within=2.0):
    """Which of these processes still run after some seconds; one that waits to be reaped does not."""
    deadline = time.monotonic() + within
    pids = list(pids)
    while left := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Service:
    """Does what it is told."""

    def __init__(self, ctx):
        self.ctx = ctx

    def echo(self, *args, **kwargs):
        return self.ctx.rank, args, kwargs

    def wait(self):
        while True:
            self.ctx.interrupt.check()
            time.sleep(0.005)

    def wait_on_descriptor(self):
        select.select([self.ctx.interrupt.fd], [], [], 30.0)
        self.ctx.interrupt.check()

    def fail(self, who, error, waiting="wait"):
        if self.ctx.rank == who:
            self.ctx.board.set("5B3")
            raise error
        getattr(self, waiting)()

    def fail_after_peer(self, error):
        """Worker 1 fails; worker 0 sees only that its transfer broke, and says so earlier."""
        if self.ctx.rank == 0:
            raise TransportError("worker 1 is gone")
        time.sleep(0.2)
        raise error

    def ignore(self, seconds):
        """Worker 0 fails; the others don't look at their interrupt."""
        if self.ctx.rank == 0:
            raise ValueError("boom")
        time.sleep(seconds)

    def hang(self, seconds):
        self.ctx.board.set(f"{self.ctx.rank}F0", waits_for="a miracle")
        time.sleep(seconds)

    def get_on(self, seconds, times):
        for index in range(times):
            self.ctx.board.set(f"0F{index}")
            time.sleep(seconds)
        return times

    def time_out(self):
        if self.ctx.rank == 0:
            raise TransferTimeout("0F0 did not come")
        self.wait()

    def leave(self):
        raise SystemExit(3)


def broken_factory(ctx):
    if ctx.rank == 1:
        raise OSError("no weights here")
    return Service(ctx)


class Door(Endpoint):
    """Waits for a message that never comes, as every endpoint waits."""

    def __init__(self, rank, size, interrupt, fds):
        self.rank, self.size, self.fds = rank, size, list(fds)
        self._interrupt = interrupt

    def send(self, peer, tag, bundle):
        raise NotImplementedError

    def recv(self, tag, timeout):
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            select.select([self._interrupt.fd], [], [], left)
            self._interrupt.check()
        raise TransferTimeout(f"{tag} did not come")

    def flush(self, timeout):
        pass

    def forget(self, before_step):
        pass

    def close(self):
        while self.fds:
            os.close(self.fds.pop())


class Wiring:
    """Two descriptors for everybody."""

    def __init__(self, size):
        self.size = size
        self.pipe = os.pipe()

    def ticket(self, rank):
        size = self.size
        return (lambda fds, interrupt: Door(rank, size, interrupt, fds)), self.pipe

    def close(self):
        for fd in self.pipe:
            os.close(fd)


class Waiter(Service):
    def door(self):
        door = self.ctx.endpoint()
        if self.ctx.rank == 0:
            os.write(door.fds[1], b"!")
        else:
            assert os.read(door.fds[0], 1) == b"!"
        return door.rank, door.size, door is self.ctx.endpoint()

    def recv(self):
        self.ctx.endpoint().recv("nothing", 30.0)


class Runner(Service):
    def run(self, function):
        return function()

    def die(self, who, how):
        if self.ctx.rank == who:
            self.ctx.board.set("5B3")
            how()
        self.wait()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def exited():
    os._exit(3)


def crashed():
    ctypes.string_at(0)

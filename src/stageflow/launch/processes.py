"""Workers as processes of this machine, forked from a zygote that imported torch once (see zygote.py)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stageflow.errors import InputError, LaunchError
from stageflow.launch import supervisor as sv
from stageflow.launch import zygote
from stageflow.launch.base import Arguments, Factory, Wiring
from stageflow.launch.board import StatusBoard, StopSignal, anonymous_file
from stageflow.launch.channel import Channel, Closed
from stageflow.launch.devices import choose_devices
from stageflow.launch.group import SupervisedGroup
from stageflow.launch.guard import refuse_import_time_start
from stageflow.launch.servant import BUILD
from stageflow.launch.server import Lease, import_path
from stageflow.launch.travel import pack, unpack, unpack_failure

FAULTS = "stageflow-faults"
"""What a worker's log of stacks is called among its open files."""

_CLOSE_WITHIN = 1.0  # seconds that idle workers get to close their services
_STACKS_WITHIN = 0.3  # seconds in which a worker's stacks must have arrived


class _Resources:
    """Everything a group holds of the system, apart from the group, so that it is freed whatever becomes of that.

    Raises LaunchError where the system has not enough of something; then nothing is held.
    """

    def __init__(self, size: int, timeout: float, preload: Sequence[str]) -> None:
        self._owner = os.getpid()
        self._released = False
        with contextlib.ExitStack() as opened:
            try:
                self._open(opened, size, timeout, preload)
            except OSError as error:
                raise LaunchError(
                    f"the system has no room for {size} workers: {error}; see `stageflow doctor` for its limits"
                ) from error
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack, size: int, timeout: float, preload: Sequence[str]) -> None:
        self.lease = Lease()
        opened.callback(self.lease.release)
        if preload:
            self.lease.server.preload(preload)
        self.board = StatusBoard(size)
        opened.callback(self.board.close)
        self.stop = StopSignal(self.board)
        opened.callback(self.stop.close)
        self.faults: list[int] = []
        self.channels: list[Channel] = []
        self.workers_ends: list[socket.socket] = []
        for _ in range(size):
            self.faults.append(anonymous_file(FAULTS))
            opened.callback(os.close, self.faults[-1])
            # appending: whoever has read it may cut it down to nothing, and what comes next starts at 0
            fcntl.fcntl(self.faults[-1], fcntl.F_SETFL, os.O_APPEND)
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(ours))
            self.workers_ends.append(theirs)
            opened.callback(ours.close)
            opened.callback(theirs.close)
        self.zygote = self.lease.server.open_group(timeout)
        opened.callback(self.zygote.close)
        self.selector = selectors.DefaultSelector()
        opened.callback(self.selector.close)
        self.selector.register(self.zygote, selectors.EVENT_READ, None)
        for rank, channel in enumerate(self.channels):
            self.selector.register(channel, selectors.EVENT_READ, rank)

    def kill(self) -> None:
        """End all workers and wait until they are gone. The zygote does it: it knows which ids are theirs."""
        if self._owner != os.getpid() or self.zygote.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # raised where the zygote is gone, and its workers with it
            self.zygote.shutdown(socket.SHUT_WR)
            self.zygote.settimeout(2.0)
            while zygote.receive(self.zygote) is not None:
                pass

    def release(self) -> None:
        """Kill, then free; may be called twice."""
        if self._released:
            return
        self._released = True
        self.kill()
        self._opened.close()


class ProcessGroup(SupervisedGroup):
    """See `start_processes`."""

    def __init__(
        self,
        factory: Factory,
        size: int,
        *,
        timeout: float,
        wiring: Wiring | None,
        devices: Sequence[str],
        threads: int,
        env: Mapping[str, str],
        preload: Sequence[str],
        grace: float,
    ) -> None:
        packed = pack(factory, "factory")
        tickets = [wiring.ticket(rank) if wiring else (None, ()) for rank in range(size)]
        self._first = [(packed, pack(opener, "the wiring's opener")) for opener, _ in tickets]
        held = _Resources(size, timeout, preload)
        self._held = held
        self._release = weakref.finalize(self, held.release)
        super().__init__(size, held.board, grace)
        self._pids = [0] * size
        self._gone: set[int] = set()
        try:
            common = {"do": "spawn", "size": size, "threads": threads, "cwd": os.getcwd(), "path": import_path()}
            common["env"] = {**os.environ, **env}
            with _output_fds() as outputs:
                for rank, (_, fds) in enumerate(tickets):
                    own = [held.workers_ends[rank].fileno(), held.board.fd, held.stop.fd, held.faults[rank], *outputs]
                    self._spawn({**common, "rank": rank, "device": devices[rank]}, [*own, *fds])
                    held.workers_ends[rank].close()
            if wiring is not None:
                opener, fds = wiring.ticket(size)
                self._endpoint = opener([os.dup(fd) for fd in fds], self._driver_interrupt(held.selector.fileno()))
        except BaseException:
            self._release()
            raise

    def _spawn(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            zygote.send(self._held.zygote, message, fds)
        except OSError as error:
            self._held.lease.server.lost = True
            raise LaunchError(self._held.lease.server.obituary()) from error

    def _pack(self, method: str, per_worker: Sequence[Arguments], common: Sequence[Any]) -> list[Any]:
        leading = pack(tuple(common), f"{method or 'start'}(common)")
        messages: list[list[bytes]] = []
        for rank, (args, kwargs) in enumerate(per_worker):
            own = pack((tuple(args), dict(kwargs)), f"{method or 'start'}(per_worker[{rank}])")
            messages.append([f".{method}".encode(), leading, own])
        if method == BUILD:
            for message, more in zip(messages, self._first, strict=True):
                message.extend(more)
            self._first = []
        return messages

    def _post(self, rank: int, message: Any) -> None:
        # A worker that died or does not read: the next looks will tell, with what it was doing.
        with contextlib.suppress(Closed, TimeoutError):
            self._held.channels[rank].send(*message, timeout=self._timeout)

    def _poll(self, wait: float) -> list[sv.Notice]:
        notices: list[sv.Notice] = []
        exited: list[tuple[int, int | None]] = []
        for key, _ in self._held.selector.select(wait):
            if key.data is None:
                exited += self._news()
            else:
                notices += self._answers(key.data)
        for rank, code in exited:
            notices += self._answers(rank)  # what it said last comes before its end
            self._exits[rank] = code
            self._gone.add(rank)
            notices.append(sv.Exited(time.monotonic(), rank))
        return notices

    def _news(self) -> list[tuple[int, int | None]]:
        """Exits (rank, code) that the zygote reports. It being gone means that all are."""
        received = zygote.receive(self._held.zygote)
        if received is None:
            self._held.selector.unregister(self._held.zygote)
            self._held.lease.server.lost = True
            return [(rank, None) for rank in range(self.size) if rank not in self._gone]
        message, _ = received
        if "pid" in message:
            self._pids[message["rank"]] = message["pid"]
            return []
        if "refused" in message:
            raise LaunchError(
                f"the system refused to start worker {message['rank']} of {self.size}: {message['refused']}; see "
                "`stageflow doctor` for its limits"
            )
        return [(message["rank"], message["exit"])]

    def _answers(self, rank: int) -> list[sv.Notice]:
        notices: list[sv.Notice] = []
        channel = self._held.channels[rank]
        if rank in self._gone:
            return notices
        try:
            for kind, payload in channel.pending():
                now = time.monotonic()
                if kind == b"result":
                    self._results[rank] = unpack(payload)
                    notices.append(sv.Finished(now, rank))
                else:
                    failure = self._failures[rank] = unpack_failure(payload)
                    notices.append(sv.Failed(now, rank, failure.when, failure.kind))
        except Closed:
            if channel.fileno() in self._held.selector.get_map():
                self._held.selector.unregister(channel)  # its exit is reported by the zygote
        return notices

    def _interrupt(self) -> None:
        self._held.stop.send()

    def _resume(self) -> None:
        self._held.stop.clear()

    def _dump(self, ranks: Sequence[int]) -> dict[int, str]:
        faults = self._held.faults
        living = [rank for rank in ranks if rank not in self._gone]
        if living:
            try:
                zygote.send(self._held.zygote, {"do": "signal", "signal": zygote.STACKS_SIGNAL, "ranks": living})
            except OSError:
                living = []
        deadline = time.monotonic() + _STACKS_WITHIN
        while living and time.monotonic() < deadline:
            living = [rank for rank in living if not os.fstat(faults[rank]).st_size]
            time.sleep(0.02)
        return {rank: os.pread(faults[rank], 1 << 16, 0).decode(errors="replace") for rank in ranks}

    def _identity(self, rank: int) -> tuple[int, bool]:
        return self._pids[rank], rank not in self._gone

    def _kill(self) -> None:
        self._held.kill()
        self._gone.update(range(self.size))

    def _free(self) -> None:
        if self._supervisor.phase == "idle":
            self._part()
        self._close_endpoint()
        self._release()

    def _part(self) -> None:
        """Let idle workers close their services and end by themselves."""
        for rank in range(self.size):
            if rank not in self._gone:
                with contextlib.suppress(Closed, TimeoutError):
                    self._held.channels[rank].send(b"close", timeout=0.5)
        deadline = time.monotonic() + _CLOSE_WITHIN
        while len(self._gone) < self.size and (left := deadline - time.monotonic()) > 0:
            self._poll(left)


@contextlib.contextmanager
def _output_fds() -> Iterator[list[int]]:
    """Descriptors 1 and 2, or nowhere in a program that closed them."""
    found: list[int] = []
    with contextlib.ExitStack() as opened:
        for fd in (1, 2):
            try:
                os.fstat(fd)
            except OSError:
                fd = os.open(os.devnull, os.O_WRONLY)
                opened.callback(os.close, fd)
            found.append(fd)
        yield found


def start_processes(
    factory: Factory,
    size: int,
    *,
    timeout: float = 300.0,
    wiring: Wiring | None = None,
    devices: str | Sequence[str] = "cpu",
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    grace: float = 1.5,
) -> ProcessGroup:
    """Start ``size`` worker processes, each holding the service that ``factory(context)`` makes there.

    factory: travels by cloudpickle, to every worker whole: what only one worker needs goes with a first call instead.
    timeout: seconds without any progress after which starting counts as hung.
    wiring: makes the workers' and the driver's endpoints; None: no tensors cross. The group does not close it.
    devices: see `choose_devices`.
    threads: torch's intra-op threads in each worker.
    env: environment variables of the workers on top of the driver's own. Those that libraries read when they are
        loaded (OMP_*, MKL_*) come too late, because torch is loaded already: use ``threads``.
    preload: modules that take long to import: done once, before the fork, instead of in every worker. They must not
        start threads when imported, and later changes to them don't reach workers while the server lives.
    grace: seconds that interrupted workers get to stop before they are killed.

    The user's script is not run again in the workers. Raises LaunchError: the factory raised (its exception is
    ``__cause__``), or can't travel, or this machine can't start workers.
    """
    refuse_import_time_start()
    if size < 1:
        raise InputError(f"a group needs at least one worker, got size={size}")
    if sys.platform == "win32":
        raise LaunchError("worker processes need fork, which Windows lacks: use threads")
    group = ProcessGroup(
        factory,
        size,
        timeout=timeout,
        wiring=wiring,
        devices=choose_devices(size, devices),
        threads=threads,
        env=env or {},
        preload=preload,
        grace=grace,
    )
    return group._begin(timeout)

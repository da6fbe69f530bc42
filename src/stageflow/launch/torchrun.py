"""Workers without a driver: under torchrun every rank runs the same script and is a worker itself.

    rank 0: script ── group.run(work) ─┐
    rank 1: script ── group.run(work) ─┤ records in the job's store; a watcher thread on each rank reads them
    rank 2: script ── group.run(work) ─┘

`TorchrunGroup.run` returns on all ranks, or raises on all ranks, whichever rank it was that failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from stageflow.errors import LaunchError, PipelineClosed, StageFailed, TransportError, WorkerDied, WorkerHung
from stageflow.launch.agreement import Decision, Patience, Record, Trouble, decide, failing
from stageflow.launch.base import WorkerContext
from stageflow.launch.devices import choose_devices
from stageflow.launch.failure import Failure, RemoteError
from stageflow.launch.watch import LocalBoard, Notes, Watcher
from stageflow.transport.base import Endpoint, Interrupt
from stageflow.transport.dist import DistEndpoint

T = TypeVar("T")

_GRACE = 1.5  # seconds that the others get to end a call that failed
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between looks while waiting for the others to end


def under_torchrun() -> bool:
    """Whether torchrun (or what sets the same variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class TorchrunGroup:
    """One rank's view of all ranks; made by `join_torchrun`. Used by one thread.

    context: what this rank's worker is given. Its endpoint joins all ranks.
    """

    def __init__(self, store: Store, watchers_store: Store, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._board = LocalBoard()
        self._notes = Notes(store, self.rank, self.size)
        self._notes.publish(Record())
        self._notes.show("its start")
        self._watcher = Watcher(Notes(watchers_store, self.rank, self.size), self._board)
        interrupt = Interrupt(self._watcher.check)
        self.context = WorkerContext(
            rank=self.rank, size=self.size, interrupt=interrupt, board=self._board, device=device, connect=self._connect
        )
        self._call = 0
        self._closed_by: str | None = None

    def _connect(self, interrupt: Interrupt) -> Endpoint:
        return DistEndpoint.create(interrupt=interrupt, device=self.context.device)

    @property
    def usable(self) -> bool:
        """Whether the next call can run; the same on all ranks that still live."""
        return self._closed_by is None

    def run(self, function: Callable[..., T], *args: Any, timeout: float, **kwargs: Any) -> T:
        """Call ``function(*args, **kwargs)`` here while all other ranks call theirs; this rank's result.

        timeout: seconds to wait for the others once this rank is through, as long as none of them gets on.

        Raises on every rank, within 2 s: StageFailed when any rank raised (``__cause__`` is that exception on its own
        rank, elsewhere a RemoteError with its traceback), WorkerDied, WorkerHung, PipelineClosed.
        """
        if self._closed_by is not None:
            raise PipelineClosed(f"this group was closed after: {self._closed_by}")
        self._call += 1
        self._watcher.begin(self._call)
        self._board.set(getattr(function, "__name__", "a call"))
        result: Any = None
        failure: Failure | None = None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            failure = Failure.of(self.rank, error, self._board.action)
        try:
            self._board.set("idle", "the other ranks to end the call" if self.size > 1 else "")
            decision, records = self._agree(failure, timeout)
        finally:
            self._watcher.end()
        if failure is not None and not isinstance(failure.error, Exception):
            raise failure.error  # Ctrl-C and the like are this rank's own
        if decision.kind != "done":
            self._raise(decision, records, failure, timeout)
        self._board.set("idle")
        return result

    def _agree(self, failure: Failure | None, timeout: float) -> tuple[Decision, Sequence[Record]]:
        """Publish how this rank ended and wait for the others."""
        mine = Record(self._call, None if failure is None else _trouble(failure))
        records: Sequence[Record] = [mine if rank == self.rank else Record() for rank in range(self.size)]
        patience = Patience(timeout, _GRACE, time.monotonic())
        pause = _SHORTEST
        try:
            self._notes.publish(mine)
            while True:
                records = self._notes.records()
                lines = self._notes.lines() if pause == _LONGEST else None
                over = patience.over(time.monotonic(), failing(records, self._call), lines)
                decision = decide(records, self._call, patience_over=over)
                if decision.kind != "waiting":
                    return decision, records
                time.sleep(pause)
                pause = min(_LONGEST, pause * 2)
        except RuntimeError:  # the store is gone, and the rank or agent that held it
            decision = decide(records, self._call, patience_over=True)
            return (replace(decision, kind="died") if decision.kind == "hung" else decision), records

    def _raise(
        self, decision: Decision, records: Sequence[Record], failure: Failure | None, timeout: float
    ) -> NoReturn:
        error = self._error(decision, records, failure, timeout)
        if decision.missing or decision.kind != "failed":
            self._closed_by = str(error).partition("\n")[0]
            if decision.kind in ("hung", "died"):
                with contextlib.suppress(RuntimeError):
                    self._notes.publish(replace(records[self.rank], verdict=decision.kind))
        raise error

    def _error(
        self, decision: Decision, records: Sequence[Record], failure: Failure | None, timeout: float
    ) -> StageFailed | WorkerDied | WorkerHung:
        missing = ", ".join(map(str, decision.missing))
        if decision.kind == "died":
            return WorkerDied(
                f"worker {missing or 'unknown'} gave no answer any more: its process, or the connection to it, is "
                "gone; the group is closed",
                worker=decision.missing[0] if decision.missing else None,
            )
        if decision.kind == "hung":
            lines = "".join(f"\n  worker {rank}: {line}" for rank, line in enumerate(self._lines()))
            trouble = None if decision.cause is None else records[decision.cause].trouble
            said = "" if trouble is None else f"\n  worker {decision.cause} raised {trouble.what}"
            return WorkerHung(f"no worker made progress for {timeout:g} s; the group is closed{lines}{said}")
        assert decision.cause is not None
        trouble = records[decision.cause].trouble
        assert trouble is not None
        return _stage_failed(decision.cause, trouble, failure if decision.cause == self.rank else None, missing)

    def _lines(self) -> list[str]:
        try:
            return self._notes.lines()
        except RuntimeError:
            return []

    def shown_by(self, rank: int) -> str:
        """What a rank showed of itself last, "doing for 1.5 s": while its call runs, another text every moment.

        Raises TransportError where the job's store is gone, and the rank or agent that held it.
        """
        try:
            return self._notes.lines()[rank]
        except RuntimeError as error:
            raise TransportError(f"the job's store is gone, and whoever held it: {error}") from error

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise LaunchError on every rank unless all gave the same facts; says which differ and where."""
        everyone = self.all_gather_object(dict(facts))
        differing: list[str] = []
        for name in dict.fromkeys(name for one in everyone for name in one):
            values: dict[str, list[int]] = {}
            for rank, one in enumerate(everyone):
                values.setdefault(repr(one.get(name)), []).append(rank)
            if len(values) > 1:
                told = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
                differing.append(f"{name}: {told}")
        if differing:
            raise LaunchError("the ranks do not run the same thing:\n  " + "\n  ".join(differing))

    def close(self) -> None:
        """Free this rank's part; on every rank. May be called twice."""
        if self._closed_by is None:
            self._closed_by = "close()"
        self._watcher.close()
        self.context.close()

    def __enter__(self) -> TorchrunGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _trouble(failure: Failure) -> Trouble:
    return Trouble(
        kind=failure.kind,
        when=time.time(),
        what=failure.what,
        text=failure.text,
        stage=failure.stage,
        microbatch=failure.microbatch,
        action=failure.action,
    )


def _stage_failed(rank: int, trouble: Trouble, own: Failure | None, missing: str) -> StageFailed:
    where = f"worker {rank}" + (f" (stage {trouble.stage})" if trouble.stage is not None else "")
    during = f" during {trouble.action}" if trouble.action else ""
    after = f"; worker {missing} did not stop within {_GRACE:g} s, so the group is closed" if missing else ""
    error = StageFailed(
        f"{where} raised {trouble.what}{during}{after}",
        worker=rank,
        stage=trouble.stage,
        microbatch=trouble.microbatch,
        action=trouble.action or None,
    )
    if own is not None:
        error.__cause__ = own.error
    else:
        error.__cause__ = RemoteError(trouble.what)
        error.__cause__.add_note(f"\nTraceback on worker {rank}:\n{trouble.text.rstrip()}")
    return error


def join_torchrun(devices: str | Sequence[str] = "auto", facts: Mapping[str, Any] | None = None) -> TorchrunGroup:
    """Join the ranks that torchrun started; to be called on every rank. Starts torch.distributed where nobody has.

    devices: see `choose_devices`; ranks of one machine count from 0 there (LOCAL_RANK).
    facts: what must be the same on all ranks (a plan's digest); versions are compared always.

    Raises LaunchError.
    """
    if not dist.is_available():
        raise LaunchError("this torch was built without torch.distributed")
    if not dist.is_initialized() and not under_torchrun():
        raise LaunchError("launch='torchrun' needs torchrun: torchrun --nproc-per-node N script.py")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(local + 1)))
    device = choose_devices(local_size, devices)[local]
    if not dist.is_initialized():
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps the store when it starts the ranks again, and with it the addresses of those that are dead
        life = PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=life, rank=rank, world_size=size)
        # kept until the process ends: a second group of one job would meet the first one's addresses in the store
        atexit.register(_leave)
    base = distributed_c10d._get_default_store()
    number = base.add(f"stageflow/groups/{dist.get_rank()}", 1)
    own_connection: Store = cast(Any, base).clone()  # one thread's wait must not hold up the other's
    stores = [PrefixStore(f"stageflow/{number}", store) for store in (base, own_connection)]
    group = TorchrunGroup(*stores, device=device)
    try:
        group.check_same({"stageflow": version("stageflow"), **_versions(), **(facts or {})})
        group.context.endpoint()
    except BaseException:
        group.close()
        raise
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "byte order": torch.tensor([1], dtype=torch.int32).view(torch.uint8).tolist(),
    }

"""From what went wrong in a worker to the exception the driver raises."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageflow.errors import Aborted, StageFailed, TransferTimeout, TransportError, WorkerDied, WorkerHung
from stageflow.launch.base import IDLE, WorkerStatus
from stageflow.launch.supervisor import FailureKind

_ACTION = re.compile(r"(\d+)[A-Z](\d+)")


class RemoteError(Exception):
    """Stands for a worker's exception that can't travel; its text says what it was."""


@dataclass
class Failure:
    """An exception that ended a worker's call, and where.

    when: time.monotonic() at which it was caught. what: its class and the first line of its text. text: its traceback.
    action: what the worker did, "" if unknown.
    """

    rank: int
    when: float
    kind: FailureKind
    error: BaseException
    what: str
    text: str
    stage: int | None = None
    microbatch: int | None = None
    action: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, doing: str) -> Failure:
        """Describe an exception just caught on a worker.

        The place is what the exception says itself (attributes ``stage``, ``microbatch``, ``action``), else what the
        worker's status said it was ``doing``.
        """
        own_action = getattr(error, "action", None)
        action = own_action if isinstance(own_action, str) and own_action else doing
        stage, microbatch = split_action(action)
        own_stage, own_microbatch = getattr(error, "stage", None), getattr(error, "microbatch", None)
        return cls(
            rank=rank,
            when=time.monotonic(),
            kind=kind_of(error),
            error=error,
            what=_name(error),
            text="".join(traceback.format_exception(error)),
            stage=own_stage if isinstance(own_stage, int) else stage,
            microbatch=own_microbatch if isinstance(own_microbatch, int) else microbatch,
            action=action,
        )


def _name(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as another:  # of a class of the user's
        text = f"(its text can't be had: __str__ raised {type(another).__name__})"
    first = next(iter(text.splitlines()), "")
    return type(error).__name__ + (f": {first}" if first else "")


def split_action(action: str) -> tuple[int | None, int | None]:
    """Stage and micro-batch of an action's text ("5B3": 5, 3), as far as it is one."""
    match = _ACTION.match(action)
    return (int(match[1]), int(match[2])) if match else (None, None)


def kind_of(error: BaseException) -> FailureKind:
    """How much an exception says about the cause (see supervisor.Failed)."""
    match error:
        case Aborted():
            return "aborted"
        case TransferTimeout():
            return "timeout"
        case TransportError():
            return "transport"
        case _:
            return "error"


def stage_failed(failure: Failure, *, closed: bool, stuck: Sequence[int] = ()) -> StageFailed:
    """The error of a call in which a worker's code raised; its ``__cause__`` is that exception.

    The exception carries ``worker``, ``stage``, ``microbatch`` and ``action`` as attributes.
    """
    where = f"worker {failure.rank}" + (f" (stage {failure.stage})" if failure.stage is not None else "")
    during = f" during {failure.action}" if failure.action else ""
    error = StageFailed(
        f"{where} raised {failure.what}{during}" + _aftermath(closed, stuck),
        worker=failure.rank,
        stage=failure.stage,
        microbatch=failure.microbatch,
        action=failure.action or None,
    )
    error.__cause__ = failure.error
    return error


def _aftermath(closed: bool, stuck: Sequence[int]) -> str:
    if stuck:
        names = ", ".join(map(str, stuck))
        return f"; worker {names} did not stop when told to, so all workers were ended and the group is closed"
    return "; the group is closed" if closed else ""


def worker_died(status: WorkerStatus, code: int | None, stacks: str = "") -> WorkerDied:
    """The error of a worker whose process ended.

    code: its exit code, or minus the signal that ended it; None: its parent, which would know, was killed.
    stacks: what it wrote to its fault log.
    """
    stage, microbatch = split_action(status.action)
    where = f"worker {status.rank}" + (f" (stage {stage})" if stage is not None else "")
    if code is None:
        how = "ended, as a child of the workers' server process, which was killed,"
    elif code < 0:
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        how = f"died of signal {-code}{name}"
    else:
        how = f"exited with code {code}"
    text = f"{where} {how} during {status.action or 'its start'}; the group is closed"
    if code == -signal.SIGKILL:
        text += ". Nobody but the system or a person sends SIGKILL: look whether memory ran out (dmesg)"
    if stacks:
        text += "\n" + stacks.rstrip()
    return WorkerDied(text, worker=status.rank, stage=stage, microbatch=microbatch, action=status.action or None)


def worker_hung(
    statuses: Sequence[WorkerStatus], timeout: float, stacks: Mapping[int, str], said: Sequence[Failure] = ()
) -> WorkerHung:
    """The error of a call in which nothing moved for ``timeout`` seconds.

    said: failures of workers that gave up waiting by themselves, perhaps before.
    """
    suspects = [status for status in statuses if status.stopped] or [
        status for status in statuses if status.action not in ("", IDLE) and not status.waits_for
    ]
    who = ", ".join(
        f"worker {one.rank} was " + ("stopped by a signal" if one.stopped else f"in {one.action}") for one in suspects
    )
    first = f"no worker made progress for {timeout:g} s" + (f": {who}" if who else "")
    lines = [f"{first}; all workers were ended and the group is closed"]
    for status in statuses:
        lines.append(f"  {status}")
    lines += [f"  worker {failure.rank} raised {failure.what}" for failure in said]
    for rank, stack in sorted(stacks.items()):
        if stack:
            lines.append(f"stacks of worker {rank}:")
            lines.extend(f"  {line}" for line in stack.rstrip().splitlines())
    if len(suspects) != 1:
        return WorkerHung("\n".join(lines))
    stage, microbatch = split_action(suspects[0].action)
    action = suspects[0].action or None
    return WorkerHung("\n".join(lines), worker=suspects[0].rank, stage=stage, microbatch=microbatch, action=action)

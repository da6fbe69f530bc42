"""How ranks without a driver agree on how a call ended. Pure: records in, a decision out.

Every rank keeps one record that all others can read. A rank ends a call by publishing its record for that call's
number; the call is over once all have, and its cause is the same on every rank because all look at the same records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from stageflow.launch.supervisor import WEIGHT, FailureKind


@dataclass(frozen=True)
class Trouble:
    """What ended a rank's part of a call, without the exception itself.

    when: time.time(), so that ranks of one machine can be told apart; ranks of several only roughly.
    """

    kind: FailureKind
    when: float
    what: str
    text: str
    stage: int | None = None
    microbatch: int | None = None
    action: str = ""


@dataclass(frozen=True)
class Record:
    """What a rank publishes: the number of the last call it ended, and how.

    verdict: that it waited for the others in vain and told its caller so; then they must come to the same.
    """

    call: int = 0
    trouble: Trouble | None = None
    verdict: Literal["hung", "died"] | None = None

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, data: bytes | str) -> Record:
        plain = json.loads(data)
        trouble = plain["trouble"]
        return cls(plain["call"], None if trouble is None else Trouble(**trouble), plain["verdict"])


@dataclass(frozen=True)
class Decision:
    """How a call stands.

    kind: "waiting" not over; "done" all well; "failed" because of `cause`; "hung" nothing came; "died" some ranks say
        no word any more, and that is all that is known.
    cause: the rank whose trouble it is. missing: ranks that have not ended.
    """

    kind: Literal["waiting", "done", "failed", "hung", "died"]
    cause: int | None = None
    missing: tuple[int, ...] = ()


class Patience:
    """How long a rank that is through waits for the others.

    timeout: seconds without any rank's status changing. now: when it is through.
    grace: seconds once a rank failed; half of it when all that is known is that a connection was lost, because the rank
        at its other end will hardly speak again.
    """

    def __init__(self, timeout: float, grace: float, now: float) -> None:
        self._timeout = timeout
        self._grace = grace
        self._moved = now
        self._failed_at: float | None = None
        self._shown: list[str] = []

    def over(self, now: float, failed: FailureKind | None, lines: Sequence[str] | None) -> bool:
        """Whether to wait no longer.

        failed: see `failing`. lines: every rank's status, "doing for 1.5 s", or None where not looked at.
        """
        if failed is not None:
            self._failed_at = now if self._failed_at is None else self._failed_at
            return now - self._failed_at >= (self._grace / 2 if failed == "transport" else self._grace)
        if lines is not None:
            shown = [line.rpartition(" for ")[0] for line in lines]  # the seconds change by themselves
            if shown != self._shown:
                self._shown, self._moved = shown, now
        return now - self._moved >= self._timeout


def failing(records: Sequence[Record], call: int) -> FailureKind | None:
    """The weightiest kind of trouble with which any rank ended this call; "timeout" where one gave the others up."""
    kinds: list[FailureKind] = [r.trouble.kind for r in records if r.call == call and r.trouble is not None]
    if any(record.call == call and record.verdict is not None for record in records):
        kinds.append("timeout")
    return min(kinds, key=WEIGHT.__getitem__, default=None)


def decide(records: Sequence[Record], call: int, *, patience_over: bool) -> Decision:
    """How call number ``call`` stands by these records (index: rank).

    patience_over: ranks that have not ended count as lost; only then may they be missing from a decision.
    """
    missing = tuple(rank for rank, record in enumerate(records) if record.call < call)
    troubles = {rank: r.trouble for rank, r in enumerate(records) if r.call == call and r.trouble is not None}
    cause = min(troubles, key=lambda rank: (WEIGHT[troubles[rank].kind], troubles[rank].when, rank), default=None)
    for record in records:
        if record.call == call and record.verdict is not None:
            return Decision(record.verdict, cause, missing)
    if missing and not patience_over:
        return Decision("waiting", missing=missing)
    if cause is None:
        return Decision("hung" if missing else "done", missing=missing)
    kind = troubles[cause].kind
    if kind == "timeout":
        return Decision("hung", cause, missing)
    if missing and kind != "error":
        return Decision("died", cause, missing)
    return Decision("failed", cause, missing)

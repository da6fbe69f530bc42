"""What happened, and when: the one record that recorder, metrics, timeline and traces share.

A simulated schedule and a measured step are both a list of `Event`, so every picture and every figure in this
package works for either.
"""

from __future__ import annotations

from typing import NamedTuple

COMPUTE_KINDS = frozenset("FBIW")
"""Kinds that count as work: forward, backward, gradient of the inputs, gradient of the weights."""

OTHER_KINDS = frozenset({"wait", "send", "reduce", "update"})
"""Kinds that do not: waiting for a message, handing one over, a data-parallel reduction, the optimizer's step."""

KIND_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the inputs",
    "W": "gradient of the weights",
    "wait": "waiting for a message",
    "send": "handing over a message",
    "reduce": "reduction of gradients",
    "update": "optimizer step",
}


class Event(NamedTuple):
    """One stretch of time on one worker.

    worker: which worker, from 0.
    stage: which stage; -1 where none is meant (the optimizer's step of all stages of a worker).
    kind: "F", "B", "I", "W", or "wait", "send", "reduce", "update" (see `KIND_WORDS`).
    microbatch: which micro-batch, from 0; -1 where none is meant.
    start, end: seconds on one clock for all workers; its zero has no meaning.
    """

    worker: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    def __str__(self) -> str:
        """As in a schedule's text: ``2F0``; for a wait ``wait(2,0)``."""
        if self.kind in COMPUTE_KINDS:
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{self.kind}({self.stage},{self.microbatch})"

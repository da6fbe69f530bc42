"""The instruction set of a schedule: what one worker can do with one micro-batch of one stage."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """One step of a schedule.

    kind: "F" forward; "B" whole backward; "I" gradient of the inputs only; "W" gradient of the weights only.
        A micro-batch of a stage gets either one B, or one I and one W.
    stage: which stage.
    microbatch: which micro-batch, from 0.

    ``str(Action("F", 2, 0)) == "2F0"``.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""Each worker's actions, in the order in which it runs them."""

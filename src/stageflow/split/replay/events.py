"""What a trace consists of: events, and the values that they make, use and change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stageflow.split.replay.log import NOTHING, Outcome


@dataclass(eq=False)
class Value:
    """A tensor object of the timeline.

    key: "12.0" for the first tensor that event 12 made, "i3" for the third tensor of the input, "s:name" for
        parameters and buffers, "c..." for constants that lie around in the model or a global.
    born: the event that made it; -1 for what was there before.
    tensor: kept, so that its id stays taken.
    tainted: whether it depends on more than shapes: on the input's values, the weights, or chance.
    """

    key: str
    born: int
    tensor: Tensor
    tainted: bool


@dataclass(eq=False)
class TraceEvent:
    """A call of an atom, or of a torch function between atoms.

    number: in the timeline. name: of the function; of an atom, its path. call: how many-th call of this atom.
    uses, makes, changes: tensors it takes or reads from elsewhere, new ones it gives, ones it changes in place.
    extracts: gives Python something that depends on more than shapes. random: may draw random numbers.
    transforms: is inside a transform of torch.func, over values that a later stage would have no ghosts for.
    region: the activation checkpoints around it.
    example: of an atom, its arguments, to measure it.
    """

    number: int
    name: str
    call: int | None = None
    uses: list[Value] = field(default_factory=list)
    makes: list[Value] = field(default_factory=list)
    changes: list[Value] = field(default_factory=list)
    extracts: bool = False
    random: bool = False
    transforms: bool = False
    region: tuple[int, ...] = ()
    outcome: Outcome = NOTHING
    example: Any = None

    @property
    def is_atom(self) -> bool:
        return self.call is not None

    @property
    def parameter(self) -> str | None:
        """The first parameter that a torch function takes directly."""
        states = (v.key[2:] for v in self.uses if v.key.startswith("s:") and isinstance(v.tensor, nn.Parameter))
        return None if self.is_atom else next(states, None)

    @property
    def label(self) -> str:
        """What to call it where the user sees it."""
        return self.parameter or self.name

    @property
    def by_autograd(self) -> bool:
        """Whether it runs a backward pass, which needs the graph in one piece."""
        return not self.is_atom and self.name in ("grad", "backward")

"""What flows between stages: a DAG of stages and the bundles of values on its edges.

Pure data: no torch, no processes. A chain is one case of the graph, not the rule; a value goes straight from
the stage that makes it to each stage that uses it.

           ┌────────── skip ─────────┐
    inputs ─► stage 0 ─► stage 1 ─► stage 2 ─► output, loss
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from stageflow.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class StageGraph:
    """Which stage feeds which.

    Stages are numbered so that edges only go up: ``producer < consumer``.
    """

    n_stages: int
    edges: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        if self.n_stages < 1:
            raise InputError(f"a stage graph needs at least one stage, got n_stages={self.n_stages}")
        for edge in sorted(self.edges):
            producer, consumer = edge
            if not 0 <= producer < consumer < self.n_stages:
                raise InputError(
                    f"edge {edge} does not go up within stages 0..{self.n_stages - 1}: "
                    "number the stages so that every producer comes before its consumers"
                )

    @classmethod
    def chain(cls, n_stages: int) -> StageGraph:
        """Stage i feeds stage i + 1 and no other."""
        return cls(n_stages, frozenset((i, i + 1) for i in range(n_stages - 1)))

    @property
    def output_stage(self) -> int:
        """The stage that makes the model's output and the loss: the last one."""
        return self.n_stages - 1

    @cached_property
    def _predecessors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(p for p, c in self.edges if c == s)) for s in range(self.n_stages))

    @cached_property
    def _successors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(c for p, c in self.edges if p == s)) for s in range(self.n_stages))

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """Stages whose values ``stage`` uses, ascending."""
        return self._predecessors[stage]

    def successors(self, stage: int) -> tuple[int, ...]:
        """Stages that use values of ``stage``, ascending."""
        return self._successors[stage]


@dataclass(slots=True)
class Bundle:
    """All that one stage hands another for one micro-batch, in one message.

    tensors: by name. A gradient bundle uses the names of the values it belongs to and leaves out what got none.
    meta: what is no tensor, in plain form only (None, bool, int, float, str, and lists and str-keyed dicts of them).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    meta: Any = None


@dataclass(slots=True)
class StageResult:
    """What one forward of one stage gives.

    bundles: one per successor in the graph, always, if only an empty one.
    output: the model's output on the output stage, None elsewhere.
    """

    bundles: dict[int, Bundle]
    output: Any = None


class StageSpec(ABC):
    """What a stage is made of; travels to its worker, and makes the stage there.

    It holds the weights of its own stage only, or the means to make them (a function, a file). `build` gives the
    spec's modules away and may be called once: a spec that did not travel shares its tensors with the user's model.

    index: the stage's number in the graph.
    """

    index: int

    @abstractmethod
    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> StageProgram:
        """Make the stage's program with its parameters and buffers on ``device``.

        dtype: of those that are floating-point; None: as they are.
        """


class StageProgram(Protocol):
    """A stage as the runtime sees it: one callable with the parameters it needs.

    index: its number in the graph.
    module: an nn.Module for train()/eval()/to(); its parameters need not be the original names.
    parameters, buffers: original name -> the live tensor here, owned and mirrored ones (see Split.mirrors);
        a tied parameter appears once, under its canonical name.
    layers: the modules that this stage runs whole, one after the other; None where it has no such thing.
    """

    index: int
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def layers(self) -> Sequence[nn.Module] | None: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def origin(self, value: str) -> str:
        """In words, what made a tensor that this stage sends: "what layer 'blocks.3' gives". value: its name."""
        ...

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        """Run the stage on one micro-batch.

        args, kwargs: the model's own inputs, cut to the micro-batch.
        received: the bundle of each predecessor. A tensor that required grad where it was made does so here; it is
            no leaf and no view, and its memory is this stage's own, so it may be changed in place. A program with
            an attribute ``takes_leaves = True`` forgoes that and is given leaves, which costs less.
        seed: to be called as ``seed(layer)`` where a layer starts, with the layer's number in the WHOLE model, so
            that random draws don't depend on where the cuts are.
        """
        ...

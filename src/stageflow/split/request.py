"""What is to be split, and how: the one argument of every way of cutting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch import Tensor, nn

from stageflow.errors import InputError, SplitError
from stageflow.split.balance import chain_min_max, most_stages

if TYPE_CHECKING:
    from stageflow.split.deferred import DeferredModel

Balance = Literal["time", "parameters"]
BALANCES: tuple[Balance, ...] = get_args(Balance)


class ExampleFailed(SplitError):
    """The model itself raised on the example; that exception is ``__cause__``, and no other way to cut would help."""


class ListedModules(nn.Sequential):
    """A list of modules as one model: the first takes the model's arguments, each other one the value before it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self
        value = first(*args, **kwargs)
        for module in rest:
            value = module(value)
        return value


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs).

    example: that pair; a tuple or list of positional arguments; a mapping of keyword arguments; or one tensor.
    Raises InputError for anything else.
    """
    if isinstance(example, Mapping):
        return (), dict(cast(Mapping[str, Any], example))
    if isinstance(example, Tensor):
        return (example,), {}
    if not isinstance(example, (tuple, list)):
        raise InputError(
            "example must be a tuple of arguments, a dict of keyword arguments, a pair of both or one tensor, got "
            f"{type(example).__name__}"
        )
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
        return example[0], dict(example[1])
    return tuple(example), {}


@dataclass(frozen=True)
class Request:
    """A model and the wish how to cut it.

    model: the whole model; where ``deferred`` is given, one whose parameters are on the meta device.
    example: ``(args, kwargs)`` of one call of the model, or None.
    balance: what to make equal between stages.
    boundaries: module paths, each the first thing of a new stage; None leaves the cuts to ``balance``.
    deferred: the recipe of a model given as a function.
    """

    model: nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    stages: int
    balance: Balance
    boundaries: tuple[str, ...] | None
    deferred: DeferredModel | None = None

    def choose_cuts(self, names: Sequence[str], costs: Sequence[float], allowed: set[int] | None = None) -> list[int]:
        """Bounds of the stages over a chain of layers: at the boundaries asked for, or balanced.

        names: module path of each layer. allowed: as in `chain_min_max`.
        """
        if self.boundaries is not None:
            return self._named_cuts(names, allowed)
        possible = most_stages(len(names), allowed)
        if possible < self.stages:
            raise SplitError(
                f"{len(names)} layers can be cut into at most {possible} stages, {self.stages} were asked for"
            )
        return chain_min_max(costs, self.stages, allowed=allowed)

    def _named_cuts(self, names: Sequence[str], allowed: set[int] | None) -> list[int]:
        assert self.boundaries is not None
        cuts = []
        for path in self.boundaries:
            inside = (i for i, name in enumerate(names) if name == path or name.startswith(f"{path}."))
            position = next(inside, None)
            if position is None:
                raise SplitError(f"boundary {path!r} is none of the layers that can start a stage: {_listing(names)}")
            if position == 0 or (allowed is not None and position not in allowed):
                raise SplitError(f"no cut is possible right before {path!r}")
            cuts.append(position)
        if cuts != sorted(set(cuts)):
            raise SplitError(f"boundaries {list(self.boundaries)} are not in the order in which the layers run")
        return [0, *cuts, len(names)]


def _listing(names: Sequence[str]) -> str:
    if len(names) <= 12:
        return ", ".join(names)
    return f"{', '.join(names[:8])}, ... {names[-1]} ({len(names)} layers)"

"""A model given as a function: every process builds it again, and keeps only the weights of its own stages."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import SplitError
from stageflow.split.hollow import HollowBuild
from stageflow.split.request import ListedModules
from stageflow.split.state import named_state
from stageflow.split.stored import check_stored, load_values

_ONE_BUILD_AT_A_TIME = threading.Lock()  # torch's random generators and registration hooks are the process's
_MOST_TRIES = 4


def as_model(built: Any) -> nn.Module:
    """A module, or a list of modules as one. Raises SplitError for anything else."""
    if isinstance(built, nn.Module):
        return built
    if isinstance(built, (list, tuple)) and built and all(isinstance(item, nn.Module) for item in built):
        return ListedModules(*built)
    raise SplitError(
        f"expected an nn.Module, a list of modules or a function that builds one of these, got {type(built).__name__}"
    )


@dataclass(frozen=True)
class RandomState:
    """Where random numbers stand: torch's default generators, Python's and numpy's; and the default dtype."""

    torch_cpu: Tensor
    python: Any
    numpy: Any
    dtype: torch.dtype

    @classmethod
    def now(cls) -> RandomState:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy else None
        return cls(torch.get_rng_state(), random.getstate(), state, torch.get_default_dtype())

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        random.setstate(self.python)
        torch.set_default_dtype(self.dtype)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)


@contextmanager
def _elsewhere(state: RandomState) -> Iterator[None]:
    """Draw from ``state`` meanwhile."""
    here = RandomState.now()
    state.restore()
    try:
        yield
    finally:
        here.restore()


@dataclass(frozen=True)
class DeferredModel:
    """A recipe for a model, and for any part of its weights.

    build: the user's function. start: the random state it begins from, everywhere.
    weights: safetensors file or folder to read values from, by the model's own names; None: as ``build`` makes them.
    needs: name -> what has to be real from birth to keep it. always: what has to be real in every build.
    shapes: name -> shape, to notice a function that builds something else each time.
    """

    build: Callable[[], nn.Module | Sequence[nn.Module]]
    start: RandomState
    weights: Path | None
    needs: dict[str, frozenset[int]]
    always: frozenset[int]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def record(
        cls, build: Callable[[], nn.Module | Sequence[nn.Module]], weights: Path | None = None
    ) -> tuple[DeferredModel, nn.Module]:
        """Run ``build`` without keeping a parameter.

        Returns the recipe and the model with its parameters on the meta device; small ones and buffers are real.
        Without ``weights``, the random state moves on as if the model had been built. Raises SplitError if the
        function fails or gives no model, or not all of it is stored.
        """
        with _ONE_BUILD_AT_A_TIME:
            start = RandomState.now()
            always: frozenset[int] = frozenset()
            hollows, model = _build(build, always, draw=weights is None)
            for _ in range(_MOST_TRIES):
                missed = hollows.missed.union(*(hollows.needs(tensor) for tensor in _attributes(model)))
                if missed <= always:
                    break
                always |= missed
                start.restore()
                hollows, model = _build(build, always, draw=weights is None)
            needs = {name: need for name, tensor, _ in named_state(model) if (need := hollows.needs(tensor))}
            buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
            _strip(model, hollows, keep=buffers - needs.keys())
        if weights is not None:
            check_stored(model, weights)
        return cls(build, start, weights, needs, always, _shapes(model)), model

    def materialise(self, keep: AbstractSet[str]) -> nn.Module:
        """Build the model with real values for the parameters and buffers named in ``keep``, as they would be in a
        plain build or as stored in ``weights``; all other parameters are on the meta device.
        """
        loads = self.weights is not None
        real = frozenset() if loads else self.always.union(*(self.needs.get(name, ()) for name in keep))
        with _ONE_BUILD_AT_A_TIME, _elsewhere(self.start):
            hollows, model = _build(self.build, real, draw=not loads)
            if _shapes(model) != self.shapes:
                raise SplitError(f"the function built another model here: {_difference(self.shapes, _shapes(model))}")
            _strip(model, hollows, keep, values=not loads)
        if self.weights is not None:
            load_values(model, self.weights, keep)
        return model


def _build(build: Callable[[], Any], real: AbstractSet[int], draw: bool) -> tuple[HollowBuild, nn.Module]:
    with HollowBuild(real, draw) as hollows:
        return hollows, as_model(build())


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor, _ in named_state(model)}


def _difference(here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]) -> str:
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return f"{names[0]!r} has shape {there.get(names[0])}, it had {here.get(names[0])} when it was split"


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes, and that therefore stay with every copy of the model."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _strip(model: nn.Module, hollows: HollowBuild, keep: AbstractSet[str], values: bool = True) -> None:
    """Give what is in ``keep`` its memory back; move all other parameters, and buffers made from them, to meta."""
    kept = {id(tensor) for name, tensor, _ in named_state(model) if name in keep}
    for tensor in _attributes(model):
        hollows.keep(tensor, values)
    absent: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            if id(tensor) in kept:
                hollows.keep(tensor, values)
            elif isinstance(tensor, nn.Parameter) or hollows.is_hollow(tensor):
                setattr(module, name, absent.setdefault(id(tensor), _on_meta(tensor)))


def _on_meta(tensor: Tensor) -> Tensor:
    outline = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(outline, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else outline

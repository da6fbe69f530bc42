"""Hooks that the user put on parameters: pickling a parameter drops them without a word, so they travel beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import SplitError
from stageflow.graph import StageProgram, StageSpec
from stageflow.split.spec import Split


@dataclass(frozen=True)
class ParameterHooks:
    """Hooks of one parameter, in the order in which they run.

    gradient: of ``register_hook``. accumulated: of ``register_post_accumulate_grad_hook``.
    """

    gradient: tuple[Callable[[Tensor], Any], ...]
    accumulated: tuple[Callable[[Tensor], Any], ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> ParameterHooks | None:
        """Those of a parameter; None where it has none."""
        hooks = cls(_values(parameter._backward_hooks), _values(parameter._post_accumulate_grad_hooks))
        return hooks if hooks.gradient or hooks.accumulated else None

    def put_on(self, parameter: nn.Parameter) -> None:
        """Register them, unless the parameter never travelled and has them still."""
        if ParameterHooks.of(parameter) is None:
            for hook in self.gradient:
                parameter.register_hook(hook)
            for hook in self.accumulated:
                parameter.register_post_accumulate_grad_hook(hook)


def _values(registered: Any) -> tuple[Callable[[Tensor], Any], ...]:
    return tuple(registered.values()) if registered else ()


@dataclass
class HookedSpec(StageSpec):
    """A stage whose parameters have hooks, by name."""

    index: int
    inner: StageSpec
    hooks: dict[str, ParameterHooks]

    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> StageProgram:
        program = self.inner.build(device, dtype)
        for name, hooks in self.hooks.items():
            hooks.put_on(program.parameters[name])
        return program


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise SplitError for hooks on a module's backward: a graph has none, and a replay meets them on some workers."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise SplitError(
                f"{path or 'the model'!r} has backward hooks, which only the layers of an nn.Sequential may have; "
                "hooks on parameters work everywhere"
            )


def carry_hooks(model: nn.Module, split: Split) -> None:
    """Let the parameters of a split's stages have the hooks that they have in the model.

    Raises SplitError for a hook on a parameter that several stages use: on one device it sees the sum of their
    gradients, and here no stage ever has that while autograd runs.
    """
    hooks = {name: found for name, p in model.named_parameters() if (found := ParameterHooks.of(p)) is not None}
    for name in hooks:
        if name in split.mirrors:
            stages = ", ".join(map(str, (split.owners[name], *split.mirrors[name])))
            raise SplitError(
                f"parameter {name!r} has a hook and is used by stages {stages}: the hook would see only a part of the "
                "gradient at a time. Remove the hook, or choose boundaries that keep its users in one stage"
            )
    for index, spec in enumerate(split.specs):
        own = {name: found for name, found in hooks.items() if split.owners[name] == index}
        if own:
            split.specs[index] = HookedSpec(index, spec, own)

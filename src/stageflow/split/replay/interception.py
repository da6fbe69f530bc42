"""Seeing the events of a forward: calls of chosen modules ("atoms"), and torch functions called between them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from stageflow.split.replay.ghost import Ghost

_REMEMBERED = 1 << 16  # keys of atoms within checkpoints, of all micro-batches in flight


class StageExit(BaseException):
    """Ends a replay where the next stage's part begins. No Exception, lest the model's own code catch it."""


class Timeline(TorchFunctionMode):
    """One run of a model's forward, seen as events.

    A torch function mode while the model's own code runs between atoms; taken off inside them, where torch runs at
    its own speed.

    thread: in which it runs. What the model does in others can't be put in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.thread = threading.get_ident()

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An atom's forward is called."""
        raise NotImplementedError

    def run_inside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an atom's forward, unseen."""
        self.inside = True
        on_top = _get_current_function_mode() is self
        if on_top:
            _pop_mode()
        try:
            return forward(*args, **kwargs)
        finally:
            if on_top:
                _push_mode(self)
            self.inside = False


def lend(value: Any) -> Any:
    """Arguments of a torch function, with ghosts and tensors on the meta device filled with any numbers.

    So a model without weights can be run, one function at a time, without ever being whole in memory.
    """
    if isinstance(value, Tensor):
        if not isinstance(value, Ghost) and not value.is_meta:
            return value
        real = torch.empty(value.shape, dtype=value.dtype)
        return real.normal_(std=0.02) if real.is_floating_point() else real.zero_()
    if type(value) in (list, tuple):
        return type(value)(lend(item) for item in value)
    return {key: lend(item) for key, item in value.items()} if type(value) is dict else value


class Stand:
    """Where intercepted modules find the timeline that is running; None lets them run as ever.

    They do so in a backward pass, too, when activation checkpointing calls them again.

    again: what was called to key the random numbers after an atom within a long checkpoint, by the key before: so that
        what follows it draws the same once more. Checkpointing itself restores only the state at its beginning.
    """

    def __init__(self) -> None:
        self.current: Timeline | None = None
        self.again: dict[int, Callable[[], None]] = {}

    def key_after(self, seed: Callable[[], None]) -> None:
        """Call ``seed``, and remember to call it again."""
        if len(self.again) >= _REMEMBERED:
            del self.again[next(iter(self.again))]
        self.again[torch.default_generator.initial_seed()] = seed
        seed()

    def key_again(self) -> None:
        """What `key_after` did the first time."""
        seed = self.again.get(torch.default_generator.initial_seed())
        if seed is not None:
            seed()


def intercept(module: nn.Module, path: str, stand: Stand) -> Callable[[], None]:
    """Let ``stand.current`` decide what a call of ``module.forward`` does. Hooks of the module run around it as ever.

    Returns what undoes it.
    """
    own = module.__dict__.get("forward")

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # The class is asked at each call: the split backward changes it after this was set up.
        plain = own or type(module).forward.__get__(module)
        timeline = stand.current
        if timeline is None:
            result = plain(*args, **kwargs)
            if stand.again:
                stand.key_again()
            return result
        if timeline.inside:
            return plain(*args, **kwargs)
        return timeline.atom(path, plain, args, kwargs)

    # Past nn.Module's own way to set attributes, which a compiled module hands on to the one it was made from.
    module.__dict__["forward"] = forward

    def undo() -> None:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own

    return undo


def tensors_in(value: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors in nested lists, tuples, dicts, sets, slices and dataclasses, in order; one that recurs, again."""
    if found is None:
        found = []
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            tensors_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_in(item, found)
    elif isinstance(value, slice):
        tensors_in((value.start, value.stop, value.step), found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            tensors_in(getattr(value, field.name, None), found)
    return found


def known(func: Any) -> tuple[str, bool]:
    """The name of a torch function, to compare timelines and for messages; and whether it may draw random numbers."""
    found = _KNOWN.get(func)
    if found is None:
        name = getattr(func, "__name__", None) or str(func)
        if name in ("__get__", "__set__"):
            name = f"{getattr(func.__self__, '__name__', '')}.{name}"
        found = _KNOWN[func] = name, name in _RANDOM_NAMES
    return found


_KNOWN: dict[Any, tuple[str, bool]] = {}  # there are only so many torch functions


def over_what(func: Any) -> Any:
    """What to call instead of a function that iterates over a tensor: an iterator is no value, a tuple is."""
    return Tensor.unbind if func is Tensor.__iter__ else None


# Draw from the random generators, whatever their arguments (dropout, say, also with p = 0).
_RANDOM_NAMES = frozenset(
    {
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
        "dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "bernoulli", "bernoulli_",
        "multinomial", "normal", "normal_", "poisson", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
        "log_normal_", "rrelu", "rrelu_", "gumbel_softmax", "rand", "rand_like", "randn", "randn_like", "randint",
        "randint_like", "randperm", "scaled_dot_product_attention", "multi_head_attention_forward", "trunc_normal_",
        "xavier_uniform_", "native_dropout", "fractional_max_pool2d", "fractional_max_pool3d",
    }
)  # fmt: skip


def is_compiled(module: nn.Module) -> bool:
    """Whether a module came from torch.compile, so that what it calls can't be seen."""
    # By name, since importing torch._dynamo takes seconds.
    return any(cls.__name__ == "OptimizedModule" and "_dynamo" in cls.__module__ for cls in type(module).__mro__)


def walk_atoms(model: nn.Module, opened: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """The maximal modules with parameters that are not opened; a module in several places, once."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if path in opened or _is_container(module):
            for name, child in module.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)
        elif next(module.parameters(), None) is not None:
            yield path, module

    yield from walk(model, "")


def _is_container(module: nn.Module) -> bool:
    """Whether a module can't be called at all."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)

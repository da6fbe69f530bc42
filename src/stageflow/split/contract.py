"""What inputs a captured graph is good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from stageflow.errors import InputError


@dataclass(frozen=True)
class _TensorLeaf:
    """sizes: a number where the graph is good for that one only, else an expression of free sizes (sympy)."""

    name: str
    sizes: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _PlainLeaf:
    name: str
    value: Any


@dataclass(frozen=True)
class InputContract:
    """The structure, shapes and plain values of the model's arguments for which a graph was captured.

    args, kwargs: as in the call that was captured, with the number of its leaf in place of each.
    ranges: of the free sizes, by their sympy symbol: smallest and largest.
    """

    leaves: tuple[_TensorLeaf | _PlainLeaf, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranges: dict[Any, tuple[float, float]]

    @classmethod
    def read(
        cls, leaves: Sequence[fx.Node | ConstantArgument], spec: pytree.TreeSpec, ranges: Mapping[Any, Any]
    ) -> InputContract:
        """From torch.export's placeholders, argument structure and range constraints."""
        known = tuple(_leaf(leaf) for leaf in leaves)
        args, kwargs = pytree.tree_unflatten(range(len(known)), spec)
        return cls(known, args, kwargs, {symbol: (float(r.lower), float(r.upper)) for symbol, r in ranges.items()})

    @cached_property
    def _spec(self) -> pytree.TreeSpec:
        return pytree.tree_structure((self.args, self.kwargs))

    def top_level(self) -> list[int | str]:
        """For each leaf the argument that it is in: a position, or a keyword's name."""
        arguments = [*enumerate(self.args), *self.kwargs.items()]
        return [name for name, value in arguments for _ in pytree.tree_leaves(value)]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call's arguments.

        Raises InputError naming the argument that the graph was not captured for.
        """
        if kwargs.keys() == self.kwargs.keys():
            kwargs = {name: kwargs[name] for name in self.kwargs}
        given, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise InputError(
                f"the graph of this model was captured for {len(self.args)} positional arguments and the keywords "
                f"{sorted(self.kwargs)}, structured as in the example; got {len(args)} and {sorted(kwargs)}: split it "
                "with an example like this call"
            )
        free: dict[Any, int] = {}
        for leaf, value in zip(self.leaves, given, strict=True):
            self._check(leaf, value, free)
        return given

    def _check(self, leaf: _TensorLeaf | _PlainLeaf, value: Any, free: dict[Any, int]) -> None:
        if isinstance(leaf, _PlainLeaf):
            if type(value) is not type(leaf.value) or value != leaf.value:
                raise InputError(f"the graph was captured with {leaf.name} = {leaf.value!r}, got {value!r}")
            return
        if not isinstance(value, Tensor) or value.dtype != leaf.dtype or value.dim() != len(leaf.sizes):
            given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{leaf.name} must be a {leaf.dtype} tensor of {len(leaf.sizes)} dimensions, got {given}")
        for dim, (expected, size) in enumerate(zip(leaf.sizes, value.shape, strict=True)):
            problem = self._size_problem(expected, size, free)
            if problem:
                raise InputError(
                    f"dimension {dim} of {leaf.name} is {size}, but the graph of this model was captured for "
                    f"{problem}: split it with an example of this size"
                )

    def _size_problem(self, expected: Any, size: int, free: dict[Any, int]) -> str | None:
        if isinstance(expected, int):
            return f"{expected} only" if size != expected else None
        if expected.is_Symbol and expected not in free:
            free[expected] = size
            low, high = self.ranges.get(expected, (0, float("inf")))
            return None if low <= size <= high else f"sizes from {low:.0f} to {high:.0f}"
        if expected.free_symbols <= free.keys() and int(expected.subs(free)) != size:
            return f"{int(expected.subs(free))} there, given the other inputs"
        return None


def _leaf(leaf: fx.Node | ConstantArgument) -> _TensorLeaf | _PlainLeaf:
    if isinstance(leaf, ConstantArgument):
        return _PlainLeaf(leaf.name, leaf.value)
    fake = leaf.meta["val"]
    if not isinstance(fake, Tensor):
        return _PlainLeaf(leaf.name, fake)
    return _TensorLeaf(leaf.name, tuple(_size(size) for size in fake.shape), fake.dtype)


def _size(size: int | SymInt) -> Any:
    if isinstance(size, int):
        return size
    expression: Any = size.node.expr
    return int(expression) if expression.is_number else expression

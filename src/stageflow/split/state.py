"""The parameters and buffers of a model: their names, who is tied to whom, who owns what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageflow.errors import SplitError


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a parameter or buffer without its values.

    persistent: whether it is part of the model's state_dict (parameters always are).
    """

    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Census:
    """All parameters and buffers of a model.

    tensors: by first name, parameters before buffers, in the model's order.
    aliases: further names -> first name.
    """

    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]

    def first_name(self, name: str) -> str:
        """The name under which a parameter or buffer is owned."""
        return self.aliases.get(name, name)


def take_census(model: nn.Module) -> Census:
    """List the parameters and buffers of ``model``.

    Raises SplitError for lazy parameters, which have no shape yet, and for two parameters that overlap in memory
    without being one object: training the copies in two stages would let them drift apart.
    """
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    persistent = _persistent_buffers(model)
    for name, tensor, kind in named_state(model):
        if is_lazy(tensor):
            raise SplitError(f"{kind} {name!r} is lazy and has no shape yet: run the model once before splitting it")
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        kept = kind == "parameter" or name in persistent
        tensors[name] = TensorInfo(kind, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, kept)
    _refuse_overlaps(model)
    return Census(tensors, aliases)


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor, Literal["parameter", "buffer"]]]:
    """Every name of every parameter, then of every buffer; tied ones appear under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer"


def tensor_named(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of ``model`` with this name."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def assign_owners(
    census: Census, holders: Sequence[AbstractSet[str]]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Decide who owns what.

    holders: per stage, the first names of all it holds.

    The first stage that holds a tensor owns it; further holders of a parameter mirror it. What no stage holds (the
    model never uses it) is owned by stage 0, which must be made to hold it.

    Returns ``(owners, mirrors)`` as in `Split`.
    """
    owners: dict[str, int] = {}
    mirrors: dict[str, tuple[int, ...]] = {}
    for name, info in census.tensors.items():
        stages = [stage for stage, held in enumerate(holders) if name in held] or [0]
        owners[name] = stages[0]
        if info.kind == "parameter" and len(stages) > 1:
            mirrors[name] = tuple(stages[1:])
    return owners, mirrors


def _persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own = {name for name, _ in module._buffers.items()}  # a scripted module's table can't be iterated over
        names.update(prefix + name for name in own - set(module._non_persistent_buffers_set))
    return names


def _refuse_overlaps(model: nn.Module) -> None:
    """Two Parameter objects over one memory are one weight to a single device and two to a pipeline."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or parameter.numel() == 0:
            continue
        start = int(parameter.storage_offset())
        end = start + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        spans.setdefault(parameter.untyped_storage().data_ptr(), []).append((start, int(end), name))
    for group in spans.values():
        group.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(group):
            if start <= end:
                raise SplitError(
                    f"parameters {name!r} and {other!r} are two objects over the same memory: tie them by assigning "
                    "one nn.Parameter to both places, or clone one of them"
                )

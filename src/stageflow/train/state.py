"""A model's state as the whole model names it, from and to stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stageflow.errors import InputError
from stageflow.split import Split


def whole_state(split: Split, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state_dict from what all stages own: persistent tensors, tied ones under each of their names."""
    kept = {name: tensors[name] for name in split.owners if split.tensors[name].persistent}
    kept.update({alias: kept[name] for alias, name in split.aliases.items() if name in kept})
    return kept


def check_state(split: Split, state: Mapping[str, Tensor], strict: bool) -> dict[str, Tensor]:
    """The values by first name. Raises InputError that lists all that does not fit."""
    if not isinstance(state, Mapping):
        raise InputError(f"the state must map names to tensors, as state_dict() gives them, got {type(state).__name__}")
    problems = [
        f"{name} is a {'meta ' * getattr(value, 'is_meta', False)}{type(value).__name__}, not a tensor with values"
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.is_meta
    ]
    if problems:
        raise InputError("the state does not fit the model: " + "; ".join(problems))
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        first = values.setdefault(split.aliases.get(name, name), value)
        if first is not value and not _equal(first, value):
            problems.append(f"{name} and {split.aliases.get(name, name)} are one tied tensor, given different values")
    if strict:
        expected = {name for name, info in split.tensors.items() if info.persistent}
        missing, unknown = sorted(expected - values.keys()), sorted(map(str, values.keys() - split.tensors.keys()))
        problems += [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unknown: {', '.join(unknown)}"] if unknown else []
    values = {name: value for name, value in values.items() if name in split.tensors}
    for name, value in values.items():
        if tuple(value.shape) != split.tensors[name].shape:
            problems.append(f"{name} has shape {split.tensors[name].shape}, given {tuple(value.shape)}")
        elif value.is_complex() and not split.tensors[name].dtype.is_complex:
            problems.append(f"{name} is real, given {value.dtype}")
    if problems:
        raise InputError("the state does not fit the model: " + "; ".join(problems))
    return values


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return a.data_ptr() == b.data_ptr() or torch.allclose(a, b.to(a), rtol=0.0, atol=0.0, equal_nan=True)


def parts_for(split: Split, placement: tuple[int, ...], values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each worker gets of the values: what its stages own or mirror, and every buffer (stages may hold copies)."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(max(placement) + 1)]
    for name, value in values.items():
        if split.tensors[name].kind == "buffer":
            workers = set(range(len(parts)))
        else:
            workers = {placement[stage] for stage in (split.owners[name], *split.mirrors.get(name, ()))}
        for worker in workers:
            parts[worker][name] = value
    return parts

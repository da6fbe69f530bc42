"""A model's state as the whole model names it, from and to stages."""

from __future__ import annotations

from collections.abc import Mapping

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
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        values.setdefault(split.aliases.get(name, name), value)
    problems = []
    if strict:
        expected = {name for name, info in split.tensors.items() if info.persistent}
        missing, unknown = sorted(expected - values.keys()), sorted(values.keys() - split.tensors.keys())
        problems += [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unknown: {', '.join(unknown)}"] if unknown else []
    values = {name: value for name, value in values.items() if name in split.tensors}
    for name, value in values.items():
        if tuple(value.shape) != split.tensors[name].shape:
            problems.append(f"{name} has shape {split.tensors[name].shape}, given {tuple(value.shape)}")
    if problems:
        raise InputError("the state does not fit the model: " + "; ".join(problems))
    return values


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

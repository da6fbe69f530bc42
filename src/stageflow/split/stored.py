"""Reading chosen values from safetensors files, by the names of the model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from stageflow.errors import SplitError
from stageflow.split.state import named_state

_INDEX = "*.safetensors.index.json"


def find_values(weights: Path) -> dict[str, Path]:
    """Which file holds which tensor.

    weights: one safetensors file, or a folder with several and, if large, their index.
    """
    if weights.is_file():
        return dict.fromkeys(_names_in(weights), weights)
    indices = sorted(weights.glob(_INDEX))
    if indices:
        places = json.loads(indices[0].read_text())["weight_map"]
        return {name: weights / file for name, file in places.items()}
    files = sorted(weights.glob("*.safetensors"))
    if not files:
        raise SplitError(f"no safetensors file at {weights}: give one, or a folder that holds them")
    return {name: file for file in files for name in _names_in(file)}


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as problem:
        raise SplitError(f"{file} can't be read as safetensors: {problem}") from problem


def load_values(model: nn.Module, weights: Path, keep: AbstractSet[str]) -> None:
    """Fill the parameters and persistent buffers of ``model`` that are named in ``keep``.

    A tied one may be stored under any of its names. Raises SplitError naming what is missing or has another shape.
    """
    places = find_values(weights)
    wanted = _stored_names(model, places, keep)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in wanted.values():
        by_file[places[name]].append(name)
    targets = {stored: name for name, stored in wanted.items()}
    tensors = {name: tensor for name, tensor, _ in named_state(model)}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as stored, torch.no_grad():
            for name in names:
                target, value = tensors[targets[name]], stored.get_tensor(name)
                if value.shape != target.shape:
                    raise SplitError(f"{name!r} in {file} has shape {list(value.shape)}, not {list(target.shape)}")
                target.copy_(value)


def _stored_names(model: nn.Module, places: dict[str, Path], keep: AbstractSet[str]) -> dict[str, str]:
    """Name in the model -> name in the files, of all that is to be loaded."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor, _ in named_state(model):
        names[id(tensor)].append(name)
    required = set(model.state_dict())  # buffers that are not persistent are computed by the model itself
    wanted, missing = {}, []
    for known in names.values():
        if keep.isdisjoint(known) or required.isdisjoint(known):
            continue
        stored = next((name for name in known if name in places), None)
        if stored is None:
            missing.append(known[0])
        else:
            wanted[known[0]] = stored
    if missing:
        shown = ", ".join(missing[:3])
        raise SplitError(
            f"{len(missing)} tensors of the model are not stored under their names, among them {shown}; stored are "
            f"{', '.join(sorted(places)[:3])}, ..."
        )
    return wanted

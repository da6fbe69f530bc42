"""Reading chosen values from safetensors files, by the names of the model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

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


def check_stored(model: nn.Module, weights: Path) -> None:
    """Raise SplitError unless all of the model is stored in its shapes.

    Reads no values: to be told at once what does not fit, rather than by a worker that comes to load its part.
    """
    places = find_values(weights)
    tensors = {name: tensor for name, tensor, _ in named_state(model)}
    wanted = _stored_names(model, places, tensors.keys())
    for file, names in _by_file(places, wanted).items():
        with safe_open(file, framework="pt") as stored:
            for name, place in names:
                _check_shape(name, file, stored.get_slice(place).get_shape(), tensors[name])


def load_values(model: nn.Module, weights: Path, keep: AbstractSet[str]) -> None:
    """Fill the parameters and persistent buffers of ``model`` that are named in ``keep``.

    A tied one may be stored under any of its names. Raises SplitError naming what is missing or has another shape.
    """
    places = find_values(weights)
    tensors = {name: tensor for name, tensor, _ in named_state(model)}
    for file, names in _by_file(places, _stored_names(model, places, keep)).items():
        with safe_open(file, framework="pt") as stored, torch.no_grad():
            for name, place in names:
                value = stored.get_tensor(place)
                _check_shape(name, file, value.shape, tensors[name])
                tensors[name].copy_(value)


def _check_shape(name: str, file: Path, shape: Sequence[int], target: Tensor) -> None:
    if list(shape) != list(target.shape):
        raise SplitError(f"{name!r} in {file} has shape {list(shape)}, not {list(target.shape)}")


def _by_file(places: dict[str, Path], wanted: dict[str, str]) -> dict[Path, list[tuple[str, str]]]:
    """What to read from each file: (name in the model, name in the file)."""
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, place in wanted.items():
        by_file[places[place]].append((name, place))
    return by_file


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

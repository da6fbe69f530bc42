"""Reading what was saved, whole or only what one worker needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stageflow.checkpoint.layout import MANIFEST, Manifest, read_manifest
from stageflow.checkpoint.optimizer import combine
from stageflow.errors import CheckpointError, FrameError
from stageflow.transport.structure import unflatten

_NO_ALIASES: Mapping[str, str] = {}


class Checkpoint:
    """A saved pipeline, or weights that something else saved as safetensors. Made by `opening.open_checkpoint`.

    manifest: None where stageflow did not save it. names: of the weights as stored (tied ones once).
    aliases: further name of a tied weight -> its stored name.
    """

    def __init__(self, path: Path, manifest: Manifest | None, places: Mapping[str, Path]) -> None:
        self.path = path
        self.manifest = manifest
        self.names = tuple(places)
        self.aliases: Mapping[str, str] = manifest.aliases if manifest else _NO_ALIASES
        self._places = places
        self._identity = manifest.identity if manifest else ""

    def __repr__(self) -> str:
        at = "weights only" if self.manifest is None else f"step {self.manifest.step}"
        return f"<stageflow.Checkpoint {str(self.path)!r}: {at}, {len(self.names)} weights>"

    @property
    def step(self) -> int:
        """Number of the last step before the save. Raises CheckpointError where there are weights only."""
        return self._require_manifest().step

    @property
    def seed(self) -> int:
        """Of all random draws. Raises CheckpointError where there are weights only."""
        return self._require_manifest().seed

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the saver added; empty where there are weights only."""
        return self.manifest.extra if self.manifest else {}

    @property
    def identity(self) -> str:
        """The same in two processes exactly if they opened the same save; "" where there are weights only."""
        return self._identity

    @property
    def has_optimizer(self) -> bool:
        return self.manifest is not None and bool(self.manifest.optimizer)

    def find(self, name: str, aliases: Mapping[str, str] = _NO_ALIASES) -> str | None:
        """The stored name of a weight that a model calls ``name``, None if it is not there.

        aliases: of the model (`Split.aliases`): a tied weight may have been stored under any of its names.
        """
        first = aliases.get(name, name)
        for known in (name, first, *(alias for alias, of in aliases.items() if of == first)):
            if known in self._places:
                return known
            if known in self.aliases:
                return self.aliases[known]
        return None

    def check_fits(self, shapes: Mapping[str, Iterable[int]], aliases: Mapping[str, str] = _NO_ALIASES) -> None:
        """Raise CheckpointError, before a tensor is read, unless all of ``shapes`` is here and nothing else is.

        shapes: of every parameter and persistent buffer of the model, by its names or without the tied ones.
        """
        stored = {name: self.find(name, aliases) for name in shapes}
        missing = sorted(name for name, found in stored.items() if found is None)
        unknown = sorted(set(self.names) - {found for found in stored.values() if found} - aliases.keys())
        here = self.shapes()
        problems = [
            f"{name!r} has shape {tuple(here[found][0])}, the model's has {tuple(shapes[name])}"
            for name, found in stored.items()
            if found and tuple(here[found][0]) != tuple(shapes[name])
        ][:5]
        if unknown:
            problems.insert(0, f"not in the model: {_some(unknown)}")
        if missing:
            problems.insert(0, f"missing: {_some(missing)}")
        if problems:
            raise CheckpointError(f"{self.path} does not fit the model; {'; '.join(problems)}")

    def shapes(self) -> dict[str, tuple[torch.Size, str]]:
        """Shape and dtype (as safetensors calls it) of every stored weight, without reading one."""
        found: dict[str, tuple[torch.Size, str]] = {}
        for path, inside in _by_file(self._places).items():
            with opened(path) as file:
                slices = {name: file.get_slice(name) for name in inside}
                found |= {name: (torch.Size(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        return found

    def weights(
        self, names: Iterable[str] | None = None, aliases: Mapping[str, str] = _NO_ALIASES
    ) -> dict[str, Tensor]:
        """Weights on the CPU, by the names asked for; only these are read, as their memory is first used.

        names: None for all, tied ones under each of their names. aliases: see `find`.
        Raises CheckpointError for a name that is not there, and when a new save has taken this one's place.
        """
        if names is None:
            names = [*self.names, *(alias for alias, name in self.aliases.items() if name in self._places)]
        stored = {name: self.find(name, aliases) for name in names}
        missing = sorted(name for name, found in stored.items() if found is None)
        if missing:
            raise CheckpointError(f"{self.path} has no weights named {_some(missing)}; it has {_some(self.names)}")
        read = self._read({found: self._places[found] for found in stored.values() if found})
        return {name: read[found] for name, found in stored.items() if found}

    def optimizer(
        self, names: Iterable[str], aliases: Mapping[str, str] = _NO_ALIASES
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Optimizer state of these parameters, as `StageOptimizer.load` takes it: (tensors, plain rest).

        The rest has by parameter name "state", "options" (of its group) and "schedulers" (as if its group were the
        only one, see `runtime.schedulers`). Only these tensors are read.

        Raises CheckpointError where a parameter was not optimized when this was saved.
        """
        optimizer = self._require_manifest().optimizer
        if not optimizer:
            raise CheckpointError(f"{self.path} was saved without an optimizer; load its weights only")
        tensors: dict[str, Tensor] = {}
        rests: list[Mapping[str, Any]] = []
        stored = {self.find(name, aliases) or name: name for name in names}
        for file, outline in optimizer.items():
            own, inner = self._read_optimizer(self.path / file, stored)
            tensors.update(own)
            rests += self._rest(file, outline, inner).values()
        plain = combine(rests, stored)
        missing = sorted(set(stored.values()) - plain["options"].keys())
        if missing:
            raise CheckpointError(
                f"{self.path} has no optimizer state of {_some(missing)}: not trained when it was saved; "
                "load its weights only"
            )
        return tensors, plain

    def _read_optimizer(self, path: Path, names: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(state of the parameters in ``names``, under the names asked for; tensors of the plain part) of one shard."""
        with opened(path) as file:
            keys = [key.rpartition("/") for key in file.keys()]  # noqa: SIM118, it is no dict
        wanted = [(owner, key) for owner, _, key in keys if not owner or owner in names]
        read = self._read({f"{owner}/{key}": path for owner, key in wanted})
        # an optimizer keeps what it is given: memory of its own, not the file's
        own = {f"{names[owner]}/{key}": read[f"{owner}/{key}"].clone() for owner, key in wanted if owner}
        return own, {key: read[f"/{key}"].clone() for owner, key in wanted if not owner}

    def _rest(self, file: str, outline: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        try:
            return unflatten(outline, tensors)
        except FrameError as error:
            raise CheckpointError(f"the optimizer state of {self.path / file} can't be read: {error}") from error

    def _require_manifest(self) -> Manifest:
        if self.manifest is None:
            raise CheckpointError(f"{self.path} holds weights only: stageflow did not save it, there is no {MANIFEST}")
        return self.manifest

    def _read(self, places: Mapping[str, Path]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path, names in _by_file(places).items():
            with opened(path) as file:
                tensors.update({name: file.get_tensor(name) for name in names})
        self._check_unchanged()
        return tensors

    def _check_unchanged(self) -> None:
        """A save swaps the whole directory: the same manifest after reading means that no file was of another save."""
        if self.manifest is not None:
            now = read_manifest(self.path)
            if now is None or now.identity != self._identity:
                raise CheckpointError(f"{self.path} was replaced by another save while it was read; open it again")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises CheckpointError where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error


def _by_file(places: Mapping[str, Path]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = defaultdict(list)
    for name, path in places.items():
        files[path].append(name)
    return files


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"

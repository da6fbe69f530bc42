"""What a saved pipeline looks like on disk, and its manifest.

    run1/
      model-00001-of-00002.safetensors        one shard per writer, under the model's own names
      model-00002-of-00002.safetensors
      model.safetensors.index.json            name -> shard, in the form that transformers reads
      optimizer-00001-of-00002.safetensors    "parameter/key", such as "head.weight/exp_avg"
      optimizer-00002-of-00002.safetensors
      config.json, generation_config.json     where the model is a transformers one
      stageflow.json                          the manifest: everything else, and a checksum of every file above

How many wrote it says nothing about how many may read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from stageflow.errors import CheckpointError

FORMAT = 1
MANIFEST = "stageflow.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

ShardKind = Literal["model", "optimizer"]
_OWN_FILES = re.compile(r"(model|optimizer)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|stageflow\.json")


def shard_name(kind: ShardKind, index: int, count: int) -> str:
    """File name of shard ``index`` (from 0) of ``count``."""
    return f"{kind}-{index + 1:05}-of-{count:05}.safetensors"


def is_own_file(name: str) -> bool:
    """Whether a file of this name belongs to the layout, so that a new save replaces it."""
    return _OWN_FILES.fullmatch(name) is not None


def is_optimizer_shard(name: str) -> bool:
    return name.startswith("optimizer-") and is_own_file(name)


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its content, in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint that is no tensor.

    step, seed: what the next random draws depend on. aliases: further name of a tied weight -> the name it is stored
    under. optimizer: shard file -> outline (see `transport.structure`) of what its writer's optimizers hold besides
    tensors. extra: of the caller; JSON. versions: of the packages that wrote it.
    """

    step: int
    seed: int
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        """As text that carries its own checksum. Raises CheckpointError where `extra` has no JSON form."""
        try:
            body = json.loads(json.dumps(asdict(self), allow_nan=False))  # keys become what they will be read as
            return json.dumps({**body, "sha256": _digest(body)}, indent=1)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra= must be plain JSON values with finite numbers: {error}") from error

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        """Raises CheckpointError that names the file if a bit of it has changed or a newer version wrote it."""
        try:
            body = json.loads(text)
            stated = body.pop("sha256")
            if body.get("format", 0) > FORMAT:
                raise CheckpointError(
                    f"{where} has format {body['format']}, this stageflow reads up to {FORMAT}: it was saved by "
                    f"stageflow {body.get('versions', {}).get('stageflow', 'of a later version')}; upgrade to load it"
                )
            if stated != _digest(body):
                raise ValueError("its checksum does not match its content")
            body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
            return cls(**body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error

    @property
    def identity(self) -> str:
        """The same for two readers exactly if they read the same checkpoint."""
        return _digest(json.loads(json.dumps(asdict(self))))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, None where there is none. Raises CheckpointError if it is damaged."""
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    return Manifest.from_json(text, path)


def package_versions(**others: str) -> dict[str, str]:
    """stageflow's version beside those given."""
    try:
        own = version("stageflow")
    except PackageNotFoundError:  # run from a source tree that was never installed
        own = "unknown"
    return {"stageflow": own, **others}


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()

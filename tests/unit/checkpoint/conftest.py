"""A save as the façade makes it, without a pipeline."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stageflow.checkpoint import Progress, Saving, write_shard

SaveState = Callable[..., None]


def save_state(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 2,
    step: int = 7,
    seed: int = 3,
    aliases: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    with Saving(directory) as saving:
        names = list(tensors)
        entries = [
            write_shard(saving.path, "model", index, shards, {name: tensors[name] for name in names[index::shards]})
            for index in range(shards)
        ]
        saving.finish(entries, Progress(step, seed, aliases or {}, extra or {}))


@pytest.fixture
def save() -> SaveState:
    return save_state


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}.weight": torch.randn(3, 4, generator=generator) for i in range(5)}


@pytest.fixture
def no_leavings(tmp_path: Path):
    """Fails a test after which a hidden directory or an open descriptor is left."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert [path.name for path in tmp_path.rglob(".*")] == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)

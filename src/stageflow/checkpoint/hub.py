"""What makes a saved directory open with transformers' ``from_pretrained``. Works without importing transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from stageflow.errors import CheckpointError


def write_config(model: object, directory: str | Path, dtype: Any = None) -> bool:
    """Write a transformers model's config.json, and generation_config.json where it can generate.

    model: anything; whatever has no transformers config gives no files and False. dtype: of the saved weights, if it
    is not the model's own. Raises CheckpointError where the model's config can't be saved.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return False
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype if dtype is not None else getattr(model, "dtype", None)
    generation: Any = getattr(model, "generation_config", None)
    try:
        config.save_pretrained(directory)
        if generation is not None:
            generation.save_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the config of {type(model).__name__} could not be saved: {error}") from error
    return True

"""Models that are named on the command line: a function of a file, a directory with a Hugging Face config."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

from stageflow.errors import InputError


def from_function(path: Path, function: str) -> tuple[Any, Any]:
    """The model and its example batch that a function without arguments gives.

    Raises InputError where there is no such file or function, or it gives something else.
    """
    where = f"{path}:{function}"
    if not path.is_file():
        raise InputError(f"{where}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{where}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # classes of the model are looked up by their module's name
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE.py`: what it imports may lie beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{where}: {path} can't be imported: {type(error).__name__}: {error}") from error
    build = getattr(module, function, None)
    if not callable(build):
        raise InputError(f"{where}: {path} defines no function {function!r}")
    given = build()
    if not (isinstance(given, tuple) and len(given) == 2):
        raise InputError(f"{where} gives a {type(given).__name__}; expected a pair (model, example batch)")
    return given


def from_directory(path: Path, batch: int, sequence_length: int) -> tuple[Any, Any]:
    """What builds a causal language model as its config.json describes it, and a batch of tokens for it.

    A function rather than a model, so that one that is only counted takes no memory, however large. Raises InputError.
    """
    if batch < 1 or sequence_length < 1:
        raise InputError(f"a batch needs at least one sample of one token, got {batch} of {sequence_length}")
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path} holds no config.json: expected the directory of a Hugging Face model")
    try:
        import transformers
    except ImportError as error:
        raise InputError("reading a Hugging Face directory needs transformers: pip install 'stageflow[hf]'") from error
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise InputError(
            f"{config_file} describes no causal language model that transformers knows: {error}"
        ) from error
    # its own way to make a mask looks at values, of which there are none where a model is only counted
    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("causal", _no_mask)
    tokens = torch.zeros(batch, sequence_length, dtype=torch.long)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, "use_cache": False}
    return partial(cls._from_config, config, attn_implementation="causal"), inputs


def _no_mask(*_: Any, **__: Any) -> None:
    """Attention is causal by itself."""

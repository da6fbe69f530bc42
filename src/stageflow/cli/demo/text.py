"""Real text to train on: the Python standard library's own sources, or the user's files."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stageflow.errors import InputError

HELD_OUT = 0.1
MOST_BYTES = 24 << 20
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_text(path: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """Text as bytes, the same for the same files.

    path: a file, or a folder of which every text file is taken in order of name; None: the ``.py`` files of the
        running Python's standard library, without its tests.
    most: where to stop, in bytes.

    Raises InputError when there is nothing to read.
    """
    pieces: list[bytes] = []
    size = 0
    for file in _stdlib_files() if path is None else _files(path):
        piece = file.read_bytes()
        if b"\0" in piece[:4096]:
            continue
        pieces.append(piece)
        size += len(piece)
        if size >= most:
            break
    text = b"\n".join(pieces)[:most]
    if not text:
        raise InputError(f"no text found in {path or 'the standard library'}; give a file or folder of text")
    return text


def _stdlib_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if _NOT_STDLIB.isdisjoint(file.relative_to(root).parts):
            yield file


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder")
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file


class Corpus:
    """Tokens cut into a part to train on and a held-out part, the last tenth."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        """tokens: one dimension, any integer type. length: of the sequences handed out.

        Raises InputError when the held-out part is too short for one sequence.
        """
        cut = round(tokens.numel() * (1 - HELD_OUT))
        self.train, self.held_out = tokens[:cut], tokens[cut:]
        self.length = length
        if self.held_out.numel() < length + 1:
            raise InputError(
                f"the text has {tokens.numel()} tokens; sequences of {length} need at least "
                f"{round((length + 1) / HELD_OUT)}: give more text or a shorter --sequence-length"
            )

    @classmethod
    def of_bytes(cls, text: bytes, length: int) -> Corpus:
        """One token per byte."""
        return cls(torch.frombuffer(bytearray(text), dtype=torch.uint8), length)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (size, length) of int64; a function of seed and step alone."""
        # torch's CPU generator takes 32 bits of a seed and drops the rest, so the two are mixed first.
        mixed = zlib.crc32(f"{seed} {step}".encode())
        generator = torch.Generator().manual_seed(mixed)
        starts = torch.randint(self.train.numel() - self.length, (size,), generator=generator)
        return self._windows(self.train, starts)

    def held_out_batches(self, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """The same ``count`` batches every time, spread evenly over the held-out part."""
        last = self.held_out.numel() - self.length - 1
        starts = torch.linspace(0, last, count * size).long()
        return [self._windows(self.held_out, chunk) for chunk in starts.split(size)]

    def _windows(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = tokens[starts[:, None] + torch.arange(self.length + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

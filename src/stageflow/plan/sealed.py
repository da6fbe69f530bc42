"""JSON files that tell whether they are whole: of what kind and version they are, and a digest of the rest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageflow.errors import InputError

_SEAL = ("format", "version", "digest")


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    noun: what it holds, "plan". maker: what writes it, "Plan.to_json". remedy: for a file of another version.
    """

    noun: str
    version: int
    maker: str
    remedy: str

    @property
    def format(self) -> str:
        return f"stageflow {self.noun}"

    def seal(self, body: dict[str, Any]) -> str:
        """The file's text. body: plain values, without infinities."""
        head = {"format": self.format, "version": self.version, "digest": _digest(body)}
        return json.dumps({**head, **body}, indent=1) + "\n"

    def open(self, source: str | Path) -> tuple[dict[str, Any], str]:
        """What `seal` was given, and how to call the source in an error.

        source: a file, or its text (a string that begins with a brace). Raises InputError that names what is wrong.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        where = "this text" if is_text else str(source)
        try:
            found = json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{where} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is no JSON, so no {self.noun}: {error}") from error
        if not isinstance(found, dict) or found.get("format") != self.format:
            raise InputError(
                f"{where} is no {self.noun}: expected JSON of the format {self.format!r}, as {self.maker} writes it"
            )
        if found.get("version") != self.version:
            raise InputError(
                f"{where} is a {self.noun} of version {found.get('version')!r}, this stageflow reads {self.version}: "
                f"{self.remedy}"
            )
        body = {name: value for name, value in found.items() if name not in _SEAL}
        if found.get("digest") != _digest(body):
            raise InputError(
                f"{where} was changed or cut off since it was written: its digest is not that of its content"
            )
        return body, where


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

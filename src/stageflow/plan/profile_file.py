"""A profile as JSON and back, exactly; a file that was changed is told from a whole one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError
from stageflow.plan.partition import Block, Tie

if TYPE_CHECKING:
    from stageflow.plan.profile import Profile

FORMAT, VERSION = "stageflow profile", 1


def to_json(profile: Profile) -> str:
    """The profile's text; `from_json` gives an equal profile."""
    body = dataclasses.asdict(profile)
    return json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}, indent=1) + "\n"


def from_json(source: str | Path) -> Profile:
    """Read what `to_json` wrote, from a file or from the text itself. Raises InputError that names what is wrong."""
    from stageflow.plan.profile import Profile

    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    where = "this text" if is_text else str(source)
    try:
        found = json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{where} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON, so no profile: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f'{where} is no profile: expected JSON with "format": "{FORMAT}", as Profile.to_json writes')
    if found.get("version") != VERSION:
        raise InputError(
            f"{where} is a profile of version {found.get('version')!r}, this stageflow reads {VERSION}: measure again"
        )
    body = {name: value for name, value in found.items() if name not in ("format", "version", "digest")}
    if found.get("digest") != _digest(body):
        raise InputError(f"{where} was changed or cut off since it was written: its digest is not that of its content")
    try:
        blocks = tuple(Block(**block) for block in body.pop("blocks"))
        ties = tuple(Tie(**{**tie, "blocks": tuple(tie["blocks"])}) for tie in body.pop("ties"))
        return Profile(blocks=blocks, ties=ties, **body)
    except (KeyError, TypeError) as error:
        raise InputError(f"{where} is a damaged profile: {error!r}") from error


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

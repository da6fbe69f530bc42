"""A profile as JSON and back, exactly; a file that was changed is told from a whole one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from stageflow.errors import InputError
from stageflow.plan.partition import Block, Tie
from stageflow.plan.sealed import Kind

if TYPE_CHECKING:
    from stageflow.plan.profile import Profile

KIND = Kind("profile", 1, "Profile.to_json", "measure again")


def to_json(profile: Profile) -> str:
    """The profile's text; `from_json` gives an equal profile."""
    return KIND.seal(dataclasses.asdict(profile))


def from_json(source: str | Path) -> Profile:
    """Read what `to_json` wrote, from a file or from the text itself. Raises InputError that names what is wrong."""
    from stageflow.plan.profile import Profile

    body, where = KIND.open(source)
    try:
        blocks = tuple(Block(**block) for block in body.pop("blocks"))
        ties = tuple(Tie(**{**tie, "blocks": tuple(tie["blocks"])}) for tie in body.pop("ties"))
        return Profile(blocks=blocks, ties=ties, **body)
    except (KeyError, TypeError) as error:
        raise InputError(f"{where} is a damaged profile: {error!r}") from error

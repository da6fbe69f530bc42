"""docs/schedules.md says of every schedule what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from stageflow.schedule import SCHEDULES, SIMULATED
from stageflow.schedule.families import FAMILIES

PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")


def test_the_table_is_the_registry() -> None:
    rows = [tuple(line.strip("| ").split(" | ")) for line in PAGE.splitlines() if line.count(" | ") == 4]
    assert rows[0] == ("name", "idle", "peak", "counts", "source")
    assert rows[1:] == [(f"`{name}`", f.idle, f.peak, f.needs, f.source) for name, f in FAMILIES.items()]


def test_what_runs_is_not_what_is_simulated() -> None:
    assert set(SCHEDULES) | set(SIMULATED) == set(FAMILIES)
    assert {name for name, family in FAMILIES.items() if "not run" in family.needs} == set(SIMULATED)


def test_the_builders_name_their_source() -> None:
    """The first author or the project, and the year, of the table stand in the docstring too."""
    for name, family in FAMILIES.items():
        if name not in ("greedy", "forward_only"):
            doc = " ".join((family.build.__doc__ or "").split())
            author, year = re.match(r"(\w+)[^\d]*(\d{4})?", family.source).groups()  # type: ignore[union-attr]
            assert author in doc, name
            assert year is None or year in doc, name

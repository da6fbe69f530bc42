"""The reference names everything that is public."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import stageflow as sf
from stageflow import errors
from stageflow.cli import VERBS

TEXT = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
NAMED = {word for code in re.findall(r"`([^`]+)`", PROSE) for word in re.findall(r"\w+", code)}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("names", set(sf.__all__)),
        ("arguments of Pipeline", set(inspect.signature(sf.Pipeline).parameters)),
        ("members of Pipeline", public(sf.Pipeline)),
        ("arguments of split_model", set(inspect.signature(sf.split_model).parameters)),
        ("arguments of build_schedule", set(inspect.signature(sf.build_schedule).parameters)),
        ("schedules", set(sf.SCHEDULES)),
        ("fields of Costs", set(sf.Costs.__dataclass_fields__)),
        ("verbs", set(VERBS)),
    ],
)
def test_the_reference_names_all(what: str, names: set[str]) -> None:
    assert sorted(names - NAMED) == [], what


def test_the_reference_draws_the_whole_tree_of_errors() -> None:
    tree = re.search(r"^StageflowError\n.*?^```", TEXT, re.DOTALL | re.MULTILINE)
    assert tree is not None
    drawn = re.findall(r"^[│├└─ ]*([A-Z]\w+)", tree[0], re.MULTILINE)
    assert sorted(drawn) == sorted(name for name, cls in vars(errors).items() if isinstance(cls, type))


def test_defaults_in_the_reference_are_those_of_the_code() -> None:
    for name, parameter in inspect.signature(sf.Pipeline).parameters.items():
        row = re.search(rf"^\| `{name}` \| (.*?) \|", TEXT, re.MULTILINE)
        assert row is not None, name
        if row[1].startswith("`"):
            assert row[1] == f"`{parameter.default!r}`".replace("'", '"'), name

"""`stageflow explore`: one file with everything in it."""

import json
import re
from pathlib import Path

import pytest

from stageflow.cli import main
from stageflow.cli.explore.page import SCHEDULES, read, render_page, sliders
from stageflow.errors import InputError


def embedded(page: str, name: str) -> dict:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["explore", "--output", str(path), "--json"]) == 0
    page = path.read_text(encoding="utf-8")
    assert json.loads(capsys.readouterr().out) == {"page": str(path), "bytes": path.stat().st_size}
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?:|src=|@import|url\(|<link", page), "nothing from elsewhere"
    assert not re.search(r"\{(style|script|start|sliders)\}", page), "every part is in its place"
    assert embedded(page, "sliders") == sliders()


def test_it_opens_with_the_settings_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    words = ["--schedule", "zb_v", "--devices", "8", "--f", "1.5", "--hop", "0.2", "--memory", "5"]
    assert main(["explore", "--output", str(path), *words]) == 0
    start = {"schedule": "zb_v", "devices": 8, "f": 1.5, "hop": 0.2, "memory": 5}
    assert embedded(path.read_text(encoding="utf-8"), "start") == start


def test_the_schedules_are_those_of_the_script() -> None:
    table = read("catalogue.js")
    assert tuple(re.findall(r'^  "?(\w+)"?: \{$', table, re.MULTILINE)) == SCHEDULES


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schedule", "dance"], "the page has no schedule 'dance'; it has gpipe, 1f1b"),
        (["--devices", "33"], "devices is 33: the page goes from 1 to 32"),
        (["--w", "nan"], "w is nan: the page goes from 0.1 to 5"),
        (["--output", "{folder}"], "is a folder: give the name of a file in it"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(folder=tmp_path) for word in words]
    assert (
        main(["explore", *(["--output", str(tmp_path / "page.html")] if "--output" not in given else []), *given]) == 2
    )
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="the page has no setting 'speed'; it has schedule, devices"):
        render_page({"speed": 2})

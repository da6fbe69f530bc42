"""What a plan predicts, how it prints, how it is saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from plan_examples import MIB, make

from stageflow.errors import InputError
from stageflow.plan import Advice, Device, Plan, Tie
from stageflow.plan.bounds import Bound


def test_what_follows_from_the_schedule_and_the_times() -> None:
    plan = make(microbatches=4)  # 1F1B, 2 equal stages: (m + p - 1)(F + B) = 5 * 6 ms
    assert plan.step == pytest.approx(30e-3)
    assert plan.bubble == pytest.approx(0.2)
    assert plan.placement == (0, 1)
    assert plan.microbatches == 4
    assert plan.boundaries == ("layers.2",)
    assert plan.memory == pytest.approx(((40 + 2 * 20) * MIB, (40 + 20) * MIB))
    assert plan.stage_memory == plan.memory


def test_the_gap_is_to_the_bound() -> None:
    assert make(bound=24e-3).gap == pytest.approx(0.25)
    assert math.isinf(make(bound=0.0).gap)
    assert make(bound=1.0).gap == 0.0


def test_whether_it_fits() -> None:
    assert make(device=Device(memory=80 * MIB)).fits
    assert not make(device=Device(memory=79 * MIB)).fits


def test_parts_that_do_not_fit_each_other() -> None:
    plan = make()
    with pytest.raises(InputError, match="2 stages"):
        dataclasses.replace(plan, cuts=(0, 4))
    with pytest.raises(InputError, match="not 1 devices"):
        dataclasses.replace(plan, devices=(Device(),))


def test_the_table_shows_everything() -> None:
    plan = make(
        microbatches=4,
        device=Device(memory=100 * MIB),
        recompute=(True, False),
        bound=30e-3,
        samples=64,
        warnings=("it is small",),
        advice=(Advice("a faster link", 0.02, 0.125), Advice("block 'x' may grow", 0.03, 0.0)),
    )
    text = str(plan)
    assert "Model: 2 stages on 2 devices, a batch of 64 samples in 4 micro-batches, schedule 1f1b" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "layers.0,", "layers.1", "0", "10", "MiB", "8", "ms", "61", "MiB", "yes"] in rows
    assert ["1", "layers.2,", "layers.3", "1", "10", "MiB", "6", "ms", "60", "MiB", "no"] in rows
    assert "step 36 ms, 1778 samples/s, bubble 22.2%" in text
    assert "can be more than 20.0% faster (bound 30 ms: a reason)" in text
    assert "- it is small" in text
    assert "- a faster link: 12.5% less time per sample" in text
    assert "- block 'x' may grow\n" in text + "\n"


def test_what_is_claimed_is_rounded_up() -> None:
    assert "can be more than 0.1% faster" in str(make(bound=30e-3 / 1.0006))
    assert "no schedule whatsoever on this split is faster" in str(make(bound=30e-3))
    assert "nothing is proved" in str(make(bound=0.0))


def test_units_that_are_none() -> None:
    text = str(make(unit="", bound=0.03))
    assert " ms" not in text
    assert "MiB" not in text


def full() -> Plan:
    plan = make(
        (1 / 3, 0.1, 2.0, math.pi),
        device=Device(memory=1e12 / 7, latency=1e-6, bandwidth=math.inf),
        recompute=(True, False),
        schedule="zb_h1",
        samples=12,
        unit="ticks",
        ties=(Tie((0, 3), 5.0, 5.0),),
        warnings=("ä warning",),
        advice=(Advice("more", 0.1, 0.2),),
    )
    return dataclasses.replace(plan, bound=Bound(0.1 + 0.2, "why", {"work": 0.1 + 0.2, "none": 0.0}))


def test_json_gives_the_same_plan_back(tmp_path: Path) -> None:
    plan = full()
    text = plan.to_json(tmp_path / "plan.json")
    for source in (text, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        again = Plan.from_json(source)
        assert again == plan
        assert again.step == plan.step
        assert str(again) == str(plan)
    assert again.to_json() == text


def test_json_is_json_for_everybody() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(full().to_json(), parse_constant=refuse)["format"] == "stageflow plan"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON"),
        (lambda text: "[1, 2]", "can't be read"),
        (lambda text: "{}", "is no plan"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2, this stageflow reads 1"),
        (lambda text: text.replace('"samples": 12', '"samples": 13'), "was changed or cut off"),
        (lambda text: text.replace("0F0 0F1", "0F1 0F0"), "was changed or cut off"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(change, words: str) -> None:
    text = full().to_json()
    with pytest.raises(InputError, match=words):
        Plan.from_json(change(text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing.json can't be read"):
        Plan.from_json(tmp_path / "nothing.json")


def test_the_page_is_whole_and_alone(tmp_path: Path) -> None:
    plan = dataclasses.replace(full(), model="<Model> & co", unit=None)
    plan.page(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "&lt;Model&gt; &amp; co" in page
    assert "<Model>" not in page
    for foreign in ("http://", "https://", "src=", "@import", "url("):
        assert foreign not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count('class="memory"') == 2
    assert page.count("<svg") == page.count("</svg>") == 4  # timeline and its plot, memory, balance
    assert "ä warning" in page
    assert "forward again, for the backward" in page

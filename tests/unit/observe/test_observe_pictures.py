"""The page, the picture, the text: what they show, and that they need nothing from outside."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from stageflow.errors import InputError
from stageflow.observe import Event, render_html, render_svg, render_text
from stageflow.observe.picture import Scale, digit_size

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "link", "img", "input"}


def step(scale: float = 1.0) -> list[Event]:
    plan = [
        (0, 0, "F", 0, 0, 1),
        (0, 0, "F", 1, 1, 2),
        (0, 0, "B", 0, 4, 6),
        (0, 0, "B", 1, 6, 8),
        (1, 1, "F", 0, 1, 2),
        (1, 1, "I", 0, 2, 3),
        (1, 1, "W", 0, 3, 4),
        (1, 1, "F", 1, 4, 5),
        (1, 1, "B", 1, 5, 6),
    ]
    return [Event(w, s, kind, m, 100 + start * scale, 100 + end * scale) for w, s, kind, m, start, end in plan]


def blocks(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [group for group in root.iter(f"{SVG}g") if group.get("data-m") is not None]


class Checker(HTMLParser):
    """Collects what a page would load, and that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_svg_has_one_block_per_event_where_its_times_say():
    shown = blocks(render_svg(step(), workers=2))
    assert len(shown) == len(step())
    by_text = {block.find(f"{SVG}title").text.split(":")[0]: block.find(f"{SVG}rect") for block in shown}
    width = 1000 - 92 - 12
    assert float(by_text["0F1"].get("x")) == pytest.approx(width / 8, abs=0.01)
    assert float(by_text["0B0"].get("width")) == pytest.approx(width / 4, abs=0.01)
    assert by_text["1F0"].get("y") != by_text["0F0"].get("y")


def test_svg_says_what_a_block_is():
    titles = [block.find(f"{SVG}title").text for block in blocks(render_svg(step(1e-3), workers=2))]
    assert "1I0: gradient of the inputs\nworker 1, stage 1, micro-batch 0\n2 ms to 3 ms, 1 ms" in titles


def test_svg_is_well_formed_whatever_the_title():
    ElementTree.fromstring(render_svg(step(), workers=2, title="<&\"> and 'so on'"))


def test_predicted_lanes_lie_below_the_measured_ones():
    earlier = [event._replace(start=event.start - 90, end=event.end - 90) for event in step()]
    shown = blocks(render_svg(step(), workers=2, predicted=earlier))
    assert len(shown) == 2 * len(step())
    predicted = [block for block in shown if block.find(f"{SVG}title").text.startswith("predicted: ")]
    assert len(predicted) == len(step())
    measured_f = next(b for b in shown if b.find(f"{SVG}title").text.startswith("1F0"))
    predicted_f = next(b for b in predicted if "1F0" in b.find(f"{SVG}title").text)
    assert measured_f.get("data-s") == predicted_f.get("data-s")
    assert float(predicted_f.find(f"{SVG}rect").get("y")) > float(measured_f.find(f"{SVG}rect").get("y"))


def test_every_other_stage_of_a_worker_is_paler():
    events = [Event(0, 0, "F", 0, 0, 1), Event(0, 3, "F", 0, 1, 2), Event(1, 1, "F", 0, 1, 2)]
    classes = [block.get("class") for block in blocks(render_svg(events, workers=2))]
    assert classes == ["ev F", "ev F later", "ev F"]


def test_a_worker_without_events_keeps_its_lane():
    assert "worker 2" in render_svg(step(), workers=3)


def test_an_event_outside_the_workers_is_refused():
    with pytest.raises(InputError, match="1F0 is of worker 1.*has 1 workers"):
        render_svg(step(), workers=1)


def test_no_action_is_refused():
    with pytest.raises(InputError, match="no action"):
        render_html([], title="empty", workers=2)


def test_page_is_whole_and_loads_nothing():
    page = render_html(step(), title="a <b> & c", workers=2, predicted=step(0.9))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert not re.search(r"@import|url\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "<title>a &lt;b&gt; &amp; c</title>" in page


def test_page_tells_the_figures():
    page = render_html(step(), title="t", workers=2, predicted=step(0.5))
    # work: 6 + 5 of 2 * 8
    assert "<b>31.2%</b><span>bubble measured" in page
    assert "<b>31.2%</b><span>bubble predicted" in page
    assert "<b>8 s</b><span>step measured" in page
    assert "<b>4 s</b><span>step predicted" in page


def test_text_shows_kinds_numbers_and_shares():
    assert render_text(step(), width=46).splitlines() == [
        "worker 0 F0--F1--........B0------B1------  75%",
        "worker 1 ....F0--I0--W0--F1--B1--........  62%",
        "         bubble 31.2%",
    ]


def test_text_without_room_for_numbers_still_shows_kinds():
    first = render_text(step(), width=22).splitlines()[0]
    assert first == "worker 0 FF...B0-B1  75%"


@pytest.mark.parametrize(
    ("seconds", "unit", "words"),
    [(10.0, None, "5 s"), (1.5, None, "750 ms"), (0.01, None, "5 ms"), (3e-6, None, "1.5 µs"), (8, "steps", "4 steps")],
)
def test_times_are_told_in_a_fitting_unit(seconds: float, unit: str | None, words: str):
    assert Scale.fit(0, seconds, 100, unit).words(seconds / 2) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(1.0, "1 s"), (0.25, "250 ms"), (0.00188, "1.88 ms"), (4e-6, "4 µs"), (0, "0")]
)
def test_a_length_is_told_in_its_own_unit(seconds: float, words: str):
    assert Scale.fit(0, 4.0, 100, None).length_words(seconds) == words


def test_a_unit_of_ones_own_is_kept_for_lengths():
    assert Scale.fit(0, 4.0, 100, "steps").length_words(0.25) == "0.25 steps"


def test_ticks_are_round_and_within():
    scale = Scale.fit(0, 0.0123, 100, None)
    assert [round(tick * 1e3, 9) for tick in scale.ticks()] == [0, 2, 4, 6, 8, 10, 12]


def test_numbers_shrink_and_then_go():
    assert digit_size(40, 1) == 11.5
    assert 6.5 <= digit_size(11, 2) < 11.5
    assert digit_size(6, 2) == 0

"""The page in a real browser: it shows what was computed, answers to keys, and fits a laptop and a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Browser, chromium

from stageflow.cli.explore.page import SCHEDULES, render_page
from stageflow.schedule import build_schedule

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs a browser: chromium or google-chrome")

LAPTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844, "phone": True}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path) as page:
        yield page


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "explore.html"
    path.write_text(render_page({}), encoding="utf-8")
    return path


def figures(browser: Browser) -> list[str]:
    """Step time, bubble, memory and bound, as shown."""
    return browser.run("[...document.querySelectorAll('#figures .value')].map((value) => value.textContent)")


def setting(browser: Browser, name: str) -> float:
    return browser.run(f"Number(document.getElementById('{name}').value)")


def test_it_shows_the_step_and_loads_nothing_else(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    assert figures(browser) == ["33", "27.3%", "4", "33"], "1f1b, 4 devices, 8 micro-batches: 3 of 11 slots are ramps"
    rows = browser.run("[...document.querySelectorAll('#compare tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert [row[0].strip() for row in rows] == list(SCHEDULES)
    assert browser.requests == [page.as_uri()]
    assert browser.errors == []


def test_it_works_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    browser.run("document.getElementById('microbatches').focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert setting(browser, "microbatches") == 10
    simulation = build_schedule("1f1b", stages=4, microbatches=10).simulate()
    assert figures(browser)[:2] == [f"{simulation.makespan:g}", f"{simulation.bubble:.1%}"]
    assert "microbatches=10" in browser.run("location.hash")
    browser.run("document.getElementById('schedule').focus()")
    browser.press("ArrowDown", "ArrowDown")
    assert browser.run("document.getElementById('schedule').value") == "interleaved_1f1b"
    browser.run("document.querySelector('#lessons button').focus()")
    browser.press("Tab", "Enter")
    assert browser.run("document.querySelector('#lesson').textContent").startswith("Eight micro-batches")
    assert browser.run("document.getElementById('schedule').value") == "gpipe"
    assert browser.errors == []


def test_everything_that_takes_a_key_can_be_reached_and_has_a_name(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    nameless = browser.run(
        """[...document.querySelectorAll("button, select, input, canvas")].filter((control) => {
          const label = control.id && document.querySelector(`label[for="${control.id}"]`);
          return !(label || control.getAttribute("aria-label") || control.textContent.trim());
        }).map((control) => control.outerHTML)"""
    )
    assert nameless == []
    reachable = browser.run("document.querySelectorAll('button, select, input:not(:disabled), canvas').length")
    browser.run("document.activeElement.blur()")
    reached = set()
    for _ in range(reachable + 1):
        browser.press("Tab", settle=False)
        reached.add(browser.run("document.activeElement.id || document.activeElement.textContent"))
    assert {"1 Cut the model", "schedule", "devices", "memory", "timeline", "gpipe", "greedy"} <= reached


def test_the_timeline_tells_what_an_action_waited_for(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    browser.run("change({ hop: 0.5, transfer: 0.25 })")
    browser.run("document.getElementById('timeline').focus()")
    detail = "document.getElementById('detail').textContent"
    browser.press("ArrowRight")
    assert browser.run(detail).startswith("0F0: forward of stage 0, micro-batch 0, on device 0, from 0 to 1. It began")
    browser.press("ArrowDown")
    told = browser.run(detail)
    assert told.startswith("1F0: forward of stage 1, micro-batch 0, on device 1, from 1.75 to 2.75.")
    assert "waited 1.75 for 0F0 from device 0, 0.75 of it while the value was on the link" in told
    browser.press("Escape")
    assert browser.run(detail).startswith("Point at an action")
    box = browser.run("(({ x, y }) => [x, y])(document.getElementById('timeline').getBoundingClientRect())")
    browser.point(box[0] + 84, box[1] + 12)
    assert browser.run(detail).startswith("0F0: ")
    assert browser.errors == []


def test_zooming_widens_the_timeline(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    width = "document.getElementById('spacer').getBoundingClientRect().width"
    fit = browser.run(width)
    browser.run("document.getElementById('timeline').focus()")
    browser.press("+", "+")
    assert browser.run(width) == pytest.approx(fit * 2.25, rel=0.01)
    browser.press("0")
    assert browser.run(width) == pytest.approx(fit, rel=0.01)


def test_playing_draws_the_step_bit_by_bit(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    right = """(() => {
      const canvas = document.getElementById("timeline"), half = canvas.width / 2;
      const { data } = canvas.getContext("2d").getImageData(half, 0, half, canvas.height);
      return data.reduce((sum, value, at) => sum + (at % 4 === 3 && value > 0), 0);
    })()"""
    whole = browser.run(right)
    browser.run("document.getElementById('timeline').focus()")
    browser.press(" ")
    assert browser.run("document.getElementById('play').textContent") == "Stop"
    assert browser.run(right) < whole / 10, "of what comes later only the axis is there"
    browser.press(" ")
    assert browser.run("document.getElementById('play').textContent") == "Play"
    assert browser.run(right) == whole
    assert browser.errors == []


def test_settings_come_from_the_address_and_nonsense_does_not(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    browser.run("location.hash = 'schedule=zb_v&devices=6&microbatches=-3&chunks=what&constructor=1'")
    browser.settle()
    assert browser.run("document.getElementById('schedule').value") == "zb_v"
    assert [setting(browser, name) for name in ("devices", "microbatches", "chunks")] == [6, 8, 2]
    assert browser.run("document.getElementById('chunks').disabled") is True
    assert browser.errors == []


def test_a_limit_is_held_against_every_schedule(browser: Browser, page: Path) -> None:
    browser.open(page, **LAPTOP)
    browser.run("change({ schedule: 'greedy', memory: 3 })")
    browser.settle()
    assert figures(browser)[2] == "3"
    within = browser.run(
        "[...document.querySelectorAll('#compare tbody tr')].filter((row) => !row.innerText.includes('over'))"
        ".map((row) => row.querySelector('th').innerText)"
    )
    assert within == ["v_half", "v_min", "greedy"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("window", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_fits_the_window_and_draws(browser: Browser, page: Path, window: dict[str, int], dark: bool) -> None:
    browser.open(page, **window, dark=dark)
    assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.run("document.getElementById('timeline').getBoundingClientRect().top") < window["height"] / 2
    colours = browser.run(
        """(() => {
          const canvas = document.getElementById("timeline");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Map();
          for (let at = 0; at < data.length; at += 4) {
            const colour = data.slice(at, at + 3).join();
            seen.set(colour, (seen.get(colour) || 0) + 1);
          }
          return [...seen].filter(([, pixels]) => pixels > 400).map(([colour]) => colour);
        })()"""
    )
    forward, backward = ("75,143,219", "234,169,60") if dark else ("47,111,181", "227,154,31")
    assert {forward, backward} <= set(colours)
    low = browser.run(
        """(() => {
          const light = (colour) => {
            const part = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
            const [red, green, blue] = colour.match(/[\\d.]+/g).map(Number).map(part);
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
          };
          const behind = (node) => {
            for (; node; node = node.parentElement) {
              const colour = getComputedStyle(node).backgroundColor;
              if (!colour.endsWith(", 0)")) return colour;
            }
            return "rgb(255, 255, 255)";
          };
          const words = document.querySelectorAll("p, label, td, th, dt, dd, button, h1, h2, legend, li");
          return [...words].filter((node) => {
            if (!node.textContent.trim() || node.disabled) return false;
            const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05) < 4.5;
          }).map((node) => node.textContent.trim());
        })()"""
    )
    assert low == [], "text too faint on its ground"
    assert browser.errors == []

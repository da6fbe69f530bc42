"""Every example, and every python block of the README and the docs, runs and says what its page says.

Blocks of one page run in order in one namespace. A hidden block, ``<!-- run first ... -->``, prepares what the page
takes for granted. A ``text`` block that follows a python block is what that prints: words must be the same, numbers
may differ, as they do from machine to machine. Blocks marked ``python no-run`` are only shown.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What each example is about, as it shows in what it prints.
SHOWS = {
    "built_by_a_function": r"loss in four stages (\d\.\d+), of a plain build \1",
    "custom_schedule": r"(?s)deadlocks.*1f1b: loss (\d\.\d+)\nmine: loss \1",
    "resume": r"(?s)step 5   straight (\d\.\d+)   saved, loaded \1\nevaluated: pipeline (\d\.\d+), plain model \2",
    "timeline": r"(?s)zb_h1: bubble \d+% measured.*written to",
    "torchrun_train": r"(?s)started by: (processes|torchrun)\n.*step 4   loss 0\.",
    "train_huggingface": r"after 1 2 3 4 comes 5",
    "train_sequence": r"step 4   in two stages (\d\.\d{3})\d+   in one process \1",
    "unet_skips": r"(?s)stage 0 \(down.0\) feeds 1, 2\n.*prediction: \(16, 1, 32, 32\)",
}

_BLOCK = re.compile(
    r"<!-- run first\n(?P<hidden>.*?)-->|^```(?P<info>.*?)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"\d[\d,._]*")

# Model code of other packages warns about itself.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _no_watcher_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm, with which transformers loads weights, would leave a thread behind."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *(["figures"] if path.stem == "timeline" else [])])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(SHOWS[path.stem], capsys.readouterr().out)


@pytest.mark.timeout(240)
def test_example_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "torchrun_train.py")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS["torchrun_train"], done.stdout)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text(encoding="utf-8")
    printed = None
    for match in _BLOCK.finditer(text):
        code = match["hidden"] if match["info"] is None else match["text"]
        if match["info"] in (None, "python"):
            # empty lines in front, so that a traceback shows the page's own line
            line = text.count("\n", 0, match.start()) + 1
            capsys.readouterr()
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif match["info"] == "text" and printed is not None:
            assert _words(printed) == _words(code)
            printed = None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def _words(text: str) -> list[str]:
    return _NUMBER.sub("0", text).split()

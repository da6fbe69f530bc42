"""What the benchmarks share: flags, turns, tables, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

START, END = "<!-- result -->", "<!-- /result -->"


class Turn(NamedTuple):
    """What one contestant's turn gave: seconds of a step, and its loss."""

    seconds: float
    loss: float


def say(what: str) -> None:
    """Tell whoever waits what is going on."""
    print(what, file=sys.stderr, flush=True)


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The flags that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="how often everything is measured")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--write", action="store_true", help="put the result into the README beside the program")
    return made


def in_turn(
    contestants: Mapping[str, Callable[[], Turn]], rounds: int, warm_up: int, steps: int = 1
) -> dict[str, list[Turn]]:
    """Let all contestants do a few steps, one contestant after the other, round after round.

    Each round starts with another one, so that nobody always follows the same. A turn's first step wakes processes and
    fills caches and is not counted where a turn has several; of the others the median counts.
    """
    names = list(contestants)
    say(f"{', '.join(names)}: {warm_up} + {rounds} rounds")
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = [contestants[name]() for _ in range(steps)]
            if number >= 0:
                turns[name].append(Turn(statistics.median(t.seconds for t in taken[steps > 1 :]), taken[-1].loss))
    return turns


def median_seconds(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.seconds for turn in turns)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def environment() -> dict[str, str]:
    """Where and when this was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def environment_line(found: Mapping[str, str]) -> str:
    return (
        f"{found['date']}; {found['cpu']}; {found['system']}; Python {found['python']}, torch {found['torch']}; "
        f"one thread per process; load average before: {found['load']}"
    )


def publish(options: argparse.Namespace, program: str, found: Mapping[str, str], results: Any, markdown: str) -> None:
    """Print the result, and write it into the README where that was asked for."""
    if options.json:
        print(json.dumps({"environment": dict(found), "results": results}, indent=2))
    else:
        print(f"{markdown}\n\n{environment_line(found)}")
    if options.write:
        readme = Path(program).with_name("README.md")
        block = f"{START}\n{markdown}\n\n{environment_line(found)}\n{END}"
        text = readme.read_text(encoding="utf-8")
        pattern = re.escape(START) + ".*?" + re.escape(END)
        if not re.search(pattern, text, re.DOTALL):
            raise SystemExit(f"{readme} has no lines {START} and {END} to put the result between")
        readme.write_text(re.sub(pattern, lambda _: block, text, flags=re.DOTALL), encoding="utf-8")

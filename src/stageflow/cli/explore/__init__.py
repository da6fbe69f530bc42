"""Write one page on which schedules can be tried out; it computes everything itself and loads nothing from elsewhere.

stageflow explore
stageflow explore --output lesson.html --schedule zb_h1 --devices 8 --microbatches 16 --hop 0.2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stageflow.cli.explore.page import SCHEDULES, render_page, sliders
from stageflow.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--output", type=Path, default=Path("explore.html"), metavar="PATH", help="(explore.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    start = parser.add_argument_group("what the page shows when it opens")
    start.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)} (1f1b)")
    for name, slider in sliders().items():
        words = f"{slider['words']}, {slider['least']} to {slider['most']} ({slider['start']})"
        kind = int if slider["by"] == 1 else float
        start.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "T", help=words)


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    wanted: dict[str, Any] = {"schedule": args.schedule, **{name: getattr(args, name) for name in sliders()}}
    page = render_page({name: value for name, value in wanted.items() if value is not None})
    if args.output.is_dir():
        raise InputError(f"--output {args.output} is a folder: give the name of a file in it, such as explore.html")
    args.output.write_text(page, encoding="utf-8")
    if args.json:
        print(json.dumps({"page": str(args.output), "bytes": len(page.encode())}))
    else:
        print(f"wrote {args.output}: open it in a browser")
    return 0

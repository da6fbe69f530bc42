"""Draws the README's picture: one step of 1F1B over four stages.

python docs/images/draw.py
"""

from pathlib import Path

from stageflow.observe import render_svg
from stageflow.schedule import build_schedule


def main() -> None:
    schedule = build_schedule("1f1b", stages=4, microbatches=8)
    svg = render_svg(
        schedule.simulate().events(),
        workers=schedule.n_workers,
        title="One training step: 1F1B, four stages, eight micro-batches; each lane is a worker, white is waiting",
        unit="",
        width=960,
    )
    Path(__file__).with_name("1f1b.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

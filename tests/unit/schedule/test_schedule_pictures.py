"""The picture that each builder's docstring shows is what it builds."""

from __future__ import annotations

from typing import Any

import pytest

from stageflow.schedule import SCHEDULES, SIMULATED, Costs, build_schedule
from stageflow.schedule.families import FAMILIES

DRAWN: dict[str, dict[str, Any]] = {
    "gpipe": {"stages": 3, "microbatches": 2},
    "1f1b": {"stages": 3, "microbatches": 4},
    "eager_1f1b": {"stages": 3, "microbatches": 4},
    "interleaved_1f1b": {"stages": 4, "microbatches": 2},
    "looped_bfs": {"stages": 4, "microbatches": 2},
    "zb_h1": {"stages": 3, "microbatches": 4},
    "zb_h2": {"stages": 3, "microbatches": 5},
    "interleaved_zb": {"stages": 4, "microbatches": 2},
    "zb_v": {"stages": 4, "microbatches": 4},
    "v_half": {"stages": 4, "microbatches": 3},
    "v_min": {"stages": 4, "microbatches": 3},
    "dualpipe": {"stages": 2, "microbatches": 8},
    "dualpipe_v": {"stages": 4, "microbatches": 4},
    "chimera": {"stages": 4, "microbatches": 4},
    "pipedream_2bw": {"stages": 3, "microbatches": 3, "steps": 2},
    "forward_only": {"stages": 3, "microbatches": 3},
}


@pytest.mark.parametrize("name", DRAWN)
def test_picture(name: str) -> None:
    costs = Costs(forward=2) if name == "chimera" else None  # as long as its backwards
    drawn = build_schedule(name, **DRAWN[name]).draw(costs)
    documented = [line.strip() for line in (FAMILIES[name].build.__doc__ or "").splitlines()]
    shown = [line for line in documented if line[:3] in {f"{worker} |" for worker in range(9)}]
    assert drawn.splitlines() == shown


def test_every_builder_has_a_picture() -> None:
    assert set(SCHEDULES + SIMULATED) - set(DRAWN) == {"greedy"}  # which follows the times it is given

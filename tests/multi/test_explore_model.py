"""The page's own builders and simulator say what the library says."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from stageflow.cli.explore.page import MODEL, SCHEDULES, read
from stageflow.schedule import Costs, Footprint, Schedule, build_schedule, peak_memory

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="runs the page's scripts in node, which is not installed")

CHUNKS = {
    **dict.fromkeys(("interleaved_1f1b", "looped_bfs", "interleaved_zb"), (2, 3)),
    **dict.fromkeys(("zb_v", "v_half", "v_min"), (2,)),
    "greedy": (1, 2, 3),
}
TIMES = [
    {"f": 1, "i": 1, "w": 1, "hop": 0, "transfer": 0},
    {"f": 1, "i": 1.4, "w": 0.7, "hop": 0.3, "transfer": 0},
    {"f": 2, "i": 1, "w": 3, "hop": 0.1, "transfer": 0.9},
]


@dataclass(frozen=True)
class Case:
    """Settings of the page, and the library's schedule and costs for them."""

    name: str
    devices: int
    microbatches: int
    chunks: int
    times: dict[str, float]
    limit: int

    @property
    def costs(self) -> Costs:
        """Each device's times, cut into as many stages as it has."""
        part = [self.times[key] / self.chunks for key in "fiw"]
        return Costs(*part, hop=self.times["hop"], transfer=self.times["transfer"])

    def schedule(self) -> Schedule:
        options: dict[str, Any] = {}
        if self.name == "greedy":
            options = {"costs": self.costs, "placement": "fold", "memory": self.limit or None}
        return build_schedule(
            self.name,
            stages=self.devices * self.chunks,
            workers=self.devices,
            microbatches=self.microbatches,
            **options,
        )


def grid() -> list[Case]:
    cases = [
        Case(name, devices, microbatches, chunks, times, 0)
        for name in SCHEDULES
        for chunks, devices, microbatches, times in product(
            CHUNKS.get(name, (1,)), (1, 2, 3, 4, 7), (1, 2, 5, 8, 13), TIMES
        )
    ]
    limited = [
        Case("greedy", 4, 9, chunks, times, limit * chunks) for chunks in (1, 2) for times in TIMES for limit in (1, 3)
    ]
    return cases + limited


def in_node(cases: list[Case]) -> list[dict[str, Any]]:
    """What the page finds for each case."""
    script = (
        "\n".join(map(read, MODEL))
        + """
    const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
    const found = cases.map(({ name, devices, microbatches, chunks, times, limit }) => {
      const costs = stageCosts(times, chunks);
      const schedule = buildSchedule(name, { devices, microbatches, chunks, costs, limit });
      const { makespan, bubble, peaks, idle } = simulate(schedule, costs);
      const orders = schedule.orders.map((order) => order.map((code) => schedule.numbering.name(code)).join(" "));
      return { orders, makespan, bubble, peaks, idle, bound: lowerBound(schedule, costs) };
    });
    console.log(JSON.stringify(found));
    """
    )
    assert NODE is not None
    given = json.dumps([vars(case) for case in cases])
    done = subprocess.run([NODE, "-e", script], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_orders_times_and_peaks_are_those_of_the_library() -> None:
    cases = grid()
    for case, found in zip(cases, in_node(cases), strict=True):
        schedule = case.schedule()
        simulation = schedule.simulate(case.costs)
        assert found["orders"] == [" ".join(map(str, order)) for order in schedule.orders], case
        assert found["makespan"] == pytest.approx(simulation.makespan), case
        assert found["bubble"] == pytest.approx(simulation.bubble), case
        assert found["peaks"] == list(peak_memory(schedule, Footprint())), case
        for ours, theirs in zip(found["idle"], simulation.idle, strict=True):
            assert ours == pytest.approx(list(theirs)), case
        assert found["bound"] <= simulation.makespan * (1 + 1e-9), case


def test_the_bound_by_hand() -> None:
    plain, slow = {"f": 1, "i": 1, "w": 1, "hop": 0, "transfer": 0}, {"f": 1, "i": 1, "w": 1, "hop": 1, "transfer": 10}
    whole, split, one, busy_link = in_node(
        [
            Case("1f1b", 4, 8, 1, plain, 0),
            Case("zb_h1", 4, 8, 1, plain, 0),
            Case("1f1b", 3, 1, 1, slow, 0),
            Case("1f1b", 2, 5, 1, slow, 0),
        ]
    )
    assert whole["bound"] == 8 * 3 + 3 * 3, "the last device starts after 3 F, then the last gradient goes back by 3 B"
    assert split["bound"] == 8 * 3 + 3, "the last device starts after 3 F and ends with a W"
    assert one["bound"] == one["makespan"] == 3 * 3 + 4 * 11, "one micro-batch there and back"
    assert busy_link["bound"] == 1 + 5 * 10 + 1 + 3 + 11 + 2, "five values on the first link, then on from the last"

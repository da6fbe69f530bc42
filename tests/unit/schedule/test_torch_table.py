"""The table that torch's schedule runtime loads: written, read, and judged by torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as theirs

from stageflow.errors import InputError, ScheduleError
from stageflow.graph import StageGraph
from stageflow.schedule import SCHEDULES, Schedule, build_schedule
from stageflow.schedule.torch_table import FORMS

TRAINS = [name for name in SCHEDULES if name != "forward_only"]
STAGES, MICROBATCHES = 4, 5


def schedule_of(name: str) -> Schedule:
    return build_schedule(name, stages=STAGES, microbatches=MICROBATCHES)


def actions_of(table: str) -> dict[int, list[theirs._Action]]:
    """What torch reads."""
    rows = [line.split(",") for line in table.splitlines()]
    return {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


def table_of(actions: dict[int, list[theirs._Action]]) -> str:
    """What torch dumps."""
    return "".join(",".join(map(str, actions[rank])) + "\n" for rank in sorted(actions))


def test_one_row_per_worker(tmp_path: Path) -> None:
    schedule = build_schedule("zb_h1", stages=2, microbatches=2)
    assert schedule.to_csv() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    schedule.to_csv(tmp_path / "orders.csv")
    for source in (tmp_path / "orders.csv", str(tmp_path / "orders.csv"), schedule.to_csv()):
        assert Schedule.from_csv(source, name="zb_h1") == schedule


def test_with_communication() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=2)
    assert schedule.to_csv(form="compute_comms").splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip_is_exact(name: str, form: str) -> None:
    schedule = schedule_of(name)
    assert Schedule.from_csv(schedule.to_csv(form=form), name=name) == schedule
    table = schedule.to_csv(form=form)
    assert table_of(actions_of(table)) == table


@pytest.mark.parametrize("name", TRAINS)
def test_torch_accepts_it(name: str) -> None:
    schedule = schedule_of(name)
    mapping = theirs._validate_schedule(actions_of(schedule.to_csv()), schedule.n_workers, STAGES, MICROBATCHES)
    assert tuple(mapping[stage] for stage in range(STAGES)) == schedule.placement


@pytest.mark.parametrize("name", TRAINS)
def test_torch_simulates_it_to_its_end(name: str) -> None:
    schedule = schedule_of(name)
    table = actions_of(schedule.to_csv(form="compute_comms"))
    reduce = theirs._ComputationType.REDUCE_GRAD  # their simulator, unlike their runtime, does not know it
    actions = {rank: [a for a in row if a.computation_type != reduce] for rank, row in table.items()}
    theirs._simulate_comms_compute(actions, lambda stage: schedule.placement[stage], STAGES)


@pytest.mark.parametrize("name", TRAINS)
def test_reads_what_torch_dumps(name: str) -> None:
    """With its own sends and receives, and what it adds for sharded stages."""
    schedule = schedule_of(name)
    lowered = {
        rank: theirs._add_reduce_grad(theirs._add_unshard_reshard(actions), MICROBATCHES)
        for rank, actions in actions_of(schedule.to_csv()).items()
    }
    lowered = theirs._add_send_recv(lowered, lambda stage: schedule.placement[stage], STAGES)
    assert Schedule.from_csv(table_of(lowered), name=name) == schedule


SAME = {
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zb_v": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 3), (2, 4), (3, 9), (4, 8), (5, 15)])
def test_orders_are_those_of_torchs_class(name: str, workers: int, microbatches: int) -> None:
    builder = object.__new__(SAME[name])  # without stages, which it does not need to order actions
    builder.pp_group_size = workers
    builder.num_stages = 2 * workers
    builder.n_local_stages = 2
    builder._n_microbatches = microbatches
    builder.microbatches_per_round = microbatches // (microbatches // workers)
    want = [
        [
            str(part)
            for action in builder._calculate_single_rank_operations(rank)
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(workers)
    ]
    schedule = build_schedule(name, stages=2 * workers, microbatches=microbatches)
    assert [list(map(str, order)) for order in schedule.orders] == want


def test_empty_cells_are_pauses_and_overlapping_actions_come_one_after_the_other() -> None:
    schedule = Schedule.from_csv("0F0,,0F1,0B0,,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1,\n")
    assert schedule == Schedule.from_orders(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], name="csv")


@pytest.mark.parametrize("blank", ["\n", "  \n", "\r\n"])
def test_blank_lines_are_no_workers(blank: str) -> None:
    schedule = Schedule.from_csv(f"0F0,0B0\n{blank}1F0,1B0\n{blank}{blank}")
    assert schedule == Schedule.from_orders(["0F0 0B0", "1F0 1B0"], name="csv")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("0F0,0B0\n,,\n", "worker 1 has no stage"),
        ("0F0,0X0\n", "'0X0' is no action"),
        ("0F0,0SEND_X0\n", "'0SEND_X0' is no action"),
        ("0F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "row 0 of the table lacks 0RECV_B0"),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "row 0 .* must not have, 0SEND_F0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B1\n", "row 1 of the table lacks 1SEND_B0"),
    ],
)
def test_what_is_no_table_is_refused(table: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Schedule.from_csv(table)


def test_only_chains_can_be_written_with_communication() -> None:
    skip = StageGraph(3, frozenset({(0, 1), (1, 2), (0, 2)}))
    schedule = build_schedule("1f1b", stages=3, microbatches=2, graph=skip)
    with pytest.raises(InputError, match='next stage only; form="compute_only" can be written'):
        schedule.to_csv(form="compute_comms")
    assert Schedule.from_csv(schedule.to_csv(), name="1f1b", graph=skip) == schedule
    with pytest.raises(InputError, match="unknown form 'comms' of a table; known: compute_only, compute_comms"):
        schedule.to_csv(form="comms")  # type: ignore[arg-type]
    two_copies = build_schedule("dualpipe", stages=4, microbatches=8)
    with pytest.raises(InputError, match="is not for a chain"):
        two_copies.to_csv(form="compute_comms")

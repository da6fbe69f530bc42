"""The validator against hand-made broken schedules, and against brute force on mutated ones."""

from collections import Counter

import pytest
from any_counts import ANY_COUNTS
from hypothesis import given, settings
from hypothesis import strategies as st

from stageflow.errors import ScheduleError
from stageflow.graph import StageGraph
from stageflow.schedule import (
    SCHEDULES,
    Action,
    Recv,
    Schedule,
    Send,
    build_schedule,
    check_rendezvous,
    parse_actions,
    validate,
)


def chain(*orders: str, microbatches: int = 1, placement: tuple[int, ...] | None = None) -> Schedule:
    placement = placement or tuple(range(len(orders)))
    return Schedule(
        "mine", StageGraph.chain(len(placement)), placement, microbatches, tuple(map(parse_actions, orders))
    )


def test_report() -> None:
    report = build_schedule("1f1b", stages=3, microbatches=4).validate()
    assert (report.peak_activations, report.actions, report.messages) == ((3, 2, 1), 24, 16)


def test_a_value_that_stays_on_its_worker_is_no_message() -> None:
    assert build_schedule("zb_v", stages=4, microbatches=3).validate().messages == 2 * 2 * 3


def test_activations_are_kept_until_w() -> None:
    report = chain("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2", microbatches=3).validate()
    assert report.peak_activations == (2,)


def test_forwards_alone_keep_nothing() -> None:
    assert chain("0F0 0F1", "1F0 1F1", microbatches=2).validate().peak_activations == (0, 0)


def test_split_and_whole_backwards_mix() -> None:
    chain("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1", microbatches=2).validate()


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        pytest.param(
            chain("0F0 0B0", "1F0"),
            "worker 1 has 1F0 for stage 1, micro-batch 0; it needs F and B, or F, I and W, each once",
            id="missing B",
        ),
        pytest.param(
            chain("0F0 0B0", "1F0 1B0", microbatches=2),
            "worker 0 has nothing for stage 0, micro-batch 1",
            id="missing micro-batch",
        ),
        pytest.param(
            chain("0F0 0I0", "1F0 1I0 1W0"),
            "worker 0 has 0F0 0I0 for stage 0",
            id="missing W",
        ),
        pytest.param(
            chain("0F0 0B0 0I0 0W0"),
            "worker 0 has 0F0 0B0 0I0 0W0 for stage 0",
            id="B and I, W",
        ),
        pytest.param(
            chain("0F0", "1F0 1B0"),
            "worker 0 has 0F0 for stage 0",
            id="forward only in one stage",
        ),
        pytest.param(
            chain("0F0 0F0 0B0"),
            r"worker 0 at position 1 \(0F0\): the same action already stands at position 0",
            id="duplicate",
        ),
        pytest.param(
            chain("0F0 1F0 0B0", "1B0"),
            r"worker 0 at position 1 \(1F0\): stage 1 is placed on worker 1",
            id="wrong worker",
        ),
        pytest.param(
            chain("0F0 2F0 0B0"),
            r"worker 0 at position 1 \(2F0\): there is no stage 2, the stages are 0 to 0",
            id="no such stage",
        ),
        pytest.param(
            chain("0F0 0F1 0B0"),
            r"worker 0 at position 1 \(0F1\): there is no micro-batch 1, they are 0 to 0",
            id="no such micro-batch",
        ),
        pytest.param(
            Schedule("mine", StageGraph.chain(1), (0,), 1, ((Action("X", 0, 0),),)),  # type: ignore[arg-type]
            "unknown kind 'X', expected one of F, B, I, W",
            id="no such kind",
        ),
        pytest.param(
            chain("0B0 0F0"),
            r"worker 0 at position 0 \(0B0\) waits for 0F0 \(worker 0, position 1\)",
            id="backward before its forward",
        ),
        pytest.param(
            chain("0F0 0W0 0I0"),
            r"worker 0 at position 1 \(0W0\) waits for 0I0 \(worker 0, position 2\)",
            id="W before its I",
        ),
    ],
)
def test_broken(schedule: Schedule, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedule.validate()


@pytest.mark.parametrize(
    ("placement", "orders", "worker"), [((0,), ["0F0 0B0", ""], 1), ((1,), ["", "0F0 0B0"], 0)], ids=["last", "first"]
)
def test_a_worker_without_a_stage_is_refused(placement: tuple[int, ...], orders: list[str], worker: int) -> None:
    """Others would wait for it for ever."""
    with pytest.raises(ScheduleError, match=f"worker {worker} has no stage; there are orders for 2 workers"):
        Schedule("mine", StageGraph.chain(1), placement, 1, tuple(map(parse_actions, orders)))


def test_a_cycle_is_told_whole() -> None:
    """Worker 0 wants the gradient of 0 before it gives the input of 1; worker 1 the other way round."""
    with pytest.raises(ScheduleError) as caught:
        chain("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2).validate()
    assert str(caught.value).splitlines() == [
        "schedule 'mine' deadlocks; each waits for the next, the last for the first:",
        "  worker 0 at position 1 (0B0) waits for 1B0 (worker 1, position 2)",
        "  worker 1 at position 1 (1F1) waits for 0F1 (worker 0, position 2)",
    ]


def test_a_cycle_over_three_workers() -> None:
    graph = StageGraph(3, frozenset({(0, 1), (0, 2), (1, 2)}))
    orders = ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"]
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_orders(orders, graph=graph).validate()
    assert str(caught.value).splitlines()[1:] == [
        "  worker 0 at position 1 (0B0) waits for 1B0 (worker 1, position 1)",
        "  worker 1 at position 1 (1B0) waits for 2B0 (worker 2, position 2)",
        "  worker 2 at position 1 (2F1) waits for 0F1 (worker 0, position 2)",
    ]


def test_simulating_a_schedule_that_lacks_an_action_says_so() -> None:
    with pytest.raises(ScheduleError, match=r"worker 0 at position 1 \(0B0\) waits for 1B0, which no worker runs"):
        chain("0F0 0B0", "1F0").simulate()


def test_what_never_runs_on_blocked_workers_only_is_found_behind_them() -> None:
    with pytest.raises(ScheduleError, match=r"worker 2 at position 1 \(2B0\) waits for 3B0, which no worker runs"):
        chain("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0").simulate()


def rendezvous(*programs: str) -> list[list[Action | Send | Recv]]:
    """Programs in print: 0F0, 0F0>1 a send of stage 0 to stage 1, 1<0F0 its receive; stage s lives on worker s."""
    result: list[list[Action | Send | Recv]] = []
    for text in programs:
        program: list[Action | Send | Recv] = []
        for word in text.split():
            if ">" in word:
                (source, value, microbatch), target = word.split(">")
                program.append(Send(value, int(source), int(target), int(microbatch), int(target)))  # type: ignore[arg-type]
            elif "<" in word:
                target, (source, value, microbatch) = word.split("<")
                program.append(Recv(value, int(source), int(target), int(microbatch), int(source)))  # type: ignore[arg-type]
            else:
                program.extend(parse_actions(word))
        result.append(program)
    return result


def test_both_send_first_deadlocks_only_where_sends_block() -> None:
    """1F1B's steady state: worker 0 sends the next input while worker 1 sends the gradient."""
    orders = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    chain(*orders, microbatches=2).validate()
    naive = rendezvous(
        "0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F0 1F0 1B0 1B0>0 1<0F1 1F1 1B1 1B1>0",
    )
    with pytest.raises(ScheduleError) as caught:
        check_rendezvous(naive)
    assert str(caught.value).splitlines() == [
        "sends that block until received would deadlock, each waits for the next:",
        "  worker 0 at position 3 (0F1>1) waits for worker 1",
        "  worker 1 at position 3 (1B0>0) waits for worker 0",
    ]
    swapped = rendezvous(
        "0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F0 1F0 1B0 1<0F1 1B0>0 1F1 1B1 1B1>0",
    )
    check_rendezvous(swapped)


def test_three_workers_in_a_ring_of_sends() -> None:
    ring = rendezvous("0F0>1 0<2F0", "1F0>2 1<0F0", "2F0>0 2<1F0")
    with pytest.raises(ScheduleError, match="would deadlock") as caught:
        check_rendezvous(ring)
    assert str(caught.value).count("waits for worker") == 3


def test_a_send_without_its_receive() -> None:
    with pytest.raises(
        ScheduleError, match=r"worker 0 at position 1 \(0F0>1\) waits for worker 1, which has already ended"
    ):
        check_rendezvous(rendezvous("0F0 0F0>1", "1F0"))


def test_a_receive_that_looks_to_the_wrong_worker() -> None:
    programs = [[Send("F", 0, 1, 0, peer=1)], [Recv("F", 0, 1, 0, peer=2)], []]
    with pytest.raises(ScheduleError, match=r"worker 1 at position 0 \(1<0F0\) waits for worker 2"):
        check_rendezvous(programs)


def test_receives_in_another_order_than_the_sends() -> None:
    with pytest.raises(ScheduleError, match="would deadlock"):
        check_rendezvous(rendezvous("0F0>1 0F1>1", "1<0F1 1<0F0"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_built_schedules_pass_with_sends_that_block(name: str) -> None:
    check_rendezvous(build_schedule(name, stages=4, microbatches=6).lower())


@settings(max_examples=200)
@given(
    name=st.sampled_from(ANY_COUNTS),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    changes=st.lists(
        st.tuples(
            st.sampled_from(["swap", "swap", "swap", "drop", "double", "rename", "move"]),
            st.integers(0, 99),
            st.integers(0, 99),
            st.integers(0, 99),
        ),
        max_size=3,
    ),
)
def test_mutated_schedules_are_judged_as_by_brute_force(
    name: str, stages: int, microbatches: int, changes: list[tuple[str, int, int, int]]
) -> None:
    good = build_schedule(name, stages=stages, microbatches=microbatches)
    orders = [list(order) for order in good.orders]
    for change in changes:
        mutate(orders, *change)
    schedule = Schedule("mutant", good.graph, good.placement, microbatches, tuple(map(tuple, orders)))
    if runs_by_brute_force(schedule):
        validate(schedule)
    else:
        with pytest.raises(ScheduleError):
            validate(schedule)


def mutate(orders: list[list[Action]], what: str, worker: int, first: int, second: int) -> None:
    order = orders[worker % len(orders)]
    if not order:
        return
    i, j = first % len(order), second % len(order)
    if what == "swap":
        order[i], order[j] = order[j], order[i]
    elif what == "drop":
        del order[i]
    elif what == "double":
        order.insert(j, order[i])
    elif what == "rename":
        order[i] = order[i]._replace(kind="FBIW"[second % 4])  # type: ignore[arg-type]
    else:
        orders[second % len(orders)].append(order.pop(i))


def runs_by_brute_force(schedule: Schedule) -> bool:
    """Complete, at home, and every worker reaches its end; written apart from the library's own rule."""
    per_cell: dict[tuple[int, int], Counter[str]] = {
        (s, m): Counter() for s in range(schedule.n_stages) for m in range(schedule.microbatches)
    }
    for worker, order in enumerate(schedule.orders):
        for kind, stage, microbatch in order:
            per_cell[stage, microbatch][kind] += 1
            if schedule.placement[stage] != worker:
                return False
    cells = {"".join(sorted(cell.elements())) for cell in per_cell.values()}
    if cells != {"F"} and not cells <= {"BF", "FIW"}:
        return False
    done: set[tuple[str, int, int]] = set()
    left = [list(order) for order in schedule.orders]
    moved = True
    while moved:
        moved = False
        for order in left:
            while order and may_run(order[0], schedule.n_stages, done):
                kind, stage, microbatch = order.pop(0)
                done.add(("G" if kind in "BI" else kind, stage, microbatch))
                moved = True
    return not any(left)


def may_run(action: Action, stages: int, done: set[tuple[str, int, int]]) -> bool:
    """In a chain; "G" stands for B or I."""
    kind, stage, microbatch = action
    if kind == "F":
        return stage == 0 or ("F", stage - 1, microbatch) in done
    if kind == "W":
        return ("G", stage, microbatch) in done
    return ("F", stage, microbatch) in done and (stage == stages - 1 or ("G", stage + 1, microbatch) in done)

import random

from any_counts import ANY_COUNTS
from hypothesis import given
from hypothesis import strategies as st

from stageflow.graph import StageGraph
from stageflow.schedule import Action, Instruction, Recv, Schedule, Send, build_schedule


def test_lowered_1f1b() -> None:
    programs = build_schedule("1f1b", stages=2, microbatches=2).lower()
    assert [" ".join(map(str, program)) for program in programs] == [
        "0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0",
    ]
    assert programs[0][1] == Send("F", 0, 1, 0, peer=1)
    assert programs[1][0] == Recv("F", 0, 1, 0, peer=0)


def test_gradients_of_a_split_backward_leave_after_i() -> None:
    programs = build_schedule("zb_h1", stages=2, microbatches=1).lower()
    assert " ".join(map(str, programs[1])) == "1<0F0 1F0 1I0 1I0>0 1W0".replace("1I0>0", "1B0>0")


def test_values_go_straight_from_producer_to_consumer() -> None:
    """Stage 0 on worker 0 feeds stage 1 and skips to stage 2; stages 0 and 2 share a worker, 1 and 3 another."""
    graph = StageGraph(4, frozenset({(0, 1), (0, 2), (1, 3), (2, 3)}))
    schedule = build_schedule("1f1b", stages=4, microbatches=1, placement=[0, 1, 0, 1], graph=graph)
    crossing = {str(i) for program in schedule.lower() for i in program if isinstance(i, Send)}
    assert crossing == {"0F0>1", "2F0>3", "3B0>2", "1B0>0"}


@given(
    name=st.sampled_from(ANY_COUNTS),
    stages=st.integers(1, 5),
    workers=st.integers(1, 5),
    microbatches=st.integers(1, 5),
    placement=st.sampled_from(["loop", "fold", "contiguous"]),
    edges=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))),
    seed=st.integers(),
)
def test_lowered_programs_run_whichever_worker_moves_first(
    name: str, stages: int, workers: int, microbatches: int, placement: str, edges: set[tuple[int, int]], seed: int
) -> None:
    graph = StageGraph(stages, frozenset((a, b) for a, b in edges if a < b < stages))
    schedule = build_schedule(
        name,
        stages=stages,
        workers=min(stages, workers),
        microbatches=microbatches,
        placement=placement,
        graph=graph,
    )
    programs = schedule.lower()
    assert [tuple(i for i in program if isinstance(i, Action)) for program in programs] == list(schedule.orders)
    assert_every_value_arrives_before_its_use(schedule, programs)
    assert_ends_under_rendezvous(programs, random.Random(seed))


def assert_every_value_arrives_before_its_use(
    schedule: Schedule, programs: tuple[tuple[Instruction, ...], ...]
) -> None:
    for program in programs:
        made: set[tuple[str, int, int]] = set()
        arrived: set[tuple[str, int, int, int]] = set()
        for instruction in program:
            if isinstance(instruction, Send):
                assert (instruction.value, instruction.source, instruction.microbatch) in made
            elif isinstance(instruction, Recv):
                arrived.add(instruction[:4])
            else:
                kind, stage, microbatch = instruction
                givers = {"F": schedule.graph.predecessors(stage), "W": ()}.get(kind, schedule.graph.successors(stage))
                value = "F" if kind == "F" else "B"
                for giver in givers:
                    if schedule.placement[giver] != schedule.placement[stage]:
                        assert (value, giver, stage, microbatch) in arrived
                    else:
                        assert (value, giver, microbatch) in made
                made.add((value, stage, microbatch))


def assert_ends_under_rendezvous(programs: tuple[tuple[Instruction, ...], ...], chance: random.Random) -> None:
    """Each send and receive happens at once on both sides or not at all; who moves is left to chance."""
    left = [list(program) for program in programs]
    while any(left):
        movers = [w for w, program in enumerate(left) if program and can_move(left, w)]
        assert movers, f"stuck with {[program[:1] for program in left]}"
        worker = chance.choice(movers)
        instruction = left[worker].pop(0)
        if not isinstance(instruction, Action):
            left[instruction.peer].pop(0)


def can_move(left: list[list[Instruction]], worker: int) -> bool:
    mine = left[worker][0]
    if isinstance(mine, Action):
        return True
    theirs = left[mine.peer][0] if left[mine.peer] else None
    other = Recv if isinstance(mine, Send) else Send
    return isinstance(theirs, other) and theirs[:4] == mine[:4]

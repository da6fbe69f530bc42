"""The supervisor decides by events alone: every story here is a list of them."""

import pytest

from stageflow.launch.supervisor import (
    Conclude,
    Dump,
    Exited,
    Failed,
    Finished,
    Kill,
    Resume,
    Snapshot,
    Started,
    Stop,
    Supervisor,
    Tick,
)


def running(size=3, timeout=10.0):
    machine = Supervisor(size, grace=1.5, settle=0.3)
    assert machine.handle(Started(0.0, timeout)) == []
    return machine


def test_done_when_the_last_result_is_here():
    machine = running(2)
    assert machine.handle(Finished(1.0, 1)) == []
    assert machine.handle(Finished(1.1, 0)) == [Conclude("done")]
    assert machine.phase == "idle"


def test_a_failure_interrupts_the_others_and_ends_when_all_are_idle():
    machine = running()
    assert machine.handle(Failed(1.0, 1, 1.0, "error")) == [Snapshot(), Stop()]
    assert machine.handle(Finished(1.1, 0)) == []
    assert machine.handle(Failed(1.2, 2, 1.2, "aborted")) == [Resume(), Conclude("failed", 1)]
    assert machine.phase == "idle"
    assert machine.handle(Started(2.0, 10.0)) == []


def test_the_only_worker_fails():
    machine = running(1)
    assert machine.handle(Failed(1.0, 0, 1.0, "error")) == [Snapshot(), Stop(), Resume(), Conclude("failed", 0)]


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ([(0, 0.9, "error")], 0),  # raised earlier, heard later
        ([(0, 1.1, "error")], 1),
        ([(0, 0.5, "transport")], 1),  # a consequence, however early
        ([(0, 0.5, "timeout")], 1),
        ([(0, 0.5, "aborted")], 1),
    ],
)
def test_which_failure_is_the_cause(others, cause):
    machine = running(2)
    machine.handle(Failed(1.2, 1, 1.0, "error"))
    for rank, when, kind in others:
        commands = machine.handle(Failed(1.3, rank, when, kind))
    assert commands == [Resume(), Conclude("failed", cause)]


def test_an_error_heard_after_a_broken_transfer_is_the_cause():
    machine = running(2)
    machine.handle(Failed(1.0, 0, 1.0, "transport"))
    assert machine.handle(Failed(1.2, 1, 1.1, "error")) == [Resume(), Conclude("failed", 1)]


def test_who_does_not_stop_is_killed_after_the_grace():
    machine = running()
    machine.handle(Failed(1.0, 1, 1.0, "error"))
    machine.handle(Failed(1.1, 0, 1.1, "aborted"))
    assert machine.handle(Tick(2.4)) == []
    assert machine.handle(Tick(2.6)) == [Dump((2,)), Kill(), Conclude("failed", 1, closed=True, stuck=(2,))]
    assert machine.phase == "closed"
    assert machine.handle(Exited(2.7, 2)) == []


def test_a_death_ends_all_at_once():
    machine = running()
    assert machine.handle(Exited(1.0, 2)) == [Snapshot(), Kill(), Conclude("died", 2, closed=True)]


def test_a_death_explains_the_broken_transfer_before_it():
    machine = running()
    machine.handle(Failed(1.0, 0, 1.0, "transport"))
    assert machine.handle(Exited(1.1, 2))[-1] == Conclude("died", 2, closed=True)


def test_a_death_does_not_hide_the_error_before_it():
    machine = running()
    machine.handle(Failed(1.0, 0, 1.0, "error"))
    assert machine.handle(Exited(1.1, 2)) == [Kill(), Conclude("failed", 0, closed=True)]


def test_a_broken_transfer_waits_for_the_death_of_an_idle_worker():
    machine = running(2)
    machine.handle(Finished(1.0, 1))
    assert machine.handle(Failed(1.1, 0, 1.1, "transport")) == [Snapshot(), Stop()]
    assert machine.handle(Tick(1.2)) == []
    assert machine.handle(Exited(1.3, 1))[-1] == Conclude("died", 1, closed=True)


def test_a_broken_transfer_that_nothing_explains_is_told_itself():
    machine = running(1)
    machine.handle(Failed(1.0, 0, 1.0, "transport"))
    assert machine.handle(Tick(1.31)) == [Resume(), Conclude("failed", 0)]


def test_a_death_between_calls():
    machine = Supervisor(2)
    assert machine.handle(Exited(1.0, 0)) == [Snapshot(), Kill(), Conclude("died", 0, closed=True)]


def test_a_hang_is_no_progress_for_the_timeout():
    machine = running(2, timeout=10.0)
    machine.handle(Tick(9.0, progress=1))
    assert machine.handle(Tick(18.9, progress=1)) == []
    assert machine.handle(Tick(19.0, progress=1)) == [
        Snapshot(),
        Dump((0, 1)),
        Kill(),
        Conclude("hung", closed=True, stuck=(0, 1)),
    ]


def test_a_result_is_progress():
    machine = running(2, timeout=10.0)
    machine.handle(Finished(9.0, 0))
    assert machine.handle(Tick(18.0)) == []
    assert machine.handle(Tick(19.0))[-1] == Conclude("hung", closed=True, stuck=(1,))


def test_nothing_coming_anywhere_is_a_hang_whoever_notices_first():
    machine = running(2)
    assert machine.handle(Failed(1.0, 0, 1.0, "timeout")) == [Snapshot(), Stop()]
    assert machine.handle(Failed(1.1, 1, 1.1, "aborted")) == [Dump(()), Kill(), Conclude("hung", closed=True)]


def test_the_driver_fails_as_number_size():
    machine = running(2)
    assert machine.handle(Failed(1.0, 2, 1.0, "error")) == [Snapshot(), Stop()]
    machine.handle(Failed(1.1, 0, 1.1, "aborted"))
    assert machine.handle(Failed(1.1, 1, 1.1, "aborted")) == [Resume(), Conclude("failed", 2)]


def test_late_news_of_an_ended_call_changes_nothing():
    machine = running(1)
    machine.handle(Finished(1.0, 0))
    assert machine.handle(Failed(1.1, 1, 1.1, "error")) == []
    assert machine.handle(Tick(100.0)) == []


def test_a_second_call_while_one_runs_is_a_mistake_of_the_shell():
    with pytest.raises(RuntimeError, match="while the group was running"):
        running().handle(Started(1.0, 10.0))

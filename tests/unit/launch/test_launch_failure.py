import re
from dataclasses import replace

import pytest

from stageflow.errors import Aborted, TransferTimeout, TransportError
from stageflow.launch.base import WorkerStatus
from stageflow.launch.failure import Failure, kind_of, split_action, stage_failed, worker_died, worker_hung


@pytest.mark.parametrize(
    ("text", "place"), [("5B3", (5, 3)), ("12F0", (12, 0)), ("update", (None, None)), ("", (None, None))]
)
def test_place_of_an_action(text, place):
    assert split_action(text) == place


def test_kinds():
    errors = [Aborted(), TransferTimeout(), TransportError(), ValueError(), SystemExit()]
    assert [kind_of(error) for error in errors] == ["aborted", "timeout", "transport", "error", "error"]


def status(rank, action, waits_for="", seconds=1.0):
    return WorkerStatus(rank, action, waits_for, seconds, 100 + rank, True)


def test_death_by_signal_names_worker_stage_signal_and_action():
    error = worker_died(status(2, "5B3"), -9)
    assert str(error).startswith("worker 2 (stage 5) died of signal 9 (SIGKILL) during 5B3")
    assert (error.worker, error.stage, error.microbatch, error.action) == (2, 5, 3, "5B3")


def test_death_by_exit_and_by_unknown_signal():
    assert str(worker_died(status(0, ""), 3)) == "worker 0 exited with code 3 during its start; the group is closed"
    assert "died of signal 50 during" in str(worker_died(status(0, "idle"), -50))


def test_death_shows_the_fault_log():
    assert "Fatal Python error" in str(worker_died(status(0, "0F0"), -11, "Fatal Python error: Segmentation fault"))


def test_hang_names_every_worker_what_it_waits_for_and_since_when():
    error = worker_hung([status(0, "0F1", seconds=3.21), status(1, "1F0", "0F0 from worker 0")], 3.0, {0: "File x"})
    assert isinstance(error, TimeoutError)
    lines = str(error).splitlines()
    assert lines[0].startswith("no worker made progress for 3 s: worker 0 was in 0F1; all workers were ended")
    assert (error.worker, error.stage, error.microbatch, error.action) == (0, 0, 1, "0F1")
    assert lines[1:3] == ["  worker 0: 0F1 for 3.2 s", "  worker 1: 1F0, waiting for 0F0 from worker 0, for 1.0 s"]
    assert lines[3:] == ["stacks of worker 0:", "  File x"]


def test_hang_names_a_worker_that_a_signal_stopped_before_those_that_compute():
    stopped = replace(status(2, "2B0", "3B0 from worker 3"), stopped=True)
    error = worker_hung([status(0, "0F1"), status(1, "idle"), stopped], 3.0, {})
    assert str(error).startswith("no worker made progress for 3 s: worker 2 was stopped by a signal; all workers")
    assert (error.worker, error.stage) == (2, 2)


def test_hang_in_which_all_wait_or_several_compute_blames_nobody():
    assert worker_hung([status(0, "0F1", "x"), status(1, "idle")], 3.0, {}).worker is None
    error = worker_hung([status(0, "0F1"), status(1, "1F0")], 3.0, {})
    assert error.worker is None
    assert "worker 0 was in 0F1, worker 1 was in 1F0" in str(error)


def test_who_would_not_stop_is_said():
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as caught:
        report = Failure.of(0, caught, "step")
    text = str(stage_failed(report, closed=True, stuck=(1, 2)))
    assert re.match(r"worker 0 raised ValueError: first line during step; worker 1, 2 did not stop", text)


class Mute(Exception):
    """As users write them: an own `action` that is no text, and a text that can't be had."""

    action = ("resume", "now")

    def __str__(self) -> str:
        raise KeyError("reason")


def test_an_exception_that_can_not_tell_its_text_is_reported_all_the_same():
    try:
        raise Mute
    except Mute as caught:
        report = Failure.of(0, caught, "2F3")
    assert "Mute: (its text can't be had: __str__ raised KeyError) during 2F3" in str(
        stage_failed(report, closed=False)
    )
    assert (report.stage, report.microbatch) == (2, 3)

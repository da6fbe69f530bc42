import os
import select

import pytest

from stageflow.errors import Aborted
from stageflow.launch.board import StatusBoard, StopSignal, stop_interrupt


@pytest.fixture
def board():
    board = StatusBoard(2)
    yield board
    board.close()


def test_what_one_sets_the_other_reads_through_its_own_mapping(board):
    theirs = StatusBoard(2, board.fd)
    theirs.writer(1).set("2F0", waits_for="1F0 from worker 0")
    entry = board.read(1)
    assert (entry.changes, entry.action, entry.waits_for) == (1, "2F0", "1F0 from worker 0")
    assert board.read(0).action == ""
    theirs.close()


def test_progress_counts_every_change(board):
    first, second = board.writer(0), board.writer(1)
    first.set("0F0")
    first.set("0F0")
    second.set("1F0")
    assert board.progress() == 3


def test_a_new_writer_goes_on_counting(board):
    board.writer(0).set("a")
    board.writer(0).set("b")
    assert board.read(0)[::2] == (2, "b")


def test_who_finds_a_board_reads_its_size_and_its_processes(board):
    assert [board.process(rank) for rank in range(2)] == [0, 0]
    board.writer(1)
    found = StatusBoard.found(board.fd)
    assert found.size == 2
    assert [found.process(rank) for rank in range(2)] == [0, os.getpid()]
    found.close()


def test_a_shorter_text_leaves_nothing_of_the_longer_before(board):
    writer = board.writer(0)
    writer.set("building stage 3", "the driver to answer")
    writer.set("idle")
    assert board.read(0)[2:] == ("idle", "")


def test_texts_too_long_are_cut_also_within_a_character(board):
    board.writer(0).set("é" * 500, "never seen")
    assert board.read(0).action.startswith("é" * 119)
    assert board.read(1).action == ""


def test_stop_signal_wakes_every_waiter_until_cleared(board):
    stop = StopSignal(board)
    waiters = [stop_interrupt(board, stop.fd) for _ in range(2)]
    for waiter in waiters:
        waiter.check()
        assert not select.select([waiter.fd], [], [], 0)[0]
    stop.send()
    stop.send()
    for waiter in waiters:
        assert select.select([waiter.fd], [], [], 0)[0]
        with pytest.raises(Aborted, match="told all workers to stop"):
            waiter.check()
    stop.clear()
    assert not select.select([stop.fd], [], [], 0)[0]
    waiters[0].check()
    stop.close()


def test_close_twice():
    board = StatusBoard(1)
    fd = board.fd
    board.close()
    board.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)

import os
import socket
import threading

import pytest

from stageflow.launch.channel import Channel, Closed


@pytest.fixture
def ends():
    pair = [Channel(sock) for sock in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def test_parts_arrive_as_they_were_sent(ends):
    ours, theirs = ends
    messages = [[b"a"], [b"", b"bc", b""], [os.urandom(1000)]]
    for message in messages:
        ours.send(*message)
    assert [theirs.recv() for _ in messages] == messages


def test_a_large_message_crosses_while_both_work(ends):
    ours, theirs = ends
    big = os.urandom(5_000_000)
    sender = threading.Thread(target=ours.send, args=(b"head", big))
    sender.start()
    assert theirs.recv() == [b"head", big]
    sender.join()


def test_pending_takes_what_is_whole_and_does_not_wait(ends):
    ours, theirs = ends
    assert list(theirs.pending()) == []
    ours.send(b"1")
    ours.send(b"2")
    assert list(theirs.pending()) == [[b"1"], [b"2"]]


def test_pending_gives_the_last_words_before_it_says_closed(ends):
    ours, theirs = ends
    ours.send(b"last words")
    ours.close()
    heard = theirs.pending()
    assert next(heard) == [b"last words"]
    with pytest.raises(Closed):
        next(heard)


def test_a_message_cut_off_is_no_message(ends):
    ours, theirs = ends
    ours._socket.sendall(b"\x01\x00\x00\x00\xff\x00")
    ours.close()
    with pytest.raises(Closed):
        theirs.recv()


def test_send_to_nobody(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(Closed):
        ours.send(b"x")


def test_send_to_one_who_does_not_read(ends):
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(10_000_000), timeout=0.1)

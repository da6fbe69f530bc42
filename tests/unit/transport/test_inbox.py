import pytest

from stageflow.errors import TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Tag
from stageflow.transport.inbox import Inbox


def tag(step, microbatch=0):
    return Tag(step, "F", 0, 1, microbatch)


def test_hands_out_once():
    inbox, bundle = Inbox(1), Bundle()
    inbox.put(tag(1), bundle)
    assert inbox.pop(tag(1)) is bundle
    assert inbox.pop(tag(1)) is None


def test_forgets_old_steps_now_and_later():
    inbox = Inbox(1)
    for step in (1, 2, 3):
        inbox.put(tag(step), Bundle())
    inbox.forget(3)
    inbox.forget(2)
    inbox.put(tag(2, 1), Bundle())
    assert [inbox.pop(tag(s)) is not None for s in (1, 2, 3)] == [False, False, True]
    assert inbox.pop(tag(2, 1)) is None


def test_a_second_message_with_the_same_tag_is_an_error():
    inbox = Inbox(1)
    inbox.put(tag(1), Bundle())
    with pytest.raises(TransportError, match="worker 1 got a second message"):
        inbox.put(tag(1), Bundle())


def test_timeout_says_what_was_awaited_and_what_came():
    inbox = Inbox(4)
    for microbatch in range(10):
        inbox.put(tag(1, microbatch), Bundle())
    with pytest.raises(TransferTimeout) as caught:
        raise inbox.timed_out(tag(2, 5), 1.5)
    assert str(caught.value).startswith(
        "worker 4 waited 1.5 s for message F from 0 to 1, micro-batch 5, step 2 and it did not come. "
        "Arrived and not asked for: F from 0 to 1, micro-batch 0, step 1, "
    )
    assert "and 2 more." in str(caught.value)

import contextlib
import threading
import time

import pytest

from stageflow.errors import Aborted, TransportError
from stageflow.graph import Bundle
from stageflow.testing.transport import SCENARIOS, check_transport
from stageflow.transport.base import Interrupt, Tag
from stageflow.transport.inproc import Hub


@contextlib.contextmanager
def pair(switches):
    hub = Hub(2)
    yield tuple(hub.endpoint(rank, switch.interrupt) for rank, switch in enumerate(switches))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conforms(scenario):
    check_transport(pair, [scenario])


def test_wake_looks_at_the_interrupt_at_once():
    hub, stop = Hub(2), threading.Event()

    def check():
        if stop.is_set():
            raise Aborted("stop")

    def trip():
        stop.set()
        hub.wake()

    endpoint = hub.endpoint(0, Interrupt(check))
    threading.Timer(0.1, trip).start()
    started = time.monotonic()
    with pytest.raises(Aborted):
        endpoint.recv(Tag(0, "F", 1, 0, 0), 10)
    assert time.monotonic() - started < 0.3


def test_sending_to_a_closed_peer_names_it():
    hub = Hub(2)
    first, second = hub.endpoint(0), hub.endpoint(1)
    second.close()
    with pytest.raises(TransportError, match="worker 1 has closed"):
        first.send(1, Tag(0, "F", 0, 1, 0), Bundle())

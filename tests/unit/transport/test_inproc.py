import contextlib

import pytest

from stageflow.errors import TransportError
from stageflow.graph import Bundle
from stageflow.testing.transport import SCENARIOS, check_transport
from stageflow.transport.base import Tag
from stageflow.transport.inproc import Hub


@contextlib.contextmanager
def pair(switches):
    hub = Hub(2)
    yield tuple(hub.endpoint(rank, switch.interrupt) for rank, switch in enumerate(switches))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conforms(scenario):
    check_transport(pair, [scenario])


def test_sending_to_a_closed_peer_names_it():
    hub = Hub(2)
    first, second = hub.endpoint(0), hub.endpoint(1)
    second.close()
    with pytest.raises(TransportError, match="worker 1 has closed"):
        first.send(1, Tag(0, "F", 0, 1, 0), Bundle())

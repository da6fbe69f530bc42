import contextlib
import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stageflow.errors import TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.testing.transport import SCENARIOS, check_transport
from stageflow.transport.base import Interrupt, Tag
from stageflow.transport.dist import DistEndpoint
from stageflow.transport.dist.device import DevicePath


def tag(microbatch, step=0):
    return Tag(step, "F", 0, 1, microbatch)


def groups(size, n=1):
    """``n`` groups for each of ``size`` ranks, all in this process."""
    store, made = dist.HashStore(), {}

    def make(rank):
        made[rank] = [
            dist.ProcessGroupGloo(dist.PrefixStore(str(i), store), rank, size, timedelta(days=1)) for i in range(n)
        ]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


@contextlib.contextmanager
def ends(interrupts, **options):
    made = groups(len(interrupts))
    found = [DistEndpoint(made[r][0], r, len(interrupts), i, **options) for r, i in enumerate(interrupts)]
    yield tuple(found)
    closers = [threading.Thread(target=end.close) for end in found]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


def pair(switches):
    return ends([switch.interrupt for switch in switches])


@contextlib.contextmanager
def pair_with_device_path(switches):
    # The CPU plays the device here, so that every tensor takes that way.
    made = groups(2, 3)
    found = []
    for rank, switch in enumerate(switches):
        other = 1 - rank
        to, back = (made[rank][1], made[rank][2]) if rank == 0 else (made[rank][2], made[rank][1])
        path = DevicePath({other: (to, other)}, {other: (back, other)}, torch.device("cpu"))
        found.append(DistEndpoint(made[rank][0], rank, 2, switch.interrupt, path))
    yield tuple(found)
    for end in found:
        end.close()


@pytest.fixture(autouse=True)
def _nothing_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conforms(scenario):
    check_transport(pair, [scenario])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conforms_with_device_path(scenario):
    check_transport(pair_with_device_path, [scenario])


class StuckNetwork:
    """A process group over which nothing moves until it is freed; then every work fails."""

    def __init__(self):
        self._freed = threading.Event()

    def send(self, *_):
        return self

    recv = send

    def wait(self):
        self._freed.wait()
        raise RuntimeError("cable cut")

    def free(self):
        self._freed.set()


def test_send_waits_when_too_much_is_on_its_way_and_says_so():
    network = StuckNetwork()
    endpoint = DistEndpoint(network, 0, 2, backlog_bytes=100_000, patience=0.1)
    endpoint.send(1, tag(0), Bundle({"x": torch.zeros(50_000)}))  # one message is always let through
    with pytest.raises(TransferTimeout, match=r"worker 0, sending 200\d\d\d bytes to worker 1 .*for 0.1 s.*: {1: 200"):
        endpoint.send(1, tag(1), Bundle({"x": torch.zeros(50_000)}))
    with pytest.raises(TransferTimeout, match="worker 0, flush: "):
        endpoint.flush(0.05)
    network.free()
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"connection to worker 1 was lost \(cable cut\)"):
        endpoint.recv(tag(2), 10)
    assert 0.9 < time.monotonic() - started < 3  # time for somebody who knows more to speak first
    endpoint.flush(1)
    endpoint.close()


def test_sending_to_a_closed_peer_names_it():
    with ends([Interrupt()] * 2) as (first, second):
        second.close()
        deadline = time.monotonic() + 2
        while not first._lanes[1].left and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(TransportError, match="worker 0 can't send .*: worker 1 has closed its endpoint"):
            first.send(1, tag(0), Bundle())
        with pytest.raises(TransferTimeout, match="Workers closed: 1."):
            first.recv(tag(0), 0.01)


def test_descriptors_come_back():
    with ends([Interrupt()] * 2):
        pass
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with ends([Interrupt()] * 2) as (first, second):
            first.send(1, tag(0), Bundle({"x": torch.ones(10_000)}))
            second.recv(tag(0), 5)
    del first, second
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before

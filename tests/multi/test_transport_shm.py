"""Shared memory between real processes. This file is also the program those run: ``python FILE ROLE HANDLES FDS``."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from stageflow.errors import TransportError
from stageflow.graph import Bundle
from stageflow.testing.transport import Switch, take_part
from stageflow.transport import probe
from stageflow.transport.base import Tag
from stageflow.transport.shm import ShmEndpoint, ShmHub

ARENA = 4 << 20


def tag(microbatch, source=0, target=1, kind="F"):
    return Tag(0, kind, source, target, microbatch)


def start(hub, rank, role):
    handles, fds = hub.handles(rank)
    return subprocess.Popen(
        [sys.executable, __file__, role, json.dumps(handles), json.dumps(fds)],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finished(process, timeout=90):
    """Its standard output, once it has ended well."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def conform(endpoint, switch):
    take_part(endpoint, switch)


def test_conforms_between_processes():
    with ShmHub.create(2, ARENA) as hub:
        processes = [start(hub, rank, "conform") for rank in range(2)]
        for process in processes:
            finished(process)


def exchange(endpoint, switch):
    """Both ends send what a seed says, hold what they get for a while, and check every byte."""
    me, other = endpoint.rank, 1 - endpoint.rank
    mine, theirs = random.Random(me), random.Random(other)
    held = []
    for i in range(400):
        size = int(2 ** mine.uniform(0, 21))
        endpoint.send(other, tag(i, me, other), Bundle({"x": torch.full((size,), i % 251, dtype=torch.uint8)}, size))
        got = endpoint.recv(tag(i, other, me), 30)
        held.append((i, got.tensors["x"]))
        assert got.meta == len(got.tensors["x"]) == int(2 ** theirs.uniform(0, 21))
        while len(held) > 1 and (len(held) > 20 or i % 3):
            number, x = held.pop(len(held) * (i % 7) // 7)
            assert bool((x == number % 251).all())
            x.fill_(255)
    endpoint.flush(30)


def test_random_sizes_both_ways():
    with ShmHub.create(2, 1 << 20) as hub:
        processes = [start(hub, rank, "exchange") for rank in range(2)]
        for process in processes:
            finished(process)


def compute_after_sending(endpoint, switch):
    x = torch.ones(ARENA, dtype=torch.uint8)
    for i in range(6):
        endpoint.send(1, tag(i), Bundle({"x": x * i}))
    a = torch.rand(256, 256)
    deadline = time.monotonic() + 20
    while not switch.stopped() and time.monotonic() < deadline:
        a = (a @ a).softmax(0)
    print("computed until told" if switch.stopped() else "ran out of time")


def test_what_had_no_room_follows_while_the_sender_computes():
    with ShmHub.create(2, ARENA) as hub:
        process = start(hub, 0, "compute_after_sending")
        endpoint = hub.attach(1)
        for i in range(6):
            assert bool((endpoint.recv(tag(i), 30).tensors["x"] == i).all())
        process.send_signal(signal.SIGUSR1)
        assert finished(process) == "computed until told\n"
        endpoint.close()


def sleep(endpoint, switch):
    endpoint.send(0, tag(0, 1, 0), Bundle({}, os.getpid()))
    time.sleep(60)


def test_a_killed_peer_is_named():
    with ShmHub.create(2, ARENA) as hub:
        process = start(hub, 1, "sleep")
        endpoint = hub.attach(0)
        pid = endpoint.recv(tag(0, 1, 0), 30).meta
        threading.Timer(0.3, process.kill).start()
        started = time.monotonic()
        with pytest.raises(TransportError, match=rf"worker 0 can't go on: worker 1 \(process {pid}\) ended without"):
            endpoint.recv(tag(1, 1, 0), 30)
        assert time.monotonic() - started < 2.3
        with pytest.raises(TransportError, match="can't send"):
            endpoint.send(1, tag(0), Bundle())
        endpoint.close()
        process.communicate()


def flood(endpoint, switch):
    x = torch.ones(3 * ARENA, dtype=torch.uint8)
    for i in range(1000):
        endpoint.send(0, tag(i, 1, 0), Bundle({"x": x}))


def receive_all(endpoint, numbers):
    for i in numbers:
        endpoint.recv(tag(i, 1, 0), 30)


def test_a_peer_killed_in_the_middle_of_a_message():
    with ShmHub.create(2, ARENA, backlog_bytes=2 * ARENA) as hub:
        process = start(hub, 1, "flood")
        endpoint = hub.attach(0)
        for i in range(3):
            assert len(endpoint.recv(tag(i, 1, 0), 30).tensors["x"]) == 3 * ARENA
        process.kill()
        with pytest.raises(TransportError, match="ended without closing"):
            receive_all(endpoint, range(3, 1000))
        endpoint.close()
        process.communicate()


def leave(endpoint, switch):
    endpoint.send(0, tag(0, 1, 0), Bundle({"x": torch.arange(100_000)}))


def test_messages_of_a_peer_that_has_left_are_still_there():
    with ShmHub.create(2, ARENA) as hub:
        finished(start(hub, 1, "leave"))
        endpoint = hub.attach(0)
        assert torch.equal(endpoint.recv(tag(0, 1, 0), 1).tensors["x"], torch.arange(100_000))
        endpoint.close()


def test_probe_measures():
    samples = probe.probe_shared_memory(sizes=(64, 1 << 18), rounds=20)
    assert [s.size for s in samples] == [64, 1 << 18]
    assert all(0 < s.fast <= s.seconds <= s.slow < 1 for s in samples)
    assert samples[1].bandwidth == samples[1].size / samples[1].seconds


def test_probe_passes_on_what_its_helper_says(monkeypatch):
    monkeypatch.setattr(probe, "__name__", "stageflow.no_such_module")
    monkeypatch.setattr(probe, "TIMEOUT", 1.0)
    with pytest.raises(TransportError, match="no_such_module"):
        probe.probe_shared_memory(sizes=(64,), rounds=1)


class SignalSwitch(Switch):
    """Notes SIGUSR1, for processes that are told to stop from outside."""

    def __init__(self):
        super().__init__()
        self._stopped = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._stopped.set())

    def stopped(self):
        return self._stopped.is_set()


def main():
    torch.set_num_threads(1)
    switch = SignalSwitch()
    endpoint = ShmEndpoint.attach(json.loads(sys.argv[2]), json.loads(sys.argv[3]), switch.interrupt)
    globals()[sys.argv[1]](endpoint, switch)
    endpoint.close()
    switch.close()


if __name__ == "__main__":
    main()

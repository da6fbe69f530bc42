"""torch.distributed between real processes. This file is also the program those run: ``python FILE ROLE``."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from stageflow.errors import LaunchError, TransportError
from stageflow.graph import Bundle
from stageflow.testing.transport import Switch, take_part
from stageflow.transport.base import Tag
from stageflow.transport.dist import DistEndpoint


def tag(microbatch, source=0, target=1, kind="F"):
    return Tag(0, kind, source, target, microbatch)


def run(role, size, expected=0):
    """Output of each rank, once all have ended, all but those killed with exit code 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, role],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "WORLD_SIZE": str(size)},
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, said, strict=True):
        assert process.returncode in (0, -expected), err
    return [out for out, _ in said]


def own_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("stageflow")]


def conform():
    switch = Switch()
    endpoint = DistEndpoint.create(interrupt=switch.interrupt)
    take_part(endpoint, switch)
    endpoint.close()
    assert not own_threads()
    two_pipelines()


def two_pipelines():
    first, second = DistEndpoint.create(), DistEndpoint.create()
    peer = 1 - first.rank
    for i, endpoint in enumerate((first, second)):
        endpoint.send(peer, tag(0, first.rank, peer), Bundle({"x": torch.full((5000,), float(i))}))
    for i, endpoint in reversed(list(enumerate((first, second)))):
        assert float(endpoint.recv(tag(0, peer, first.rank), 30).tensors["x"][-1]) == i
    first.close()
    second.send(peer, tag(1, first.rank, peer), Bundle())
    second.recv(tag(1, peer, first.rank), 30)
    second.close()


def test_conforms_between_processes_and_two_endpoints_are_independent():
    run("conform", 2)


def fail():
    """Rank 1 is killed; the others print how long each took to end its wait."""
    endpoint = DistEndpoint.create()
    meet(endpoint, 0)
    sys.stdout.flush()
    if endpoint.rank == 1:
        for peer in (0, 2):  # nobody may still be meeting when this process is gone
            endpoint.recv(tag(2, peer, 1, "ready"), 30)
        os.kill(os.getpid(), signal.SIGKILL)
    endpoint.send(1, tag(2, endpoint.rank, 1, "ready"), Bundle())
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"can't go on: the connection to worker 1 was lost \(.*\)"):
        endpoint.recv(tag(5), 30)
    print(time.monotonic() - started)
    endpoint.close()
    assert not own_threads()
    sys.stdout.flush()
    os._exit(0)  # the program's own process group can't be taken down in order any more


def meet(endpoint, number):
    peers = [peer for peer in range(endpoint.size) if peer != endpoint.rank]
    for peer in peers:
        endpoint.send(peer, tag(number, endpoint.rank, peer, "meet"), Bundle())
    for peer in peers:
        endpoint.recv(tag(number, peer, endpoint.rank, "meet"), 30)


def test_a_killed_peer_ends_all_waits_within_two_seconds():
    for attempt in (1, 2, 3):  # three processes on two cores that others use too: not every try is in time
        try:
            outputs = [[float(x) for x in out.split()] for out in run("fail", 3, expected=signal.SIGKILL)]
            assert [len(out) for out in outputs] == [1, 0, 1]
            assert all(x < 2 for out in outputs for x in out)
            break
        except AssertionError:
            if attempt == 3:
                raise


def test_without_torchrun_the_error_says_what_to_do():
    with pytest.raises(LaunchError, match="start the script with torchrun"):
        DistEndpoint.create()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()

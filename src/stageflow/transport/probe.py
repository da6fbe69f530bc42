"""How fast messages move between two workers.

    for sample in probe_shared_memory():
        print(sample.size, sample.seconds)

Measured by sending a tensor there and back; the other side sends back the very tensor it received, so everything that
arrives is also read. One way is half of that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from stageflow.errors import TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Tag
from stageflow.transport.shm import ShmEndpoint, ShmHub

SIZES = (64, 256 << 10, 1 << 20)
_END_WITHIN = 5.0  # seconds that the helper gets to end by itself
TIMEOUT = 30.0
_PING, _PONG = "ping", "pong"


@dataclass(frozen=True)
class Sample:
    """One way from worker to worker.

    size: bytes of the tensor. seconds: median time from `send` to the end of `recv`. fast, slow: 10th and 90th
    percentile, in seconds too.
    """

    size: int
    seconds: float
    fast: float
    slow: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


def measure_link(
    endpoint: Endpoint, peer: int, sizes: Sequence[int] = SIZES, rounds: int = 200, step: int = 0
) -> list[Sample]:
    """Measure from this end, while the peer runs `answer`.

    sizes: bytes of the tensors. rounds: how often each is sent. step: of the tags, so that they are nobody else's.
    """
    samples, count = [], 0
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(rounds + rounds // 10):
            started = time.perf_counter()
            endpoint.send(peer, Tag(step, _PING, endpoint.rank, peer, count), Bundle({"x": x}))
            back = endpoint.recv(Tag(step, _PONG, peer, endpoint.rank, count), TIMEOUT)
            times.append((time.perf_counter() - started) / 2)
            del back  # so that its memory can be used again
            count += 1
        samples.append(summary(size, times[rounds // 10 :]))
    endpoint.send(peer, Tag(step, _PING, endpoint.rank, peer, count), Bundle({}, "end"))
    return samples


def summary(size: int, times: Sequence[float]) -> Sample:
    """The sample of measured one-way times, in seconds."""
    tenths = statistics.quantiles(times, n=10)
    return Sample(size, statistics.median(times), tenths[0], tenths[-1])


def answer(endpoint: Endpoint, peer: int, step: int = 0) -> None:
    """Send back what the peer sends in `measure_link`, until it is done."""
    count = 0
    while True:
        bundle = endpoint.recv(Tag(step, _PING, peer, endpoint.rank, count), TIMEOUT)
        if bundle.meta == "end":
            return
        endpoint.send(peer, Tag(step, _PONG, endpoint.rank, peer, count), bundle)
        count += 1
        del bundle


def probe_shared_memory(sizes: Sequence[int] = SIZES, rounds: int = 200) -> list[Sample]:
    """Measure shared memory between this process and one that is started for it.

    Takes some seconds, most of them to start that process. Raises TransportError if it does not answer.
    """
    with ShmHub.create(2) as hub:
        handles, fds = hub.handles(1)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, json.dumps(handles), json.dumps(fds)]
        helper = subprocess.Popen(command, pass_fds=fds, env=environment, stderr=subprocess.PIPE)
        try:
            with closing(hub.attach(0)) as endpoint:
                return measure_link(endpoint, 1, sizes, rounds)
        except TransportError as problem:
            helper.kill()
            said = helper.communicate()[1].decode(errors="replace")[-1000:]
            raise TransportError(f"{problem} The helper process said: {said or 'nothing'}") from problem
        finally:
            _end(helper)


def _end(helper: subprocess.Popen[bytes]) -> None:
    """Wait for a helper that has been told to end, but not for ever."""
    try:
        helper.communicate(timeout=_END_WITHIN)  # reads on: one that has much to say would wait for that
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.communicate()


def main() -> None:
    """The helper's part: ``python -m stageflow.transport.probe HANDLES DESCRIPTORS``, both as JSON."""
    torch.set_num_threads(1)
    endpoint = ShmEndpoint.attach(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
    answer(endpoint, 0)
    endpoint.close()


if __name__ == "__main__":
    main()

"""How long does a tensor take from one process to another? Shared memory and torch.distributed endpoints against gloo.

A tensor goes there and back between two processes; one way is half of that. The other side sends back the very tensor
it received, so all bytes are written once and read once at each end. Contestants take turns within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Tag
from stageflow.transport.dist import DistEndpoint
from stageflow.transport.probe import Sample, summary
from stageflow.transport.shm import ShmEndpoint, ShmHub

SIZES = {"64 B": 64, "4 KiB": 4 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
AIMS = {"64 B": "<= 40 us", "256 KiB": ">= 4 GB/s", "1 MiB": ">= 6 GB/s"}
PEER, SHM, DIST = "gloo (torch.distributed.send/recv)", "stageflow shared memory", "stageflow over gloo"
WARM_UP = 5
TIMEOUT = 60.0

Trip = Callable[[int, int], float]  # (bytes, number) -> seconds; one trip there and back


def endpoint_trip(endpoint: Endpoint, step: int) -> Trip:
    me, other = endpoint.rank, 1 - endpoint.rank

    def there_and_back(size: int, number: int) -> float:
        if me == 1:
            endpoint.send(0, Tag(step, "B", 1, 0, number), endpoint.recv(Tag(step, "F", 0, 1, number), TIMEOUT))
            return 0.0
        bundle = Bundle({"x": tensor(size)})
        started = time.perf_counter()
        endpoint.send(other, Tag(step, "F", 0, 1, number), bundle)
        endpoint.recv(Tag(step, "B", 1, 0, number), TIMEOUT)
        return time.perf_counter() - started

    return there_and_back


def gloo_trip(rank: int) -> Trip:
    buffers: dict[int, torch.Tensor] = {}

    def there_and_back(size: int, number: int) -> float:
        into = buffers.setdefault(size, torch.empty(size, dtype=torch.uint8))  # gloo receives in place: no allocation
        if rank == 1:
            dist.recv(into, 0)
            dist.send(into, 0)
            return 0.0
        x = tensor(size)
        started = time.perf_counter()
        dist.send(x, 1)
        dist.recv(into, 1)
        return time.perf_counter() - started

    return there_and_back


_tensors: dict[int, torch.Tensor] = {}


def tensor(size: int) -> torch.Tensor:
    if size not in _tensors:
        _tensors[size] = torch.randint(0, 255, (size,), dtype=torch.uint8)
    return _tensors[size]


def play(rank: int, shm: ShmEndpoint, rendezvous: str, rounds: int, seconds: float) -> dict[str, dict[str, Sample]]:
    """One side of the whole benchmark; only rank 0's result means something."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    over_gloo = DistEndpoint.create()
    contestants = {PEER: gloo_trip(rank), SHM: endpoint_trip(shm, 0), DIST: endpoint_trip(over_gloo, 0)}
    times: dict[str, dict[str, list[float]]] = {c: {s: [] for s in SIZES} for c in contestants}
    number = 0
    for _ in range(rounds):
        for label, size in SIZES.items():
            trips = max(8, min(100, int(seconds * 1e9 / (size + 200_000))))
            for contestant, trip in contestants.items():
                for i in range(WARM_UP + trips):
                    took = trip(size, number)
                    number += 1
                    if i >= WARM_UP:
                        times[contestant][label].append(took / 2)
    over_gloo.close()
    shm.close()
    dist.destroy_process_group()
    return {c: {s: summary(SIZES[s], t) for s, t in by_size.items()} for c, by_size in times.items()}


def run(rounds: int, seconds: float) -> dict[str, dict[str, Sample]]:
    with ShmHub.create(2) as hub, tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        handles, fds = hub.handles(1)
        plan = json.dumps([handles, fds, rendezvous, rounds, seconds])
        helper = subprocess.Popen([sys.executable, __file__, "--helper", plan], pass_fds=fds)
        try:
            results = play(0, hub.attach(0), rendezvous, rounds, seconds)
            helper.wait(60)
        finally:
            helper.kill()
            helper.wait()
    return results


def environment() -> dict[str, str]:
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "unknown")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{model}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load before and after": "",
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def table(results: dict[str, dict[str, Sample]]) -> str:
    rows = ["| one way, median (10th to 90th percentile) | " + " | ".join(results) + " | aim |"]
    rows.append("|---|" + "---|" * (len(results) + 1))
    for label in SIZES:
        cells = []
        for by_size in results.values():
            s = by_size[label]
            speed = f", {s.bandwidth / 1e9:.2f} GB/s" if s.size > 10_000 else ""
            cells.append(f"{s.seconds * 1e6:.0f} us ({s.fast * 1e6:.0f} to {s.slow * 1e6:.0f}){speed}")
        rows.append(f"| {label} | " + " | ".join(cells) + f" | {AIMS.get(label, '')} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often all contestants take their turn")
    parser.add_argument("--seconds", type=float, default=0.03, help="about how long one turn lasts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--helper", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.helper:
        handles, fds, rendezvous, rounds, seconds = json.loads(options.helper)
        play(1, ShmEndpoint.attach(handles, fds), rendezvous, rounds, seconds)
        return
    found = environment()
    before = os.getloadavg()[0]
    results = run(options.rounds, options.seconds)
    found["load before and after"] = f"{before:.2f}, {os.getloadavg()[0]:.2f} (one-minute averages)"
    if options.json:
        samples = {c: {s: vars(x) for s, x in by_size.items()} for c, by_size in results.items()}
        print(json.dumps({"environment": found, "results": samples}, indent=2))
        return
    print(table(results), *(f"{key}: {value}" for key, value in found.items()), sep="\n")


if __name__ == "__main__":
    main()

"""Does harm to a training run at random moments, a hundred times, and looks whether it ends as if nothing had happened.

    this process                                             driver (the script that would be the user's)
    ─────────────                                            ──────
    picks a harm, a victim and a moment      ──────────►     Pipeline.fit, two workers
    waits until the run tells of it          ◄──────────     journal: one JSON line for each event
    starts the driver again if that was the victim

Afterwards the same number of steps is made in peace, and all weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import environment, parser, publish, say, table

import stageflow as sf
from stageflow.checkpoint import load_weights
from stageflow.errors import InputError
from stageflow.launch.trace import trace_process
from stageflow.testing.leaks import descendants
from stageflow.train.callbacks import Callback, FitReport, Restart, Run

WIDTH = 64
EVERY = 5
HANG = 3.0  # seconds after which workers count as hung
PATIENCE = 90.0  # seconds in which the run must tell of a harm
HARMS = {
    "SIGKILL, worker": 30,
    "SIGSTOP, worker": 15,
    "exception": 20,
    "allocation that fails": 10,
    "full disk": 10,
    "SIGKILL, process that starts workers": 5,
    "SIGKILL, driver": 10,
}
"""How many of a hundred."""


class Fault(nn.Module):
    """Raises in its forward, once, when a file says so."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for name, fail in (("exception", _raise), ("allocation", _allocate)):
                flag = self.folder / name
                if flag.exists():
                    flag.unlink()
                    fail()
        return x


def _raise() -> None:
    raise ValueError("out of luck")


def _allocate() -> None:
    torch.empty(1 << 60)


def pipeline(folder: str, launch: Any) -> sf.Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks[:2], Fault(folder), *blocks[2:], Fault(folder), nn.Linear(WIDTH, 1))
    return sf.Pipeline(
        model,
        stages=2,
        microbatches=4,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        balance="parameters",
        boundaries=["3"],
        launch=launch,
        timeout=HANG,
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, WIDTH)
    return x, x.sum(1, keepdim=True)


# ------------------------------------------------------------------------------------------------------- the driver


class Journal(Callback):
    """Tells what happens, a JSON line each; ends the run when a file says so."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / "journal", "a", buffering=1)  # noqa: SIM115
        self._enough = folder / "enough"
        self._failed_saves = 0

    def _tell(self, what: str, **more: Any) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        self._file.write(json.dumps({"what": what, "time": time.time(), "descriptors": descriptors, **more}) + "\n")

    def on_start(self, run: Run) -> None:
        self._tell("start", step=run.step, resumed=run.report.resumed_from)

    def on_step(self, run: Run) -> None:
        for text in run.report.failed_saves[self._failed_saves :]:
            self._tell("failed save", text=text)
        self._failed_saves = len(run.report.failed_saves)
        if self._enough.exists():
            run.stop()

    def on_restart(self, run: Run, restart: Restart) -> None:
        self._tell("restart", **vars(restart))

    def on_end(self, run: Run) -> None:
        self._tell("end", step=run.step, saved=run.report.saved[-1:])


def drive(folder: Path) -> FitReport:
    """The run itself."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with pipeline(str(folder), "processes") as pipe:
        return pipe.fit(
            batch,
            10**9,
            checkpoint=folder / "run",
            checkpoint_every=EVERY,
            max_restarts=1000,
            callbacks=[Journal(folder)],
        )


# ------------------------------------------------------------------------------------------------------- the harm


class Target:
    """The run, seen from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._read = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "--drive", str(self.folder)]
        self.process = subprocess.Popen(command, stderr=open(self.folder / "log", "a"))  # noqa: SIM115

    def news(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        journal = self.folder / "journal"
        text = journal.read_text() if journal.exists() else ""
        lines = text[self._read :].splitlines(keepends=True)
        lines = [line for line in lines if line.endswith("\n")]
        self._read += sum(map(len, lines))
        fresh = [json.loads(line) for line in lines]
        self.events += fresh
        return fresh

    def wait_for(self, *kinds: str) -> dict[str, Any] | None:
        """The next event of these kinds; None if none came in time, or the driver ended by itself."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            for event in self.news():
                if event["what"] in kinds:
                    return event
            if ended:
                return None
            time.sleep(0.005)
        return None

    def workers(self) -> list[int]:
        """Their process ids, once all run."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                (group,) = trace_process(self.process.pid, stacks=False)
                if all(one.status.alive for one in group):
                    return [one.status.pid for one in group]
            except (InputError, ValueError, OSError):  # between two groups
                pass
            time.sleep(0.005)
        raise SystemExit("the run has no workers any more; see its log")


def do(harm: str, target: Target, chance: random.Random) -> tuple[bool, bool, float]:
    """One harm; (found and named, recovered, seconds until the run knew)."""
    pids = target.workers()
    rank = chance.randrange(len(pids))
    target.news()
    start = time.time()
    expected: Callable[[dict[str, Any]], bool]
    match harm:
        case "SIGKILL, worker":
            os.kill(pids[rank], signal.SIGKILL)
            expected = lambda told: told["error"] == "WorkerDied" and told["worker"] == rank  # noqa: E731
        case "SIGSTOP, worker":
            os.kill(pids[rank], signal.SIGSTOP)
            expected = lambda told: told["error"] == "WorkerHung" and told["worker"] == rank  # noqa: E731
        case "exception" | "allocation that fails":
            (target.folder / harm.split()[0]).touch()
            expected = lambda told: told["error"] == "StageFailed" and told["stage"] is not None  # noqa: E731
        case "full disk":
            return fill_disk(target, pids[rank])
        case "SIGKILL, process that starts workers":
            os.kill(_parent(pids[rank]), signal.SIGKILL)
            expected = lambda told: told["error"] == "WorkerDied"  # noqa: E731
        case _:
            target.process.kill()
            target.process.wait()
            target.start()
            told = target.wait_for("start")
            return told is not None, told is not None and told["resumed"] is not None, 0.0
    told = target.wait_for("restart")
    if told is None:
        return False, False, 0.0
    return expected(told), True, told["time"] - told["seconds"] - start


def fill_disk(target: Target, pid: int) -> tuple[bool, bool, float]:
    """No file of this worker may grow beyond some bytes, until a save has failed by it."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    told = target.wait_for("failed save", "restart")
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ProcessLookupError:
        return False, True, 0.0
    named = told is not None and told["what"] == "failed save" and "too large" in told["text"]
    return named, told is not None, 0.0


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def deal(rounds: int, chance: random.Random) -> list[str]:
    """So many harms, in the proportions of `HARMS`, shuffled."""
    hundred = [harm for harm, count in HARMS.items() for _ in range(count)]
    dealt: list[str] = []
    while len(dealt) < rounds:
        chance.shuffle(hundred)
        dealt += hundred
    return dealt[:rounds]


# ------------------------------------------------------------------------------------------------------- the verdict


def measure(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """The whole experiment."""
    chance = random.Random(seed)
    shared_memory = set(os.listdir("/dev/shm"))
    target = Target(folder)
    done: Counter[str] = Counter()
    named: Counter[str] = Counter()
    recovered: Counter[str] = Counter()
    delays: dict[str, list[float]] = {harm: [] for harm in HARMS}
    if target.wait_for("start") is None:
        raise SystemExit(f"the run did not start: {(folder / 'log').read_text()}")
    for number, harm in enumerate(deal(rounds, chance), 1):
        time.sleep(chance.uniform(0.0, 1.0))
        found, goes_on, delay = do(harm, target, chance)
        done[harm] += 1
        named[harm] += found
        recovered[harm] += goes_on
        delays[harm].append(delay)
        say(f"{number}/{rounds} {harm}: {'named' if found else 'NOT NAMED'}, {'goes on' if goes_on else 'LOST'}")
        if not goes_on:
            break
    (folder / "enough").touch()
    end = target.wait_for("end")
    code = target.process.wait(PATIENCE)
    steps = 0 if end is None else end["step"]
    leaked = leavings(folder, target, shared_memory)
    return {
        "harms": {
            harm: {
                "done": done[harm],
                "named": named[harm],
                "recovered": recovered[harm],
                "slowest": max(delays[harm], default=0.0),
            }
            for harm in HARMS
        },
        "steps": steps,
        "exit": code,
        "equal": end is not None and equal(folder, steps),
        "leaked": leaked,
        "recovery": recovery_times(target.events),
    }


def recovery_times(events: list[dict[str, Any]]) -> list[float]:
    return sorted(event["seconds"] for event in events if event["what"] == "restart")


def leavings(folder: Path, target: Target, shared_memory: set[str]) -> list[str]:
    found = [f"process {pid}" for pid in descendants(os.getpid())]
    found += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - shared_memory]
    found += [f"file {path.name}" for path in (folder / "run").glob(".*")]
    counts = [event["descriptors"] for event in lives(target.events)[-1] if event["what"] == "restart"]
    if counts and counts[-1] > counts[0]:
        found.append(f"{counts[-1] - counts[0]} descriptors of the driver over {len(counts)} restarts")
    return found


def lives(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events of each driver process."""
    found: list[list[dict[str, Any]]] = []
    for event in events:
        if event["what"] == "start":
            found.append([])
        found[-1].append(event)
    return found


def equal(folder: Path, steps: int) -> bool:
    """Whether the weights are those of so many steps in peace."""
    say(f"the same {steps} steps in peace")
    with tempfile.TemporaryDirectory() as nowhere, pipeline(nowhere, "threads") as pipe:
        pipe.fit(batch, steps)
        expected = pipe.state_dict()
    found = load_weights(folder / "run")
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def rows(results: dict[str, Any]) -> Iterator[list[str]]:
    for harm, found in results["harms"].items():
        slowest = f"{found['slowest']:.2f}" if found["slowest"] else ""
        yield [harm, str(found["done"]), str(found["named"]), str(found["recovered"]), slowest]
    total = [sum(found[key] for found in results["harms"].values()) for key in ("done", "named", "recovered")]
    yield ["all", *map(str, total), ""]


def tell(results: dict[str, Any]) -> str:
    head = ["harm", "done", "found and named", "recovered", "slowest to be found, s"]
    lines = [table(head, list(rows(results))), ""]
    times = results["recovery"]
    if times:
        middle, most = times[len(times) // 2], times[-1]
        lines.append(f"From knowing of a failure to going on: median {middle:.2f} s, most {most:.2f} s.")
    same = "equal bit for bit to" if results["equal"] else "NOT EQUAL to"
    lines.append(f"Weights after {results['steps']} steps: {same} those of an undisturbed run.")
    lines.append(f"Left behind: {', '.join(results['leaked']) or 'nothing'}.")
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__, rounds=100)
    made.add_argument("--seed", type=int, default=0, help="of harms, victims and moments")
    made.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.drive is not None:
        drive(options.drive)
        return 0
    found = environment()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.rounds, options.seed, Path(folder))
        if results["exit"] != 0:
            print((Path(folder) / "log").read_text()[-5000:], file=sys.stderr)
    publish(options, __file__, found, results, tell(results))
    total = [sum(one[key] for one in results["harms"].values()) for key in ("done", "named", "recovered")]
    good = results["equal"] and not results["leaked"] and total == [options.rounds] * 3
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Ranks without a driver: all return or all raise."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import json, os, signal, sys, time
from stageflow.errors import *
from stageflow.graph import Bundle
from stageflow.launch.torchrun import join_torchrun
from stageflow.transport.base import Tag

def report(**facts):
    with open(os.path.join(sys.argv[1], str(group.rank)), "a") as file:
        print(json.dumps(facts), file=file)

def attempt(function, timeout=10):
    began = time.monotonic()
    try:
        return report(result=group.run(function, timeout=timeout))
    except StageflowError as error:
        cause = error.__cause__
        report(
            error=type(error).__name__, text=str(error), cause=type(cause).__name__,
            notes="".join(getattr(cause, "__notes__", [])), usable=group.usable, taken=time.monotonic() - began,
        )

def receive_for_ever():
    return group.context.endpoint().recv(Tag(1, "F", 0, group.rank, 0), 60.0)

group = join_torchrun("cpu")
"""


def write(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(text))
    (tmp_path / "out").mkdir()
    return script


def facts(tmp_path, rank):
    path = tmp_path / "out" / str(rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def torchrun(tmp_path, text, ranks):
    script = write(tmp_path, text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, tmp_path / "out"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [facts(tmp_path, rank) for rank in range(ranks)]


@pytest.fixture
def ranks(tmp_path):
    """Starts a script as two ranks with nobody who would end one because the other died."""
    processes = []

    def start(text):
        script = write(tmp_path, text)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
            with open(tmp_path / f"err{rank}", "wb") as err:
                processes.append(subprocess.Popen([sys.executable, script, tmp_path / "out"], env=env, stderr=err))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_results_failures_and_use_afterwards(tmp_path):
    outcomes = torchrun(
        tmp_path,
        """
        attempt(lambda: group.rank * 10)

        def one_raises():
            if group.rank == 1:
                time.sleep(0.2)
                group.context.board.set("1B3")
                raise ValueError("boom")
            receive_for_ever()
        attempt(one_raises)
        attempt(lambda: group.all_gather_object(group.rank))

        def one_raises_after_the_others_are_through():
            if group.rank == 0:
                time.sleep(0.3)
                raise KeyError("late")
        attempt(one_raises_after_the_others_are_through)
        attempt(lambda: group.check_same({"digest": group.rank // 2, "schedule": "1f1b"}))

        def message():
            door = group.context.endpoint()
            door.send((group.rank + 1) % 3, Tag(2, "F", group.rank, (group.rank + 1) % 3, 0), Bundle(meta=group.rank))
            before = (group.rank - 1) % 3
            return door.recv(Tag(2, "F", before, group.rank, 0), 10.0).meta
        attempt(message)

        def hang():
            if group.rank == 1:
                group.context.board.set("1F2")
                time.sleep(2.0)
        attempt(hang, timeout=1.0)
        attempt(lambda: None)
        group.close()
        group.close()
        """,
        3,
    )
    for rank, (result, raised, gathered, late, differing, message, hung, closed) in enumerate(outcomes):
        assert result == {"result": rank * 10}
        assert raised["error"] == "StageFailed"
        assert raised["text"] == "worker 1 (stage 1) raised ValueError: boom during 1B3"
        assert raised["cause"] == ("ValueError" if rank == 1 else "RemoteError")
        assert rank == 1 or "Traceback on worker 1" in raised["notes"]
        assert raised["usable"]
        assert raised["taken"] < 2.2
        assert gathered == {"result": [0, 1, 2]}
        assert (late["error"], late["cause"]) == ("StageFailed", "KeyError" if rank == 0 else "RemoteError")
        assert differing["error"] == "StageFailed"
        assert "LaunchError: the ranks do not run the same thing" in differing["text"]
        assert message == {"result": (rank - 1) % 3}
        assert hung["error"] == "WorkerHung"
        assert "worker 1: 1F2 for " in hung["text"]
        assert not hung["usable"]
        assert closed["error"] == "PipelineClosed"


def test_what_differs_is_told_with_its_ranks(ranks, tmp_path):
    for process in ranks(
        """
        try:
            group.check_same({"digest": "a", "stages": 2 + group.rank})
        except LaunchError as error:
            report(text=str(error))
        group.close()
        """
    ):
        assert process.wait(60) == 0
    for rank in range(2):
        [told] = facts(tmp_path, rank)
        assert told["text"] == "the ranks do not run the same thing:\n  stages: 2 on rank 0; 3 on rank 1"


@pytest.mark.parametrize("victim", [1, 0], ids=["other", "store-holder"])
def test_a_rank_that_dies(ranks, tmp_path, victim):
    processes = ranks(
        f"""
        def work():
            if group.rank == {victim}:
                os.kill(os.getpid(), signal.SIGKILL)
            receive_for_ever()
        attempt(work)
        """
    )
    assert processes[victim].wait(60) == -signal.SIGKILL
    processes[1 - victim].wait(20)
    [told] = facts(tmp_path, 1 - victim)
    assert told["error"] == "WorkerDied", told
    assert told["text"].startswith(f"worker {victim} gave no answer any more")
    assert told["taken"] < 3.0  # 1 s of which is the connection's own grace

"""Worker processes: how they start, how they die, and what they leave."""

import importlib
import os
import signal
import sys
import threading
import time

import pytest
from launch_services import Runner, Service, crashed, exited, killed

from stageflow.errors import LaunchError, StageFailed, WorkerDied, WorkerHung
from stageflow.launch.processes import start_processes
from stageflow.launch.server import keep_warm
from stageflow.testing.leaks import descendants


@pytest.fixture(scope="module")
def group_of_two():
    with start_processes(Service, 2) as group:
        yield group


def run(group, function):
    """What function() gives in each worker."""
    return group.call("run", common=(function,), timeout=20)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (killed, r"worker 2 \(stage 5\) died of signal 9 \(SIGKILL\) during 5B3; the group is closed"),
        (exited, r"worker 2 \(stage 5\) exited with code 3 during 5B3"),
        (crashed, r"(?s)worker 2 \(stage 5\) died of signal 11 \(SIGSEGV\) during 5B3.*Fatal Python error.* in die"),
    ],
)
def test_a_worker_that_dies_is_named(how, message):
    group = start_processes(Runner, 3)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=message) as caught:
        group.call("die", common=(2, how), timeout=10)
    assert time.monotonic() - began < 2.0
    assert (caught.value.worker, caught.value.stage, caught.value.microbatch) == (2, 5, 3)
    assert not group.usable


def test_a_worker_killed_from_outside_in_the_middle_of_computing():
    group = start_processes(Service, 2)
    running = group.cast("hang", common=(30.0,), timeout=20)
    while group.status()[1].action != "1F0":
        time.sleep(0.01)
    os.kill(group.status()[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker 1 .*SIGKILL.* during 1F0"):
        running.results()


def test_a_worker_killed_between_two_calls():
    group = start_processes(Service, 2)
    os.kill(group.status()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker 0 died of signal 9 .* during idle"):
        group.call("wait", timeout=20)


def test_a_worker_that_dies_while_starting():
    def factory(ctx):
        os._exit(7)

    with pytest.raises(WorkerDied, match=r"worker [01] exited with code 7 during its start"):
        start_processes(factory, 2)


def test_a_stopped_process_is_a_hang():
    group = start_processes(Service, 2)
    os.kill(group.status()[1].pid, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="no worker made progress for 0.5 s"):
        group.call("echo", common=(bytes(3_000_000),), timeout=0.5)


def facts():
    import torch

    return os.getcwd(), os.environ.get("FLAVOUR"), torch.get_num_threads(), threading.active_count(), sys.path


def test_a_worker_sees_the_drivers_folder_environment_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAVOUR", "driver")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_here.py").write_text("VALUE = 5\n")
    with start_processes(Runner, 1) as group:
        [(cwd, flavour, threads, active, path)] = run(group, facts)
        assert (cwd, flavour, threads, active) == (str(tmp_path), "driver", 1, 1)
        assert path[0] == str(tmp_path)
        assert run(group, lambda: importlib.import_module("only_here").VALUE) == [5]
    with start_processes(Runner, 1, env={"FLAVOUR": "own"}, threads=2) as group:
        assert run(group, facts)[0][1:3] == ("own", 2)


def test_the_server_runs_one_thread_so_that_forking_it_is_safe():
    with start_processes(Runner, 1) as group:
        [server] = run(group, os.getppid)
        assert len(os.listdir(f"/proc/{server}/task")) == 1


def test_workers_and_server_are_the_only_processes():
    with start_processes(Runner, 2) as group:
        [server] = set(run(group, os.getppid))
        pids = {status.pid for status in group.status()}
        assert set(descendants(os.getpid())) >= pids | {server}
        assert set(descendants(server)) == pids


def test_workers_hold_only_their_own_descriptors():
    with start_processes(Runner, 3) as group:
        counts = run(group, lambda: len(os.listdir("/proc/self/fd")))
        assert len(set(counts)) == 1
    with start_processes(Runner, 1), start_processes(Runner, 3) as second:
        assert run(second, lambda: len(os.listdir("/proc/self/fd"))) == counts


def test_what_a_worker_prints_goes_where_the_drivers_output_goes(capfd):
    with start_processes(Runner, 1) as group:
        run(group, lambda: print("hello from a worker"))
        assert "hello from a worker" in capfd.readouterr().out


def test_preloaded_modules_are_there_before_the_fork(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("import os\nPID = os.getpid()\n")
    with keep_warm(preload=["slow_to_import", "no_such_module"]), start_processes(Runner, 2) as group:
        pids = run(group, lambda: sys.modules["slow_to_import"].PID)
        assert set(pids) == set(run(group, os.getppid))


def test_what_cannot_travel_is_refused_by_name(group_of_two):
    lock = threading.Lock()

    with pytest.raises(LaunchError, match="factory.<variable lock> can't travel to another process: _thread.lock"):
        start_processes(lambda ctx: lock, 2)
    with pytest.raises(LaunchError, match=r"echo\(per_worker\[1\]\)\[0\]\[0\] can't travel"):
        group_of_two.call("echo", [((1,), {}), ((lock,), {})], timeout=10)
    assert group_of_two.usable


def test_a_result_that_cannot_travel_is_refused_by_name():
    with start_processes(Runner, 1) as group:
        with pytest.raises(StageFailed, match=r"the result of run on worker 0\['a'\] can't travel"):
            run(group, lambda: {"a": threading.Lock()})
        assert group.usable


def test_the_remote_traceback_is_shown():
    def inner():
        raise ValueError("deep inside")

    with start_processes(Runner, 1) as group:
        with pytest.raises(StageFailed) as caught:
            run(group, inner)
        [note] = caught.value.__cause__.__notes__
        assert "Traceback on worker 0" in note
        assert "in inner" in note


def test_own_exception_classes_come_back_as_themselves():
    class Mine(Exception):
        pass

    def fail():
        raise Mine("yes")

    with start_processes(Runner, 1) as group:
        with pytest.raises(StageFailed) as caught:
            run(group, fail)
        assert type(caught.value.__cause__) is Mine


def test_large_arguments_and_results(group_of_two):
    data = os.urandom(20_000_000)
    for _, args, _ in group_of_two.call("echo", [((data,), {}), ((data[::-1],), {})], timeout=20):
        assert len(args[0]) == len(data)


def test_nested_groups():
    def nested():
        with start_processes(Service, 1) as inner:
            return inner.call("echo", timeout=20)

    with start_processes(Runner, 1) as group:
        assert run(group, nested) == [[(0, (), {})]]


def test_a_worker_starts_in_a_fraction_of_a_second():
    with start_processes(Service, 1):
        began = time.monotonic()
        with start_processes(Service, 2):
            assert time.monotonic() - began < 1.0

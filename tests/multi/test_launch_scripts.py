"""Whole programs, run as a user runs them: guard or no guard, Ctrl-C, killed."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launch_services import still_running

from stageflow.testing.leaks import descendants

SERVICE = """
import os, sys, time
from stageflow.launch.processes import start_processes

class Service:
    def __init__(self, ctx):
        self.ctx = ctx
    def pid(self):
        return os.getpid()
    def busy(self):
        x = 0
        while True:
            x += 1  # computes and never looks at its interrupt
    def wait(self):
        while True:
            self.ctx.interrupt.check()
            time.sleep(0.01)
"""


def write(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(SERVICE + textwrap.dedent(text))
    return path


def run(*command, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture
def start():
    """Starts a program in its own process group and ends it with the test."""
    started = []

    def begin(path):
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def busy_family(process):
    """Process ids of a started program's workers and their server, once the workers are busy."""
    assert process.stdout.readline() == "busy\n"
    return descendants(process.pid)


def test_a_script_without_a_main_guard(tmp_path):
    path = write(
        tmp_path,
        """
        print("script runs")
        with start_processes(Service, 2) as group:
            assert len(set(group.call("pid", timeout=20))) == 2
        print("done")
        """,
    )
    done = run(path)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["script runs", "done", ""]), done.stderr


def test_a_notebook_like_main(tmp_path):
    """Code given on standard input has no file: classes of __main__ must travel by value."""
    text = SERVICE + textwrap.dedent(
        """
        exec(compile("class Cell(Service):\\n    def where(self): return __name__, os.getpid()", "<cell>", "exec"))
        with start_processes(lambda ctx: Cell(ctx), 2) as group:
            print(group.call("where", timeout=20)[0][0])
        """
    )
    done = run("-", input=text)
    assert (done.returncode, done.stdout) == (0, "__main__\n"), done.stderr


def test_a_script_that_a_worker_imports_under_its_own_name(tmp_path):
    """Sent by reference, its classes make the worker import the script, which would start workers again."""
    path = write(
        tmp_path,
        """
        import script
        with start_processes(script.Service, 2) as group:
            print(len(group.call("pid", timeout=20)))
        """,
    )
    done = run(path, cwd=tmp_path)
    assert done.returncode == 1
    assert "only being imported" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_a_script_that_multiprocessing_spawns_again(tmp_path):
    path = write(
        tmp_path,
        """
        import multiprocessing
        with start_processes(Service, 1) as group:
            child = multiprocessing.get_context("spawn").Process(target=print)
            child.start()
            child.join()
            print("child ended with", child.exitcode)
        """,
    )
    done = run(path)
    assert done.stdout == "child ended with 1\n"
    assert "put the code that starts them under" in done.stderr.lower()


def test_a_group_that_nobody_closes_ends_with_the_program(tmp_path):
    path = write(
        tmp_path,
        """
        group = start_processes(Service, 2)
        print(*group.call("pid", timeout=20))
        """,
    )
    done = run(path, env={**os.environ, "PYTHONWARNINGS": "error"})
    assert (done.returncode, done.stderr) == (0, "")
    assert still_running(map(int, done.stdout.split())) == []


def test_ctrl_c(tmp_path, start):
    """The terminal sends SIGINT to the whole foreground process group."""
    path = write(
        tmp_path,
        """
        group = start_processes(Service, 2)
        print("busy", flush=True)
        group.call("busy", timeout=60)
        """,
    )
    process = start(path)
    family = busy_family(process)
    assert len(family) == 3
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert still_running(family) == []


def test_ctrl_c_while_the_workers_start(tmp_path, start):
    path = write(
        tmp_path,
        """
        class Slow(Service):
            def __init__(self, ctx):
                print("busy", flush=True) if ctx.rank == 1 else None
                time.sleep(60)
        start_processes(Slow, 2)
        """,
    )
    process = start(path)
    family = busy_family(process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGINT
    assert still_running(family) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_driver_takes_its_workers_along(tmp_path, start, how):
    path = write(
        tmp_path,
        """
        group = start_processes(Service, 2)
        with group.cast("busy", timeout=60) as running:
            print("busy", flush=True)
            running.results()
        """,
    )
    process = start(path)
    family = busy_family(process)
    process.send_signal(how)
    process.wait(timeout=5)
    assert still_running(family) == []


def test_a_killed_driver_whose_forked_child_lives_on(tmp_path, start):
    """A data loader's worker holds copies of all the driver's sockets: their end is never seen."""
    path = write(
        tmp_path,
        """
        group = start_processes(Service, 2)
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        with group.cast("busy", timeout=60) as running:
            print("busy", flush=True)
            running.results()
        """,
    )
    process = start(path)
    family = busy_family(process)
    [child] = [pid for pid in family if b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    process.kill()
    process.wait(timeout=5)
    assert still_running(set(family) - {child}) == []
    os.kill(child, signal.SIGKILL)


def test_a_forked_child_of_the_driver_does_not_end_its_workers(tmp_path):
    path = write(
        tmp_path,
        """
        import gc
        from stageflow.errors import PipelineClosed
        with start_processes(Service, 1) as group:
            child = os.fork()
            if child == 0:
                try:
                    group.call("pid", timeout=20)
                except PipelineClosed as error:
                    print(error, flush=True)
                group.close()
                del group
                gc.collect()
                os._exit(0)
            os.waitpid(child, 0)
            print(len(group.call("pid", timeout=20)))
        """,
    )
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"these workers belong to process \d+, of which this one was forked\n1\n", done.stdout)


def test_the_server_being_killed_ends_the_workers_and_a_new_one_can_follow(tmp_path):
    path = write(
        tmp_path,
        """
        import signal
        from stageflow.errors import WorkerDied
        from stageflow.testing.leaks import no_leaks
        with no_leaks():
            group, idle = start_processes(Service, 2), start_processes(Service, 1)
            print(*group.call("pid", timeout=20), *idle.call("pid", timeout=20))
            try:
                with group.cast("busy", timeout=20) as running:
                    os.kill(group._held.lease.server._process.pid, signal.SIGKILL)
                    running.results()
            except WorkerDied as error:
                print(error)
            with start_processes(Service, 1) as group:
                print(len(group.call("pid", timeout=20)))
            idle.close()
        """,
    )
    done = run(path)
    assert done.returncode == 0, done.stderr
    pids, error, answers = done.stdout.splitlines()
    assert error.startswith("worker 0 ended, as a child of the workers' server process, which was killed, during busy")
    assert answers == "1"
    assert still_running(map(int, pids.split())) == []


def test_a_server_that_dies_while_it_is_asked_is_named_and_the_next_start_works(tmp_path):
    script = write(
        tmp_path,
        """
        import signal, threading
        from stageflow.errors import LaunchError, WorkerDied
        from stageflow.launch.server import keep_warm
        from stageflow.testing.leaks import no_leaks

        def parent(ctx):
            return type("Parent", (), {"pid": staticmethod(os.getppid)})()

        with keep_warm():
            with start_processes(parent, 1) as group:
                [server] = group.call("pid", timeout=20)
            os.kill(server, signal.SIGSTOP)  # so that it is asked before it is seen to be dead
            threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()
            try:
                start_processes(Service, 2)
            except (LaunchError, WorkerDied) as error:
                print(type(error).__name__, error)
            with start_processes(Service, 2) as group:
                print(len(set(group.call("pid", timeout=20))))
        with no_leaks(), start_processes(Service, 1) as group:
            group.call("pid", timeout=20)
        """,
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    told, count = done.stdout.splitlines()
    assert re.match(r"LaunchError the process that starts workers died of signal 9|WorkerDied .*server process", told)
    assert count == "2"


def test_a_system_that_refuses_to_fork_is_told_as_such(tmp_path):
    (tmp_path / "forks_once.py").write_text(
        "import os\nfork, left = os.fork, [1]\n"
        "def limited():\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: raise OSError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = limited\n"
    )
    script = write(
        tmp_path,
        """
        from stageflow.errors import LaunchError
        from stageflow.testing.leaks import no_leaks
        with no_leaks():
            try:
                start_processes(Service, 2, preload=["forks_once"])
            except LaunchError as error:
                print(error)
        """,
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the system refused to start worker 1 of 2: [Errno 11] Resource temporarily")


def test_supervising_does_without_torch():
    done = run("-c", "import sys, stageflow.launch.processes, stageflow.launch.threads; print('torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr

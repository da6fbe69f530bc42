"""What threads and processes must do alike."""

import gc
import os
import threading
import time

import pytest
from launch_services import Service, Waiter, Wiring, broken_factory

from stageflow.errors import (
    Aborted,
    InputError,
    LaunchError,
    PipelineClosed,
    StageFailed,
    TransferTimeout,
    TransportError,
    WorkerHung,
)
from stageflow.launch.processes import start_processes
from stageflow.launch.threads import start_threads


@pytest.fixture(params=[start_threads, start_processes], ids=["threads", "processes"])
def start(request):
    return request.param


def within(seconds):
    """Fails when the block takes longer."""

    class Limit:
        def __enter__(self):
            self.began = time.monotonic()

        def __exit__(self, *error):
            taken = time.monotonic() - self.began
            assert taken < seconds, f"took {taken:.2f} s"

    return Limit()


def test_results_come_in_rank_order(start):
    with start(Service, 3) as group:
        assert group.size == 3
        got = group.call("echo", [((i,), {"k": -i}) for i in range(3)], common=("c",), timeout=10)
        assert got == [(i, ("c", i), {"k": -i}) for i in range(3)]
        assert group.call("echo", timeout=10) == [(i, (), {}) for i in range(3)]


def test_lambda_and_local_class(start):
    offset = 40

    class Local:
        def __init__(self, ctx):
            self.value = ctx.rank + offset

        def apply(self, function):
            return function(self.value)

    with start(lambda ctx: Local(ctx), 2) as group:
        assert group.call("apply", common=(lambda value: value + 2,), timeout=10) == [42, 43]


@pytest.mark.parametrize("waiting", ["wait", "wait_on_descriptor"])
def test_one_of_three_raises(start, waiting):
    with start(Service, 3) as group:
        with within(2.0), pytest.raises(StageFailed, match=r"worker 1 \(stage 5\) raised ValueError: boom") as caught:
            group.call("fail", common=(1, ValueError("boom"), waiting), timeout=10)
        error = caught.value
        assert (error.worker, error.stage, error.microbatch, error.action) == (1, 5, 3, "5B3")
        assert type(error.__cause__) is ValueError
        assert group.usable
        assert [status.action for status in group.status()] == ["idle"] * 3
        assert len(group.call("echo", timeout=10)) == 3


def test_the_group_survives_many_failures(start):
    with start(Service, 2) as group:
        for attempt in range(10):
            with pytest.raises(StageFailed, match=f"number {attempt}"):
                group.call("fail", common=(attempt % 2, RuntimeError(f"number {attempt}")), timeout=10)
            assert group.call("echo", timeout=10)[1][0] == 1


def test_a_broken_transfer_is_not_told_as_the_cause(start):
    with start(Service, 2) as group:
        with pytest.raises(StageFailed, match="worker 1 raised ZeroDivisionError"):
            group.call("fail_after_peer", common=(ZeroDivisionError("root"),), timeout=10)
        assert group.usable


def test_who_ignores_the_interrupt_is_named_and_the_group_closed(start):
    with start(Service, 2, grace=0.3) as group:
        with within(2.0), pytest.raises(StageFailed, match="boom.*worker 1 did not stop when told to"):
            group.call("ignore", common=(1.0,), timeout=10)
        assert not group.usable
        with pytest.raises(PipelineClosed, match="closed after: worker 0 raised ValueError"):
            group.call("echo", timeout=10)


def test_a_hang_names_every_worker(start):
    with start(Service, 2) as group, within(3.0):
        with pytest.raises(WorkerHung, match="no worker made progress for 0.5 s") as caught:
            group.call("hang", common=(1.5,), timeout=0.5)
        for rank in range(2):
            assert f"worker {rank}: {rank}F0, waiting for a miracle, for 0." in str(caught.value)
            assert f"stacks of worker {rank}:" in str(caught.value)
        assert " in hang" in str(caught.value)
        assert not group.usable


def test_slow_but_moving_is_no_hang(start):
    with start(Service, 2) as group:
        assert group.call("get_on", common=(0.1, 8), timeout=0.4) == [8, 8]


def test_a_timed_out_transfer_is_a_hang(start):
    with start(Service, 2) as group, within(3.0):
        with pytest.raises(
            WorkerHung, match="worker 0: .*\n.*worker 1: .*\n.*worker 0 raised TransferTimeout: 0F0 did not come"
        ):
            group.call("time_out", timeout=5)
        assert not group.usable


def test_system_exit_in_a_method_is_a_failure_not_an_end(start):
    with start(Service, 2) as group:
        with pytest.raises(StageFailed, match="raised SystemExit: 3"):
            group.call("leave", timeout=10)
        assert group.usable


def test_no_such_method(start):
    with start(Service, 1) as group, pytest.raises(StageFailed, match="has no attribute 'nothing'"):
        group.call("nothing", timeout=10)


def test_a_factory_that_raises(start):
    with within(4.0), pytest.raises(LaunchError, match="could not be started: worker 1 raised OSError") as caught:
        start(broken_factory, 2)
    assert isinstance(caught.value.__cause__, OSError)


def test_bad_arguments_are_refused_before_anything_ran(start):
    with pytest.raises(InputError, match="at least one worker"):
        start(Service, 0)
    with start(Service, 2) as group:
        with pytest.raises(InputError, match="for 3 workers given, the group has 2"):
            group.call("echo", [((), {})] * 3, timeout=1)
        with pytest.raises(InputError, match="timeout must be positive"):
            group.call("echo", timeout=0)
        with pytest.raises(LaunchError, match="without wiring="):
            _ = group.endpoint
        assert group.usable


def test_status_while_running(start):
    with start(Service, 2) as group, group.cast("hang", common=(0.3,), timeout=10) as running:
        deadline = time.monotonic() + 5
        while group.status()[1].action != "1F0" and time.monotonic() < deadline:
            time.sleep(0.01)
        status = group.status()[1]
        assert (status.rank, status.action, status.waits_for, status.alive) == (1, "1F0", "a miracle", True)
        assert status.pid > 0
        assert running.results() == [None, None]


def test_a_second_cast_while_one_runs(start):
    with start(Service, 1) as group, group.cast("hang", common=(0.2,), timeout=10) as running:
        with pytest.raises(PipelineClosed, match="still running"):
            group.cast("echo", timeout=10)
        running.results()


def test_an_error_of_the_driver_stops_the_workers(start):
    with start(Service, 2) as group:
        with within(2.0), pytest.raises(KeyError, match="mine"), group.cast("wait", timeout=10):
            raise KeyError("mine")
        assert group.usable
        assert len(group.call("echo", timeout=10)) == 2


def test_leaving_a_call_without_asking_for_results_stops_it(start):
    with start(Service, 2) as group:
        with within(2.0), group.cast("wait", timeout=10):
            pass
        assert group.usable


def test_a_transfer_error_of_the_driver_gives_way_to_its_cause(start):
    with start(Service, 2) as group:
        with (
            pytest.raises(StageFailed, match="the real one"),
            group.cast("fail", common=(0, ValueError("the real one")), timeout=10),
        ):
            raise TransportError("worker 0 does not answer")
        assert group.usable


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_ctrl_c_ends_everything(start, error):
    group = start(Service, 2)
    with within(2.0), pytest.raises(error), group.cast("wait", timeout=10):
        raise error
    assert not group.usable


@pytest.fixture
def wired(start):
    wiring = Wiring(3)
    with start(Waiter, 2, wiring=wiring) as group:
        yield group
    wiring.close()


def test_descriptors_reach_the_workers_endpoints(wired):
    assert wired.call("door", timeout=10) == [(0, 3, True), (1, 3, True)]
    assert (wired.endpoint.rank, wired.endpoint.size) == (2, 3)
    wired.close()
    with pytest.raises(PipelineClosed, match="endpoint with them"):
        _ = wired.endpoint


def test_a_failure_ends_the_waits_of_driver_and_workers(wired):
    with (
        within(2.0),
        pytest.raises(StageFailed, match="boom"),
        wired.cast("fail", common=(0, ValueError("boom"), "recv"), timeout=10),
    ):
        wired.endpoint.recv("loss", 30.0)
    assert wired.usable


def test_a_result_does_not_end_the_drivers_wait(wired):
    with wired.cast("echo", timeout=10) as running:
        with pytest.raises(TransferTimeout, match="loss did not come"):
            wired.endpoint.recv("loss", 0.3)
        assert len(running.results()) == 2


def test_the_drivers_own_timeout_is_a_hang_of_the_workers(wired):
    with pytest.raises(WorkerHung, match="worker 0: wait"), wired.cast("wait", timeout=10):
        wired.endpoint.recv("loss", 0.2)
    assert not wired.usable


def test_aborted_is_what_the_others_get(start):
    seen = threading.Event() if start is start_threads else None

    class Watching(Service):
        def fail(self, who):
            if self.ctx.rank == who:
                raise ValueError("boom")
            try:
                self.wait()
            except Aborted:
                if seen:
                    seen.set()
                raise

    with start(Watching, 2) as group:
        with pytest.raises(StageFailed, match="worker 0 raised ValueError"):
            group.call("fail", common=(0,), timeout=10)
        assert seen is None or seen.is_set()


def test_a_dropped_group_ends_its_workers(start):
    group = start(Service, 2)
    group.call("echo", timeout=10)
    del group
    gc.collect()


def test_service_close_is_called(start, tmp_path):
    class Tidy(Service):
        def close(self):
            (tmp_path / str(self.ctx.rank)).touch()

    with start(Tidy, 2):
        pass
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_two_groups_at_once(start):
    with start(Service, 2) as one, start(Service, 3) as other:
        with one.cast("wait", timeout=10):
            assert len(other.call("echo", timeout=10)) == 3
            with pytest.raises(StageFailed):
                other.call("fail", common=(0, ValueError()), timeout=10)
        assert one.usable
        one.close()
        assert len(other.call("echo", timeout=10)) == 3


def test_close_is_idempotent_and_final(start):
    group = start(Service, 2)
    group.close()
    group.close()
    assert not group.usable
    assert [status.alive for status in group.status()] == [False, False]
    with pytest.raises(PipelineClosed, match="start a new group"):
        group.call("echo", timeout=10)


def test_twenty_cycles_leave_nothing(start):
    for _ in range(20):
        with start(Service, 2) as group:
            group.call("echo", timeout=10)

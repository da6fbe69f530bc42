import functools
import threading

import pytest

from stageflow.errors import LaunchError, StageFailed
from stageflow.launch.failure import Failure, RemoteError, stage_failed
from stageflow.launch.travel import pack, pack_failure, unpack, unpack_failure


class Holder:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def method(self):
        return 7


class Slotted:
    __slots__ = ("inner",)


def test_lambdas_and_local_classes_travel():
    class Local:
        value = 3

    made = unpack(pack(lambda: Local().value + 1, "factory"))
    assert made() == 4


LOCK = threading.Lock()


def slotted():
    made = Slotted()
    made.inner = threading.Lock()
    return made


def closure():
    lock = threading.Lock()

    def factory():
        return lock

    return factory


def default():
    def factory(lock=LOCK):
        return lock

    return factory


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), "factory can't"),
        ({"a": [1, (2, threading.Lock())]}, r"factory\['a'\]\[1\]\[1\] can't"),
        (Holder(model=Holder(lock=threading.Lock())), r"factory\.model\.lock can't"),
        (slotted(), r"factory\.inner can't"),
        (Holder(lock=threading.Lock()).method, r"factory\.__self__\.lock can't"),
        (functools.partial(print, 1, sep=threading.Lock()), r"factory\.keywords\['sep'\] can't"),
        (closure(), "factory.<variable lock> can't"),
        (default(), "factory.<default 0> can't"),
        (functools.partial(closure()), r"factory\.func\.<variable lock> can't"),
    ],
)
def test_what_cannot_travel_is_named(value, path):
    with pytest.raises(LaunchError, match=path + ".*lock object.*Make it in the worker"):
        pack(value, "factory")


def test_a_cycle_around_the_culprit():
    holder = Holder(lock=threading.Lock())
    holder.me = holder
    with pytest.raises(LaunchError, match=r"x\.lock can't"):
        pack(holder, "x")


def report(error, rank=2, doing="5B3"):
    try:
        raise error
    except Exception as caught:
        return Failure.of(rank, caught, doing)


def test_an_exception_travels_with_its_place_and_traceback():
    got = unpack_failure(pack_failure(report(KeyError("deep"))))
    assert isinstance(got.error, KeyError)
    assert (got.stage, got.microbatch, got.action, got.kind) == (5, 3, "5B3", "error")
    [note] = got.error.__notes__
    assert "Traceback on worker 2:" in note
    assert "raise error" in note


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__("needs two")


class Locked(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


@pytest.mark.parametrize("error", [Stubborn(1, 2), Locked()])
def test_an_exception_that_cannot_travel_is_replaced_and_still_named(error):
    got = unpack_failure(pack_failure(report(error)))
    assert isinstance(got.error, RemoteError)
    assert str(got.error) == f"{type(error).__name__}: {error}"
    failed = stage_failed(got, closed=False)
    assert type(error).__name__ in str(failed)


def test_the_exception_knows_its_place_better_than_the_status():
    error = ValueError("boom")
    error.stage, error.microbatch, error.action = 1, 4, "1F4"
    failed = stage_failed(report(error, doing="receiving"), closed=False)
    assert isinstance(failed, StageFailed)
    assert (failed.worker, failed.stage, failed.microbatch, failed.action) == (2, 1, 4, "1F4")
    assert str(failed) == "worker 2 (stage 1) raised ValueError: boom during 1F4"
    assert failed.__cause__ is error

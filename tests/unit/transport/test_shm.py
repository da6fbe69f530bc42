import contextlib
import gc
import os
import random
import threading
import time
import weakref

import pytest
import torch

from stageflow.errors import InputError, TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.testing.leaks import no_leaks
from stageflow.testing.transport import SCENARIOS, check_transport
from stageflow.transport.base import Tag
from stageflow.transport.shm import ShmEndpoint, ShmHub, doorbell, layout, ordering
from stageflow.transport.shm.extents import Extents


def tag(microbatch, step=0):
    return Tag(step, "F", 0, 1, microbatch)


@contextlib.contextmanager
def pair(switches, arena_bytes=4 << 20):
    with ShmHub.create(2, arena_bytes) as hub:
        ends = [hub.attach(rank, switch.interrupt) for rank, switch in enumerate(switches)]
        yield tuple(ends)
        for end in ends:
            end.close()


@contextlib.contextmanager
def two(**options):
    """(sender, receiver)"""
    patience = options.pop("patience", 60.0)
    with ShmHub.create(2, **{"arena_bytes": 1 << 20, **options}) as hub:
        ends = hub.attach(0, patience=patience), hub.attach(1, patience=patience)
        yield ends
        for end in ends:
            end.close()


def flood(sender, n):
    for i in range(n):
        sender.send(1, tag(i), Bundle({"x": torch.full((100_000,), float(i))}))


def state():
    named = [name for name in os.listdir("/dev/shm") if name.startswith("stageflow")]
    return sorted(os.listdir("/proc/self/fd")), named, threading.active_count()


@pytest.fixture(autouse=True)
def _nothing_left():
    before = state()
    yield
    if state() != before:
        gc.collect()
    assert state() == before


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conforms(scenario):
    check_transport(pair, [scenario])


@pytest.mark.parametrize("scenario", ["big_messages", "receiver_keeps_everything", "interrupt_ends_a_wait"])
def test_conforms_where_the_system_has_neither_eventfd_nor_memfd(scenario, monkeypatch):
    monkeypatch.delattr(os, "eventfd")
    monkeypatch.delattr(os, "memfd_create")
    check_transport(pair, [scenario])


def test_conforms_with_explicit_barriers(monkeypatch):
    # What processors with weaker order than x86 need; the system call exists here too.
    calls = []
    real = ordering._barrier_call

    def counted():
        barrier = real()
        return lambda: (calls.append(1), barrier())

    monkeypatch.setattr(ordering, "_barrier_call", counted)
    monkeypatch.setattr(ordering.in_order, "__defaults__", (False,))
    monkeypatch.setattr(ordering.full_barrier, "__defaults__", (False,))
    check_transport(pair, ["in_order_and_out_of_order", "receiver_lets_go_in_any_order"])
    assert len(calls) > 600


def test_tensors_lie_in_the_arena_and_free_it():
    with two(arena_bytes=2 << 20) as (sender, receiver):
        outlet = sender._outlets[1]
        for i in range(3):
            sender.send(1, tag(i), Bundle({"x": torch.full((50_000,), float(i))}))
        kept = [receiver.recv(tag(i), 5).tensors["x"] for i in range(3)]
        view = kept[1][5:10]
        del kept[1]
        outlet._reclaim(99)
        assert len(outlet._in_use) == 3  # a view keeps the block
        del view
        outlet._reclaim(99)
        assert len(outlet._in_use) == 2
        assert [float(x[0]) for x in kept] == [0, 2]
        kept.clear()
        outlet._reclaim(99)
        assert outlet._extents.free == outlet._extents.size


def test_tensors_outlive_the_endpoint():
    with two() as (sender, receiver):
        sender.send(1, tag(0), Bundle({"x": torch.arange(50_000)}))
        x = receiver.recv(tag(0), 5).tensors["x"]
    gc.collect()
    assert torch.equal(x, torch.arange(50_000))
    x.add_(1)
    del x


def test_tensors_may_die_in_another_thread():
    with two() as (sender, receiver):
        for i in range(200):
            sender.send(1, tag(i), Bundle({"x": torch.full((20_000,), float(i))}))
            got = [receiver.recv(tag(i), 5)]
            thread = threading.Thread(target=got.clear)
            thread.start()
            thread.join()
        assert sender._waiting_bytes() == 0
        receiver._collect()


def test_backlog_moves_while_the_sender_computes():
    with two() as (sender, receiver):
        n = 30
        flood(sender, n)
        assert sender._waiting_bytes() > 0
        for i in range(n):  # the sender's thread does nothing any more
            assert float(receiver.recv(tag(i), 5).tensors["x"][-1]) == i
        sender.flush(5)


def test_send_waits_when_the_backlog_is_full_and_says_so():
    with two(backlog_bytes=1 << 20, patience=0.2) as (sender, _):
        started = time.monotonic()
        with pytest.raises(TransferTimeout) as caught:
            flood(sender, 30)
        assert "worker 0, sending 400" in str(caught.value)
        assert "receivers took nothing for 0.2 s" in str(caught.value)
        assert 0.2 < time.monotonic() - started < 2
        with pytest.raises(TransferTimeout, match="worker 0, flush: .* by receiver: {1: "):
            sender.flush(0.05)


def test_a_message_larger_than_the_backlog_still_goes():
    with two(backlog_bytes=1000) as (sender, receiver):
        for i in range(3):
            sender.send(1, tag(i), Bundle({"x": torch.full((1 << 20,), i, dtype=torch.uint8)}))
            assert int(receiver.recv(tag(i), 5).tensors["x"][-1]) == i


def test_forget_drops_what_waits_to_be_sent():
    with two() as (sender, receiver):
        for step in (1, 2):
            for i in range(20):
                sender.send(1, tag(i, step), Bundle({"x": torch.full((50_000,), float(step))}))
        waiting = sender._waiting_bytes()
        sender.forget(2)
        assert sender._waiting_bytes() < waiting
        receiver.forget(2)
        for i in range(20):
            assert float(receiver.recv(tag(i, 2), 5).tensors["x"][0]) == 2
        sender.flush(5)


def test_timeout_names_peers_that_never_attached():
    with ShmHub.create(3) as hub:
        endpoint = hub.attach(1)
        with pytest.raises(TransferTimeout, match="Workers not attached yet: 0, 2."):
            endpoint.recv(tag(0), 0.01)
        endpoint.close()


def test_three_workers_and_one_alone():
    with ShmHub.create(3, 1 << 20) as hub:
        ends = [hub.attach(rank) for rank in range(3)]
        for a in ends:
            for b in ends:
                if a is not b:
                    a.send(b.rank, Tag(0, "F", a.rank, b.rank, 0), Bundle({}, [a.rank, b.rank]))
        for b in ends:
            for a in ends:
                if a is not b:
                    assert b.recv(Tag(0, "F", a.rank, b.rank, 0), 5).meta == [a.rank, b.rank]
        for end in ends:
            end.close()
    with ShmHub.create(1) as hub:
        hub.attach(0).close()


def test_handles_travel_as_plain_data_and_descriptors():
    with ShmHub.create(2) as hub:
        handles, fds = hub.handles(1)
        assert {type(v) for v in handles.values()} <= {int, list}
        ShmEndpoint.attach(handles, [os.dup(fd) for fd in fds]).close()
        with pytest.raises(InputError, match="no worker 2 among 2"):
            hub.handles(2)


def test_a_closed_endpoint_keeps_no_memory_until_the_garbage_collector_comes():
    with ShmHub.create(2, 1 << 20) as hub:
        end = hub.attach(0)
        end.close()
        gone = weakref.ref(end)
        gc.disable()
        try:
            del end
            assert gone() is None
        finally:
            gc.enable()


def test_an_endpoint_that_nobody_closes_leaves_no_descriptors():
    with ShmHub.create(2, 1 << 20) as hub, no_leaks():
        end = hub.attach(0)
        del end


def test_no_page_is_used_before_it_is_written():
    with ShmHub.create(4, 1 << 30) as hub:
        assert os.fstat(hub._memory_fd).st_blocks == 0


def test_damaged_memory_is_an_error_not_a_crash():
    draw = random.Random(3)
    for _ in range(60):
        with two() as (sender, receiver):
            sender.send(1, tag(0), Bundle({"x": torch.arange(200)}))
            memory = receiver._inlets[0]._bytes
            start = layout.Layout(2, 1 << 20).arena(0, 1)
            for _ in range(3):
                memory[start + draw.randrange(8, 150)] ^= 1 << draw.randrange(8)
            with contextlib.suppress(TransportError):
                receiver.recv(tag(0), 0.01)
            del memory


@pytest.mark.parametrize("kind", ["eventfd", "pipe"])
def test_doorbell(kind, monkeypatch):
    if kind == "pipe":
        monkeypatch.delattr(os, "eventfd")
    bell = doorbell.Doorbell.create()
    other = doorbell.Doorbell(tuple(os.dup(fd) for fd in bell.fds))
    for _ in range(3):
        for _ in range(70_000 if kind == "pipe" else 3):
            other.ring()
        bell.silence()
        bell.silence()
        with pytest.raises(BlockingIOError):
            os.read(bell.fileno(), 8)
    bell.close()
    other.close()


def test_extents_against_a_plain_table():
    draw = random.Random(1)
    extents, table, taken = Extents(4096), bytearray(4096), {}
    for _ in range(4000):
        if taken and draw.random() < 0.48:
            start = draw.choice(list(taken))
            length = taken.pop(start)
            extents.give_back(start, length)
            assert table[start : start + length] == b"\1" * length
            table[start : start + length] = bytes(length)
        else:
            want = draw.randint(1, 400)
            start, length = extents.take(want), want
            if start is None:
                assert bytes(want) not in table
                found = extents.take_up_to(want, 1)
                if found is None:
                    assert 0 not in table
                    continue
                start, length = found
                assert length < want
            else:
                assert start == table.find(bytes(want))  # the lowest place there is
            assert not any(table[start : start + length])
            table[start : start + length] = b"\1" * length
            taken[start] = length
        assert extents.free == table.count(0)

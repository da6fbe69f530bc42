"""What every transport must do, as scenarios for two endpoints that anybody's transport can be put through.

    def test_my_transport():
        check_transport(make_pair)      # make_pair(switches) -> context manager that gives two endpoints

runs every scenario with the two ends in two threads. Where the ends must be in two processes, each process makes its
own end and calls `take_part`; the scenarios need no other way to talk. One end has rank 0, the other rank 1.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stageflow.errors import Aborted, StageflowError, TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Interrupt, Tag

TIMEOUT = 60.0
BIG = 24 << 20  # bytes: give the transport less room than this to see it cope
_EDGE = 1 << 20


class Switch:
    """An interrupt that a test can trip: from then on waits end with `errors.Aborted`, until it is reset."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._tripped = threading.Event()
        self.interrupt = Interrupt(self._check, self._read)

    def trip(self) -> None:
        self._tripped.set()
        os.write(self._write, b"!")

    def reset(self) -> None:
        if self._tripped.is_set():
            os.read(self._read, 1)
            self._tripped.clear()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _check(self) -> None:
        if self._tripped.is_set():
            raise Aborted("the switch was tripped")


Scenario = Callable[[Endpoint, Switch], None]
MakePair = Callable[[tuple[Switch, Switch]], AbstractContextManager[tuple[Endpoint, Endpoint]]]


def check_transport(make_pair: MakePair, only: Sequence[str] | None = None) -> None:
    """Run the scenarios with two endpoints of this process, each in a thread. Raises what the first failing end raises.

    make_pair: gives the endpoints of ranks 0 and 1; each must watch the interrupt of its switch.
    only: names from `SCENARIOS`; None for all.
    """
    switches = (Switch(), Switch())
    try:
        with make_pair(switches) as ends:
            _in_two_threads(
                [lambda end=end, s=s: take_part(end, s, only) for end, s in zip(ends, switches, strict=True)]
            )
            closing_is_final(*ends)
    finally:
        for switch in switches:
            switch.close()


def take_part(endpoint: Endpoint, switch: Switch, only: Sequence[str] | None = None) -> None:
    """Play one end of the scenarios, in order; the other end must do the same at the same time."""
    for number, name in enumerate(SCENARIOS if only is None else only):
        try:
            SCENARIOS[name](_Shifted(endpoint, number * 100), switch)
            meet(endpoint, number)
        except Exception as problem:
            problem.add_note(f"in transport scenario {name!r}, at the end of rank {endpoint.rank}")
            raise


def meet(endpoint: Endpoint, number: int) -> None:
    """Wait until the other end has come here too."""
    me, other = endpoint.rank, 1 - endpoint.rank
    endpoint.send(other, Tag(10**6, "meet", me, other, number), Bundle())
    endpoint.recv(Tag(10**6, "meet", other, me, number), TIMEOUT)


def closing_is_final(first: Endpoint, second: Endpoint) -> None:
    """A closed endpoint refuses work, its peer soon says so too, and closing again does nothing."""
    for endpoint in (first, second):
        endpoint.close()
        endpoint.close()
        other = 1 - endpoint.rank
        _raises(TransportError, "closed", lambda e=endpoint, o=other: e.send(o, _tag(0), Bundle()))
        _raises(TransportError, "closed", lambda e=endpoint: e.recv(_tag(0), 1))
        if endpoint is first:
            _raises(TransportError, "worker 0 has closed", lambda: _send_until_refused(second))


def _send_until_refused(endpoint: Endpoint) -> None:
    for i in range(500):
        endpoint.send(1 - endpoint.rank, _tag(i), Bundle())
        time.sleep(0.01)


class _Shifted(Endpoint):
    """An endpoint whose steps are moved, so that scenarios don't meet each other's tags."""

    def __init__(self, inner: Endpoint, step: int) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._step = inner, step

    def send(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        self._inner.send(peer, tag._replace(step=tag.step + self._step), bundle)

    def recv(self, tag: Tag, timeout: float) -> Bundle:
        return self._inner.recv(tag._replace(step=tag.step + self._step), timeout)

    def flush(self, timeout: float) -> None:
        self._inner.flush(timeout)

    def forget(self, before_step: int) -> None:
        self._inner.forget(before_step + self._step)

    def close(self) -> None:
        self._inner.close()


def _tag(microbatch: int, step: int = 0, kind: str = "F") -> Tag:
    return Tag(step, kind, 0, 1, microbatch)


def _in_two_threads(roles: Sequence[Callable[[], None]]) -> None:
    problems: list[BaseException] = []

    def run(role: Callable[[], None]) -> None:
        try:
            role()
        except BaseException as problem:  # handed to the caller
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(role,), daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * TIMEOUT
    while any(thread.is_alive() for thread in threads) and not problems and time.monotonic() < deadline:
        threads[0].join(0.02)
    if problems:
        raise problems[0]
    assert not any(thread.is_alive() for thread in threads), "the scenarios hang"


def _raises(kind: type[Exception], pattern: str, call: Callable[[], object]) -> Exception:
    raised: Exception | None = None
    try:
        call()
    except kind as problem:
        raised = problem
    assert raised is not None, f"nothing was raised instead of {kind.__name__} {pattern!r}"
    assert re.search(pattern, str(raised)), f"{raised!r} does not say {pattern!r}"
    return raised


def _same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert not got.requires_grad
    if expected.numel():
        mine, theirs = (x.detach().resolve_conj().resolve_neg().cpu().contiguous() for x in (got, expected))
        assert bytes(mine.reshape(-1).view(torch.uint8).numpy()) == bytes(theirs.reshape(-1).view(torch.uint8).numpy())


def _noise(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The same random bits at both ends."""
    draw = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), generator=draw, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def in_order_and_out_of_order(endpoint: Endpoint, switch: Switch) -> None:
    """Messages are found by tag, whatever the order in which they are asked for."""
    n = 40
    if endpoint.rank == 0:
        for i in range(n):
            endpoint.send(1, _tag(i), Bundle({"x": torch.full((i % 5,), float(i))}, i))
            endpoint.send(1, _tag(i, kind="B"), Bundle({}, -i))
    else:
        for i in [*range(n // 2), *reversed(range(n // 2, n))]:
            got = endpoint.recv(_tag(i), TIMEOUT)
            _same(got.tensors["x"], torch.full((i % 5,), float(i)))
            assert got.meta == i
        assert [endpoint.recv(_tag(i, kind="B"), TIMEOUT).meta for i in range(n)] == [-i for i in range(n)]


def every_dtype(endpoint: Endpoint, switch: Switch) -> None:
    """Bits arrive as they were, in every dtype."""
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
    for i, name in enumerate(names.split()):
        x = _noise(i, getattr(torch, name), 3, 5)
        if endpoint.rank == 0:
            endpoint.send(1, _tag(i), Bundle({"x": x}))
        else:
            _same(endpoint.recv(_tag(i), TIMEOUT).tensors["x"], x)


def odd_tensors(endpoint: Endpoint, switch: Switch) -> None:
    """Scalars, empty, transposed, expanded, strided, conjugate tensors and ones that require grad, in one message."""
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty 3x0": torch.empty(3, 0, dtype=torch.int64),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "strided": torch.arange(10)[1::3],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "with grad": torch.ones(2, requires_grad=True) * 2,
        "": torch.tensor(True),
    }
    if endpoint.rank == 0:
        endpoint.send(1, _tag(0), Bundle(tensors))
    else:
        got = endpoint.recv(_tag(0), TIMEOUT).tensors
        assert list(got) == list(tensors)
        for name, x in tensors.items():
            _same(got[name], x)


def plain_values(endpoint: Endpoint, switch: Switch) -> None:
    """What is no tensor arrives equal; what has no plain form is refused before anything is sent."""
    metas = [None, 0, True, "ü", [1, None, [2.5]], {"a": {"": [False]}}, list(range(5000)), 2**70]
    for i, meta in enumerate(metas):
        if endpoint.rank == 0:
            endpoint.send(1, _tag(i), Bundle({}, meta))
        else:
            got = endpoint.recv(_tag(i), TIMEOUT)
            assert got == Bundle({}, meta)
            assert type(got.meta) is type(meta)
    for refused in ((1,), {1: 2}, object()):
        _raises(StageflowError, "plain", lambda r=refused: endpoint.send(1 - endpoint.rank, _tag(99), Bundle({}, r)))


def big_messages(endpoint: Endpoint, switch: Switch) -> None:
    """A message may be larger than all the room there is."""
    x, y = _noise(1, torch.float32, BIG // 8), _noise(2, torch.bfloat16, 3, BIG // 12)
    if endpoint.rank == 0:
        for i in range(2):
            endpoint.send(1, _tag(i), Bundle({"x": x, "y": y, "i": torch.tensor(i)}))
    else:
        for i in range(2):
            got = endpoint.recv(_tag(i), TIMEOUT).tensors
            assert got["i"] == i
            _same(got["x"], x)
            _same(got["y"], y)


def receiver_keeps_everything(endpoint: Endpoint, switch: Switch) -> None:
    """A receiver that never lets go of a tensor blocks nobody, and nothing it holds is ever overwritten."""
    n, size = 96, BIG // 48 // 4
    if endpoint.rank == 0:
        for i in range(n):
            endpoint.send(1, _tag(i), Bundle({"x": torch.full((size,), float(i)), "small": torch.tensor(i)}))
        endpoint.flush(TIMEOUT)
    else:
        kept = [endpoint.recv(_tag(i), TIMEOUT).tensors for i in range(n)]
        for i, tensors in enumerate(kept):
            assert tensors["small"] == i
            assert torch.equal(tensors["x"], torch.full((size,), float(i)))


def receiver_lets_go_in_any_order(endpoint: Endpoint, switch: Switch) -> None:
    """Room comes back whatever the order in which tensors become garbage."""
    n, size = 200, BIG // 60 // 4
    if endpoint.rank == 0:
        for i in range(n):
            endpoint.send(1, _tag(i), Bundle({"x": torch.full((size + i,), float(i))}))
    else:
        kept: dict[int, Tensor] = {}
        for i in range(n):
            kept[i] = endpoint.recv(_tag(i), TIMEOUT).tensors["x"]
            if len(kept) > 12:
                victim = sorted(kept)[(i * 7) % len(kept)]
                assert torch.equal(kept.pop(victim), torch.full((size + victim,), float(victim)))
        for i, x in kept.items():
            assert torch.equal(x, torch.full((size + i,), float(i)))


def sender_changes_its_tensors(endpoint: Endpoint, switch: Switch) -> None:
    """What was sent is what the tensors held at that moment."""
    if endpoint.rank == 0:
        x = torch.zeros(_EDGE // 4)
        for i in range(60):
            x.fill_(i)
            endpoint.send(1, _tag(i), Bundle({"x": x}))
            x.fill_(-1)
    else:
        for i in range(60):
            assert torch.equal(endpoint.recv(_tag(i), TIMEOUT).tensors["x"], torch.full((_EDGE // 4,), float(i)))


def receiver_changes_its_tensors(endpoint: Endpoint, switch: Switch) -> None:
    """Received tensors belong to the receiver: writing to one changes no other."""
    if endpoint.rank == 0:
        for i in range(20):
            endpoint.send(1, _tag(i), Bundle({"a": torch.full((9000,), float(i)), "b": torch.full((3,), float(i))}))
    else:
        kept = []
        for i in range(20):
            got = endpoint.recv(_tag(i), TIMEOUT).tensors
            for x in got.values():
                assert bool((x == i).all())
                x.mul_(0).sub_(i)
            kept.append(got)
        assert all(bool((x == -i).all()) for i, got in enumerate(kept) for x in got.values())


def flooded_from_both_sides(endpoint: Endpoint, switch: Switch) -> None:
    """Both ends send far more than there is room for before they receive anything."""
    me, other = endpoint.rank, 1 - endpoint.rank
    n = 2 * BIG // _EDGE
    for i in range(n):
        endpoint.send(other, Tag(0, "flood", me, other, i), Bundle({"x": torch.full((_EDGE,), i, dtype=torch.uint8)}))
    for i in reversed(range(n)):
        x = endpoint.recv(Tag(0, "flood", other, me, i), TIMEOUT).tensors["x"]
        assert x.shape == (_EDGE,)
        assert bool((x == i).all())
    endpoint.flush(TIMEOUT)


def many_small_messages(endpoint: Endpoint, switch: Switch) -> None:
    """More messages than any table has places for."""
    n = 6000
    if endpoint.rank == 0:
        for i in range(n):
            endpoint.send(1, _tag(i), Bundle({}, i))
    else:
        time.sleep(0.05)
        assert all(endpoint.recv(_tag(i), TIMEOUT).meta == i for i in reversed(range(n)))


def timeout_says_what_was_missing(endpoint: Endpoint, switch: Switch) -> None:
    """A wait ends on time and its error names what did not come and what did."""
    if endpoint.rank == 0:
        endpoint.send(1, _tag(3, kind="came"), Bundle())
        return
    endpoint.recv(_tag(3, kind="came"), TIMEOUT)
    started = time.monotonic()
    problem = _raises(TransferTimeout, r"worker 1 .*lost from 0 to 1, micro-batch 8", lambda: _receive_lost(endpoint))
    assert 0.19 < time.monotonic() - started < 1.5
    assert isinstance(problem, TimeoutError)


def _receive_lost(endpoint: Endpoint) -> None:
    endpoint.recv(_tag(8, kind="lost"), 0.2)


def interrupt_ends_a_wait(endpoint: Endpoint, switch: Switch) -> None:
    """A tripped interrupt ends a wait within 0.2 s, and the endpoint works afterwards."""
    tripped: list[float] = []

    def trip() -> None:
        tripped.append(time.monotonic())
        switch.trip()

    timer = threading.Timer(0.15, trip)
    timer.start()
    _raises(Aborted, "tripped", lambda: endpoint.recv(Tag(0, "never", 1 - endpoint.rank, endpoint.rank, 0), TIMEOUT))
    late = time.monotonic() - tripped[0]
    timer.join()
    switch.reset()
    assert late < 0.2, f"it took {late:.3f} s"


def forgotten_steps(endpoint: Endpoint, switch: Switch) -> None:
    """`forget` drops what has come and what is yet to come of earlier steps, and nothing else."""
    if endpoint.rank == 0:
        for step in (1, 2, 3):
            endpoint.send(1, _tag(0, step), Bundle({"x": torch.full((5000,), float(step))}))
        endpoint.recv(Tag(9, "go", 1, 0, 0), TIMEOUT)
        endpoint.send(1, _tag(1, 2), Bundle())
        endpoint.send(1, _tag(1, 3), Bundle())
        return
    _same(endpoint.recv(_tag(0, 2), TIMEOUT).tensors["x"], torch.full((5000,), 2.0))
    endpoint.forget(3)
    endpoint.send(0, Tag(9, "go", 1, 0, 0), Bundle())
    endpoint.recv(_tag(1, 3), TIMEOUT)
    _same(endpoint.recv(_tag(0, 3), TIMEOUT).tensors["x"], torch.full((5000,), 3.0))
    for gone in (_tag(0, 1), _tag(1, 2)):
        _raises(TransferTimeout, "did not come", lambda t=gone: endpoint.recv(t, 0.02))


def unknown_peer(endpoint: Endpoint, switch: Switch) -> None:
    """A message to a worker that does not exist is refused."""
    _raises(TransportError, "worker 7", lambda: endpoint.send(7, _tag(0), Bundle()))


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        in_order_and_out_of_order,
        every_dtype,
        odd_tensors,
        plain_values,
        big_messages,
        receiver_keeps_everything,
        receiver_lets_go_in_any_order,
        sender_changes_its_tensors,
        receiver_changes_its_tensors,
        flooded_from_both_sides,
        many_small_messages,
        timeout_says_what_was_missing,
        interrupt_ends_a_wait,
        forgotten_steps,
        unknown_peer,
    )
}

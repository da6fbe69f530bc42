"""Lower bounds: what no schedule whatsoever on this split and placement can beat.

Each bound, with its proof, is in docs/bounds.md. All rest on one step: micro-batches of a stage cost the same, so they
can be relabelled, without moving an action in time, until every stage takes them first come, first served. Then the
k-th F of a stage needs the k-th F of the stage before, and so on: what must come before and after an action is known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.plan.relaxation import Relaxation
from stageflow.schedule.actions import Action
from stageflow.schedule.costs import Costs, at_stage
from stageflow.schedule.memory import Footprint, static_memory
from stageflow.schedule.placement import place

Metric = Literal["makespan", "span"]


@dataclass(frozen=True)
class Bound:
    """A proven lower bound on the time of a step.

    seconds: the largest of ``of``, which has every bound by name.
    reason: in words, why no schedule is faster.
    """

    seconds: float
    reason: str
    of: dict[str, float] = field(repr=False)


def lower_bound(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    *,
    graph: StageGraph | None = None,
    footprint: Footprint | None = None,
    memory: float | Sequence[float] | None = None,
    split: bool = True,
    metric: Metric = "makespan",
) -> Bound:
    """Seconds that every schedule takes at least.

    costs: seconds. placement: the worker of each stage. graph: default a chain.
    footprint, memory: bytes that stages keep, and that each worker has (one number, or one per worker; None: no limit).
        `Footprint()` counts activations, and then memory is how many a worker may keep.
    split: whether schedules may split a backward into I and W; those that don't are bounded too.
    metric: "makespan", or "span": the longest time from a worker's first start to its last end.

    Raises InputError when costs, footprint or placement don't fit each other, or when a worker can't even keep one
    activation of each of its stages.
    """
    graph = graph or StageGraph.chain(len(placement))
    placed = place(placement, graph.n_stages, max(placement, default=0) + 1)
    costs.check(graph.n_stages, graph.edges)
    footprint = footprint or Footprint()
    footprint.check(graph.n_stages)
    room = room_for_activations(footprint, placed, memory)
    check_room(footprint, placed, room)
    relaxed = Relaxation(graph, placed, microbatches, costs, footprint, room, split)
    bounds = _span_bounds(relaxed) if metric == "span" else _makespan_bounds(relaxed)
    found: dict[str, tuple[float, int]] = {}
    for name, worker, seconds in bounds:
        if name not in found or seconds > found[name][0]:
            found[name] = seconds, worker
    name = max(found, key=lambda each: found[each][0])
    seconds, worker = found[name]
    return Bound(seconds, _REASONS[name].format(worker=worker), {each: value for each, (value, _) in found.items()})


def room_for_activations(
    footprint: Footprint, placement: Sequence[int], memory: float | Sequence[float] | None
) -> tuple[float, ...]:
    """Per worker, the bytes that its limit leaves beside what it keeps all the time; infinite without a limit."""
    workers = max(placement) + 1
    if memory is None:
        return (math.inf,) * workers
    limits = tuple(memory) if isinstance(memory, Sequence) else (memory,) * workers
    if len(limits) != workers:
        raise InputError(f"memory has {len(limits)} limits for {workers} workers: give one number, or one per worker")
    if not all(limit >= 0 for limit in limits):
        raise InputError(f"memory has a limit that is negative or no number: {memory}")
    static = static_memory(footprint, placement, workers)
    return tuple(limit - there for limit, there in zip(limits, static, strict=True))


def check_room(footprint: Footprint, placement: Sequence[int], room: Sequence[float]) -> None:
    """Raise InputError unless every worker can keep one activation of each of its stages, as any schedule must."""
    for worker, there in enumerate(room):
        needed = sum(at_stage(footprint.activation, s) for s, w in enumerate(placement) if w == worker)
        if needed > there * (1 + 1e-9):
            raise InputError(
                f"worker {worker} has {there:g} of memory left for activations and needs at least {needed:g}, one "
                "activation of each of its stages: give it more memory, smaller micro-batches or fewer layers"
            )


_REASONS = {
    "work": "worker {worker} is busy from when its first input can come to when its last gradient must leave",
    "chain": "one micro-batch takes that long through all stages and back",
    "warm-up": "worker {worker} has memory for few forwards, and nothing else to do until the first gradient comes",
    "drain": "worker {worker} has memory for few micro-batches, and after its last forward only those are left to do",
    "rate": "worker {worker} keeps every activation that long, and has memory for so few at once",
    "one machine": "worker {worker} can't do its actions faster, given when each can start and what must follow it",
    "link": "the link from worker {worker} is busy that long",
}


def _makespan_bounds(relaxed: Relaxation) -> list[tuple[str, int, float]]:
    """(name, worker, seconds) of every bound on the time from the first start to the last end."""
    heads = relaxed.heads(None)
    tails, rests = relaxed.tails(None)
    found = [("chain", 0, _longest_chain(relaxed))]
    for worker in relaxed.workers:
        found += _worker_bounds(relaxed, worker, heads, tails, rests)
    return found + _link_bounds(relaxed, heads, tails)


def _span_bounds(relaxed: Relaxation) -> list[tuple[str, int, float]]:
    """The same on the longest time from a worker's first start to its last end."""
    found: list[tuple[str, int, float]] = []
    for worker in relaxed.workers:
        found += _worker_bounds(relaxed, worker, relaxed.heads(worker), *relaxed.tails(worker))
    return found


def _longest_chain(relaxed: Relaxation) -> float:
    """One micro-batch through all stages and back, with the rest of its backward."""
    ends: dict[int, float] = {}
    longest = 0.0
    for letter in relaxed.order:
        start = max((ends[source] + delay for source, delay in relaxed.before[letter]), default=0.0)
        ends[letter] = start + relaxed.seconds[letter]
        if letter % 2:
            longest = max(longest, ends[letter] + relaxed.rest[letter // 2] + relaxed.reduction[letter // 2])
    return longest


def _worker_bounds(
    relaxed: Relaxation,
    worker: int,
    heads: list[list[float]],
    tails: list[list[float]],
    rests: list[list[float]],
) -> list[tuple[str, int, float]]:
    """From when heads count until when tails do."""
    stages, m = relaxed.local[worker], relaxed.microbatches
    load, room = relaxed.load(worker), relaxed.room[worker]
    first = min(heads[2 * s][0] for s in stages)
    last = min(rests[s][-1] if relaxed.rest[s] else tails[2 * s + 1][-1] for s in stages)
    gradient = min(heads[2 * s + 1][0] for s in stages)
    drain = min(tails[2 * s][-1] for s in stages)
    before = min(_forwards_that_fit(relaxed, worker), gradient - first)
    after = min(_backwards_that_fit(relaxed, worker), drain - last)
    jobs = [(heads[2 * s][k], relaxed.seconds[2 * s], tails[2 * s][k]) for s in stages for k in range(m)]
    for s in stages:
        seconds, rest = relaxed.seconds[2 * s + 1], relaxed.rest[s]
        jobs += [(heads[2 * s + 1][k], seconds, tails[2 * s + 1][k]) for k in range(m)]
        jobs += [(heads[2 * s + 1][k] + seconds, rest, rests[s][k]) for k in range(m) if rest]
    return [
        ("work", worker, first + load + last),
        ("warm-up", worker, gradient + load - before + last),
        ("drain", worker, first + load - after + drain),
        ("rate", worker, first + (_byte_seconds(relaxed, worker) / room if room else 0.0) + last),
        ("one machine", worker, preemptive_one_machine(jobs)),
    ]


def _forwards_that_fit(relaxed: Relaxation, worker: int) -> float:
    """The most seconds of forwards a worker can do before its first gradient."""
    things = [(relaxed.kept(s)[0], relaxed.seconds[2 * s]) for s in relaxed.local[worker]]
    return _knapsack(things, relaxed.room[worker], relaxed.microbatches)


def _backwards_that_fit(relaxed: Relaxation, worker: int) -> float:
    """The most seconds of backwards that can be left to a worker after its last forward."""
    things: list[tuple[float, float]] = []
    for s in relaxed.local[worker]:
        activation, deferred = relaxed.kept(s)
        rest = relaxed.rest[s]
        whole = relaxed.seconds[2 * s + 1] + rest
        if rest and (not deferred or (activation and rest / deferred > whole / activation)):
            things += [(deferred, rest), (activation - deferred, whole - rest)]
        else:
            things.append((activation, whole))
    return _knapsack(things, relaxed.room[worker], relaxed.microbatches)


def _knapsack(things: list[tuple[float, float]], room: float, each: int) -> float:
    """The most value of things (size, value), at most ``each`` of a kind, parts of them too, that fit into the room."""
    total = 0.0
    for size, value in sorted(things, key=lambda thing: thing[0] / thing[1] if thing[1] else math.inf):
        number = min(each, room / size) if size else each
        total += number * value
        room -= number * size if size else 0.0
    return total


def _byte_seconds(relaxed: Relaxation, worker: int) -> float:
    """Bytes times seconds that a worker's activations take up at least, all micro-batches together."""
    total = 0.0
    for s in relaxed.local[worker]:
        activation, deferred = relaxed.kept(s)
        waiting = _from_forward_to_gradient(relaxed, s)
        whole, inputs, weights = (relaxed.costs.of(Action(kind, s, 0)) for kind in ("B", "I", "W"))
        ways = [activation * (waiting + whole)]
        if relaxed.split:
            ways.append(activation * (waiting + inputs) + deferred * weights)
        total += min(ways)
    return relaxed.microbatches * total


def _from_forward_to_gradient(relaxed: Relaxation, stage: int) -> float:
    """Seconds from the start of a stage's F to that of its gradient at the earliest."""
    ends: dict[int, float] = {2 * stage: relaxed.seconds[2 * stage]}
    for letter in relaxed.order:
        ways = [ends[source] + delay for source, delay in relaxed.before[letter] if source in ends]
        if ways:
            if letter == 2 * stage + 1:
                return max(ways)
            ends[letter] = max(ways) + relaxed.seconds[letter]
    raise AssertionError("a gradient needs its own forward")


def _link_bounds(
    relaxed: Relaxation, heads: list[list[float]], tails: list[list[float]]
) -> list[tuple[str, int, float]]:
    """Each link carries one value at a time."""
    links: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    m = relaxed.microbatches
    for letter in relaxed.order:
        for source, _ in relaxed.before[letter]:
            sender, receiver = relaxed.worker(source), relaxed.worker(letter)
            if sender == receiver:
                continue
            transfer = relaxed.costs.transfer_between(source // 2, letter // 2)
            hop = relaxed.costs.hop_between(source // 2, letter // 2)
            links.setdefault((sender, receiver), []).extend(
                (
                    heads[source][k] + relaxed.seconds[source],
                    transfer,
                    hop + relaxed.seconds[letter] + tails[letter][k],
                )
                for k in range(m)
            )
    return [
        ("link", sender, preemptive_one_machine(jobs))
        for (sender, _), jobs in links.items()
        if any(transfer for _, transfer, _ in jobs)
    ]


def preemptive_one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least possible end of jobs (head, seconds, tail) on one machine that may interrupt them.

    Jackson's preemptive schedule: at any time do, of the jobs whose head has passed, the one with the longest tail.
    Carlier 1982, "The one-machine sequencing problem", section 2. Raises nothing; no jobs take no time.
    """
    waiting = sorted(jobs)
    ready: list[tuple[float, float]] = []
    now, end, at = 0.0, 0.0, 0
    while at < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            heapq.heappush(ready, (-waiting[at][2], waiting[at][1]))
            at += 1
        tail, seconds = heapq.heappop(ready)
        until = waiting[at][0] if at < len(waiting) else math.inf
        if now + seconds > until:
            heapq.heappush(ready, (tail, seconds - (until - now)))
            now = until
        else:
            now += seconds
            end = max(end, now - tail)
    return end

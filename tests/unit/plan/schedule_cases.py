"""Random problems, and random schedules that are valid for them: within memory, free of deadlock."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from stageflow.graph import StageGraph
from stageflow.schedule import Action, Costs, Schedule
from stageflow.schedule.costs import at_stage
from stageflow.schedule.memory import Footprint, levels_of, peak_memory, static_memory
from stageflow.schedule.placement import contiguous, fold, loop
from stageflow.schedule.rules import depends_on


@dataclass(frozen=True)
class Case:
    """A scheduling problem; memory is one limit per worker, or None."""

    graph: StageGraph
    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    footprint: Footprint
    memory: tuple[float, ...] | None

    @property
    def arguments(self) -> dict[str, Any]:
        """As `find_schedule` takes them."""
        return {
            "stages": self.graph.n_stages,
            "placement": self.placement,
            "graph": self.graph,
            "microbatches": self.microbatches,
            "costs": self.costs,
            "footprint": self.footprint,
            "memory": self.memory,
        }

    def fits(self, schedule: Schedule) -> bool:
        if self.memory is None:
            return True
        return all(
            p <= limit + 1e-9 for p, limit in zip(peak_memory(schedule, self.footprint), self.memory, strict=True)
        )


def random_case(random: Random, *, workers: int = 4, microbatches: int = 6, skips: bool = True) -> Case:
    """Unequal stages, one to three a worker in any placement, links with and without transfer times, memory limits."""
    p = random.randint(1, workers)
    chunks = random.choice((1, 1, 2, 2, 3))
    stages = p * chunks
    placement = random.choice((loop, fold, contiguous))(stages, p)
    if random.random() < 0.2:
        free = [*range(p), *(random.randrange(p) for _ in range(stages - p))]
        random.shuffle(free)
        placement = tuple(free)
    edges = {(s, s + 1) for s in range(stages - 1)}
    if skips and stages > 2 and random.random() < 0.3:
        edges |= {tuple(sorted(random.sample(range(stages), 2))) for _ in range(2)}
    graph = StageGraph(stages, frozenset(edges))

    def times(low: int, high: int) -> list[float]:
        return [float(random.randint(low, high)) for _ in range(stages)]

    def links(high: int) -> float | dict[tuple[int, int], float]:
        if random.random() < 0.5:
            return float(random.randint(0, high))
        return {edge: float(random.randint(0, high)) for edge in edges}

    costs = Costs(
        times(1, 9),
        times(1, 9),
        times(0, 9),
        backward=random.choice((None, times(1, 18))),
        hop=links(3),
        transfer=random.choice((0.0, links(4))),
        recompute=random.choice((0.0, times(0, 5))),
        reduction=random.choice((0.0, times(0, 20))),
    )
    footprint = Footprint()
    if random.random() < 0.5:
        activation = times(1, 5)
        footprint = Footprint(
            times(0, 3), activation, random.choice((None, [random.uniform(0, a) for a in activation]))
        )
    memory = None
    if random.random() < 0.7:
        memory = tuple(_limit(random, footprint, placement, worker) for worker in range(p))
    return Case(graph, placement, random.randint(1, microbatches), costs, footprint, memory)


def _limit(random: Random, footprint: Footprint, placement: tuple[int, ...], worker: int) -> float:
    """From the least that any schedule needs to three times that."""
    local = [s for s, w in enumerate(placement) if w == worker]
    static = sum(at_stage(footprint.static, s) for s in local)
    return static + sum(at_stage(footprint.activation, s) for s in local) * random.choice((1.0, 1.5, 2.0, 3.0))


def random_schedule(random: Random, case: Case, split: bool | None) -> Schedule | None:
    """Any actions that may come next, in any order; None where it ran out of memory.

    split: whether backwards are split; None: each as it comes. Micro-batches come in any order too.
    """
    graph, placement = case.graph, case.placement
    stages = range(graph.n_stages)
    whole = {
        (s, m): (random.random() < 0.5) if split is None else not split
        for s in stages
        for m in range(case.microbatches)
    }
    left = {Action("F", s, m) for s, m in whole}
    left |= {Action(kind, s, m) for (s, m), b in whole.items() for kind in ("B" if b else "IW")}
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done: set[Action] = set()
    eager = random.choice((0.0, 0.5, 2.0))
    ages = {action: random.random() + eager * action.microbatch for action in left}
    while left:
        ready = [a for a in left if done.issuperset(depends_on(a, graph, lambda s, m: whole[s, m]))]
        ready.sort(key=lambda a: (ages[a], a))
        for action in ready:
            worker = placement[action.stage]
            orders[worker].append(action)
            if action.kind != "F" or case.memory is None or _has_room(orders[worker], case, worker):
                break
            orders[worker].pop()
        else:
            return None
        done.add(action)
        left.remove(action)
    schedule = Schedule("random", graph, placement, case.microbatches, tuple(map(tuple, orders)))
    return schedule if case.fits(schedule) else None


def _has_room(order: list[Action], case: Case, worker: int) -> bool:
    assert case.memory is not None
    kept = static_memory(case.footprint, case.placement, len(case.memory))[worker]
    return all(during <= case.memory[worker] + 1e-9 for _, during, _ in levels_of(order, case.footprint, kept))

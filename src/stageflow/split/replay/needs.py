"""Which stage computes, holds, sends and receives what, read off a trace and the places of the cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

from torch import nn

from stageflow.split.replay.events import TraceEvent, Value
from stageflow.split.replay.trace import Trace


@dataclass
class Needs:
    """What the stages need.

    stage_of: per event.
    states: per stage, names of the parameters and buffers whose values it uses.
    inputs: per stage, positions (of tensors in the model's input) whose values it uses.
    sends: (producer, consumer) -> keys of values, in order of birth.
    """

    stage_of: list[int]
    states: list[set[str]]
    inputs: list[set[int]]
    sends: dict[tuple[int, int], list[str]] = field(default_factory=dict)


class Flow:
    """The trace's values, with who makes, changes and uses them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.maker: dict[Value, TraceEvent] = {v: event for event in trace.events for v in event.makes}
        self.changers: dict[Value, list[TraceEvent]] = defaultdict(list)
        self.users: dict[Value, list[TraceEvent]] = defaultdict(list)
        for event in trace.events:
            for value in event.uses:
                self.users[value].append(event)
            for value in event.changes:
                self.changers[value].append(event)
        self.changed_states = {v for v in trace.states.values() if self.changers[v]}
        self.cheap = self._find_cheap()

    def _find_cheap(self) -> set[Value]:
        """Values that every stage can compute by itself: made, between atoms, of inputs and constant buffers alone.

        What is later changed in place by anything else is not among them, nor what is made of such values.
        """
        states = self.trace.states.values()
        expensive = {v for v in states if self.changers[v] or isinstance(v.tensor, nn.Parameter)}
        while True:
            before = len(expensive)
            for event in self.trace.events:
                if event.is_atom or any(v in expensive for v in event.uses):
                    expensive.update(event.makes)
                    expensive.update(event.changes)
            if len(expensive) == before:
                break
        known = {v for event in self.trace.events for v in event.makes}
        return {v for v in known | set(self.trace.inputs) | set(self.trace.states.values()) if v not in expensive}

    def within_checkpoints(self) -> frozenset[int]:
        """Events that share an activation checkpoint with others that matter."""
        regions: dict[int, list[int]] = defaultdict(list)
        for event in self.trace.events:
            for region in event.region:
                if event.is_atom or event.makes:
                    regions[region].append(event.number)
        return frozenset(number for numbers in regions.values() if len(numbers) > 1 for number in numbers)

    def forbidden(self) -> dict[int, str]:
        """Events right before which no cut may be, with the reason."""
        found: dict[int, str] = {}

        def forbid(first: int, last: int, reason: str) -> None:
            for number in range(first + 1, last + 1):
                found.setdefault(number, reason)

        for value in self.changed_states:
            last = self.changers[value][-1].number
            early = [e.number for e in self.users[value] + self.changers[value] if e.number <= last]
            forbid(min(early), last, f"buffer {value.key[2:]!r} is changed there by several parts of the model")
        self._forbid_shared_memory(forbid)
        for value in self.trace.inputs:
            if self.changers[value]:
                uses = [e.number for e in self.users[value]]
                forbid(self.changers[value][0].number, max(uses), "the model changes its input in place")
        for event in self.trace.events:
            if event.transforms:
                forbid(event.number, len(self.trace.events), "values from before it are transformed by torch.func")
            if event.by_autograd:
                first = min([v.born for v in event.uses[1:]], default=-1) if event.name == "grad" else -1
                forbid(first, event.number, "forward itself asks for a gradient through it")
        begun: dict[int, int] = {}
        for event in self.trace.events:
            for region in event.region:
                if event.is_atom or event.makes:
                    first = begun.setdefault(region, event.number)
                    forbid(first, event.number, "an activation checkpoint spans several modules")
        return found

    def _forbid_shared_memory(self, forbid: Callable[[int, int, str], None]) -> None:
        """A change in place shows in every tensor over the same memory; the copies a stage is sent are apart."""
        for event in self.trace.events:
            for one, other in permutations(event.changes, 2):
                apart = one in event.uses and other not in event.uses
                if apart and any(user.number > event.number for user in self.users[other]):
                    forbid(max(one.born, other.born), event.number, "a tensor is changed through another view of it")

    def needs(self, bounds: list[int], stages: int) -> Needs:
        """bounds: the first event of each stage but the first."""
        events = self.trace.events
        stage_of = [bisect_right(bounds, event.number) for event in events]
        result = Needs(stage_of, [set() for _ in range(stages)], [set() for _ in range(stages)])
        sends: dict[tuple[int, int], set[Value]] = defaultdict(set)
        for stage in range(stages):
            wanted = {v for event in events if stage_of[event.number] == stage for v in event.uses}
            if stage == stages - 1:
                wanted |= set(self.trace.output)
            for value in self._settle(wanted, stage, stage_of, result):
                sends[self._producer(value, stage, stage_of), stage].add(value)
        for edge, values in sends.items():
            ordered = sorted(values, key=lambda v: (v.born, v.key))
            result.sends[edge] = [v.key for v in ordered]
        return result

    def _settle(self, wanted: set[Value], stage: int, stage_of: list[int], result: Needs) -> set[Value]:
        """Split what a stage wants into what it holds, computes or gets from the user, noted in ``result``, and the
        rest, which it has to be sent."""
        todo, seen, sent = list(wanted), set(wanted), set()
        while todo:
            value = todo.pop()
            if value.key.startswith("s:"):
                last = self.changers[value][-1].number if value in self.changed_states else -1
                if last >= 0 and stage_of[last] < stage:
                    sent.add(value)
                else:
                    result.states[stage].add(value.key[2:])
            elif value.key.startswith("i"):
                result.inputs[stage].add(int(value.key[1:]))
            elif value.key.startswith("c") or (stage_of[value.born] == stage and value not in self.cheap):
                pass
            elif value in self.cheap:
                sources = [self.maker[value], *self.changers[value]]
                more = {v for event in sources for v in event.uses} - seen
                seen |= more
                todo.extend(more)
            elif stage_of[value.born] < stage:
                sent.add(value)
        return sent

    def _producer(self, value: Value, stage: int, stage_of: list[int]) -> int:
        """The stage that last changed, or made, a value before ``stage`` begins."""
        earlier = [stage_of[e.number] for e in self.changers[value] if stage_of[e.number] < stage]
        return max([*earlier, stage_of[value.born] if value.born >= 0 else 0])

"""What one stage has to know of a split by replay."""

from __future__ import annotations

from dataclasses import dataclass

from stageflow.split.replay.log import Log


@dataclass
class Part:
    """Read off the trace, and the same for every micro-batch.

    stage_of: (path, how many-th call) of every atom call seen in the trace -> its stage.
    end: the event at which the next stage begins, where that is no call of an atom.
    opened: modules that are taken apart.
    names: of the trace's events.
    choices: event -> outline of what it gave to Python that depends on data; the trace is typical while these recur,
    handed_back: and these: event -> which of its results is which of its arguments.
    sends: consumer -> keys of the values it needs, as seen in the trace.
    cautious: the model decides by data after this stage, so that the trace can't tell what later stages need.
    common: keys of values that every stage makes by itself.
    classes: of the values, for those that can't be found by name.
    draws_unseen: forward draws random numbers from Python's or numpy's generators.
    within_checkpoints: events that share an activation checkpoint with others.
    """

    index: int
    n_stages: int
    stage_of: dict[tuple[str, int], int]
    end: int | None
    opened: frozenset[str]
    names: tuple[str, ...]
    choices: dict[int, str]
    handed_back: dict[int, dict[int, int]]
    sends: dict[int, list[str]]
    cautious: bool
    common: frozenset[str]
    classes: dict[str, type]
    draws_unseen: bool
    within_checkpoints: frozenset[int]

    def is_typical(self, log: Log) -> bool:
        """Whether a timeline has taken the path of the trace so far."""
        n = len(log.names)
        if log.names != self.names[:n]:
            return False
        outcomes = log.outcomes
        return all(outcomes[k].outline == outline for k, outline in self.choices.items() if k < n) and all(
            which.items() <= outcomes[k].handed_back.items() for k, which in self.handed_back.items() if k < n
        )

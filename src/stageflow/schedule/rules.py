"""The one statement of what an action must wait for.

Lowering, validator, simulator and executor all ask here, so none of them can disagree with another.
"""

from __future__ import annotations

from collections.abc import Callable

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action


def depends_on(action: Action, graph: StageGraph, whole_backward: Callable[[int, int], bool]) -> tuple[Action, ...]:
    """The actions that must have ended, here or on another worker, before ``action`` may start.

        F  the F of every predecessor: it brings the inputs
        B  its own F, and the B or I of every successor: they bring the gradients of the outputs
        I  as B
        W  its own I, which keeps what W needs

    whole_backward(stage, microbatch): True where the backward is one B, False where it is an I and a W.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return tuple([Action("F", producer, microbatch) for producer in graph.predecessors(stage)])
    if kind == "W":
        return (Action("I", stage, microbatch),)
    gradients = [
        Action("B" if whole_backward(consumer, microbatch) else "I", consumer, microbatch)
        for consumer in graph.successors(stage)
    ]
    return (Action("F", stage, microbatch), *gradients)


def in_one_piece(stage: int, microbatch: int) -> bool:
    """For `depends_on` where only the values count: gradients are the same whether a B or an I sent them; told as B."""
    return True


def feeds(action: Action, graph: StageGraph) -> tuple[int, ...]:
    """The stages that need what ``action`` makes, beside its own: an F's successors, a B's or an I's predecessors."""
    if action.kind == "W":
        return ()
    return graph.successors(action.stage) if action.kind == "F" else graph.predecessors(action.stage)


def is_backward(action: Action) -> bool:
    """Whether the action hands gradients to the predecessors of its stage."""
    return action.kind in ("B", "I")

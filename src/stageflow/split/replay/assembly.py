"""From a trace and the places of the cuts to a Split."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stageflow.errors import SplitError
from stageflow.graph import StageGraph
from stageflow.split.replay.events import TraceEvent
from stageflow.split.replay.ghost import Ghost
from stageflow.split.replay.interception import tensors_in
from stageflow.split.replay.needs import Flow, Needs
from stageflow.split.replay.part import Part
from stageflow.split.replay.stage import ReplaySpec
from stageflow.split.request import Request
from stageflow.split.spec import InputsUsed, LayerInfo, Split
from stageflow.split.state import Census, assign_owners, named_state
from stageflow.transport.structure import flatten


def copy_model(model: nn.Module, replace: dict[int, Tensor] | None = None) -> nn.Module:
    """A copy that shares all parameters and buffers, but for those replaced (by id).

    Raises SplitError if the model can't be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor, _ in named_state(model)}
    memo.update(replace or {})
    for module in model.modules():  # results of an earlier call that lie around in attributes
        memo.update((id(t), t.detach()) for t in vars(module).values() if isinstance(t, Tensor) and not t.is_leaf)
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:
        raise SplitError(f"the model can't be copied: {problem}") from problem


@dataclass(frozen=True)
class Assembly:
    """All that a Split is made of.

    pieces: what the model was divided into, with their costs in ``unit``.
    cached: the model has a key-value cache, which is to be switched off.
    planned: the pieces were found by the model's own plan for pipelines.
    """

    request: Request
    census: Census
    flow: Flow
    needs: Needs
    pieces: list[TraceEvent]
    costs: list[float]
    unit: str
    cached: bool
    planned: bool

    def split(self) -> Split:
        """Put the stages together."""
        stages, needs = self.request.stages, self.needs
        holders = self._holders()
        owners, mirrors = assign_owners(self.census, holders)
        cautious = self._cautious()
        stage_of = {(e.name, e.call): needs.stage_of[e.number] for e in self.pieces if e.call is not None}
        within = self.flow.within_checkpoints()
        return Split(
            graph=StageGraph(stages, frozenset({(s, s + 1) for s in range(stages - 1)} | needs.sends.keys())),
            way="blocks",
            reason=self._reason(),
            specs=[
                self._spec(self._part(stage, stage_of, cautious[stage], within), holders[stage])
                for stage in range(stages)
            ],
            owners=owners,
            mirrors=mirrors,
            aliases=self.census.aliases,
            inputs_used=[None if any(cautious) else self._inputs_used(needs.inputs[s]) for s in range(stages)],
            layers=[
                LayerInfo(piece.label, cost, needs.stage_of[piece.number])
                for piece, cost in zip(self.pieces, self.costs, strict=True)
            ],
            tensors=self.census.tensors,
            unit=self.unit,
        )

    def _reason(self) -> str:
        by = "measured time" if self.unit == "s" else "parameters"
        reason = f"{type(self.request.model).__name__} in {len(self.pieces)} pieces, balanced by {by}"
        reason += "; blocks as in its config's base_model_pp_plan" if self.planned else ""
        return reason + ("; its key-value cache is switched off" if self.cached else "")

    def _part(self, stage: int, stage_of: dict[tuple[str, int], int], cautious: bool, within: frozenset[int]) -> Part:
        trace, needs = self.flow.trace, self.needs
        return Part(
            index=stage,
            n_stages=self.request.stages,
            stage_of=stage_of,
            end=self._end(stage),
            opened=trace.opened,
            names=tuple(e.name for e in trace.events),
            choices={e.number: e.outcome.outline for e in trace.events if e.extracts},
            handed_back={e.number: e.outcome.handed_back for e in trace.events if e.outcome.handed_back},
            sends={c: keys for (p, c), keys in sorted(needs.sends.items()) if p == stage},
            cautious=cautious,
            common=frozenset(value.key for value in self.flow.cheap),
            classes=trace.classes,
            draws_unseen=trace.draws_unseen,
            within_checkpoints=within,
        )

    def _spec(self, part: Part, held: set[str]) -> ReplaySpec:
        model = self.request.deferred
        if model is None:
            ghosts: dict[int, Tensor] = {}
            for name, tensor, _ in named_state(self.request.model):
                first = self.census.first_name(name)
                if first not in held:
                    ghosts[id(tensor)] = Ghost.of(f"s:{first}", tensor, tensor.device)
            model = copy_model(self.request.model, ghosts)
        return ReplaySpec(part.index, part, model, frozenset(held), dict(self.census.aliases), self.cached)

    def _end(self, stage: int) -> int | None:
        """The event at which a stage ends, where that is no call of an atom."""
        first = next((number for number, s in enumerate(self.needs.stage_of) if s > stage), None)
        return None if first is None or self.flow.trace.events[first].is_atom else first

    def _holders(self) -> list[set[str]]:
        """Per stage, the first names of the parameters and buffers it holds.

        What the example did not call may yet be called anywhere, so all stages hold it.
        """
        holders = [set(map(self.census.first_name, states)) for states in self.needs.states]
        stages: dict[str, int] = {}
        for piece in self.pieces:
            if piece.is_atom:
                stage = stages[piece.name] = self.needs.stage_of[piece.number]
                holders[stage].update(self._names_within(piece.name))
        for path in self.flow.trace.atom_paths:
            if path not in stages:
                for holder in holders:
                    holder.update(self._names_within(path))
        holders[0] |= self.census.tensors.keys() - set().union(*holders)  # never used, but it has to be somewhere
        return holders

    def _names_within(self, path: str) -> set[str]:
        prefix = f"{path}." if path else ""
        inside = named_state(self.request.model.get_submodule(path))
        return {self.census.first_name(prefix + name) for name, _, _ in inside}

    def _cautious(self) -> list[bool]:
        """Per stage, whether the model still decides by data or chance once the stage is over."""
        trace, stages = self.flow.trace, self.request.stages
        if trace.draws_unseen:
            return [stage < stages - 1 for stage in range(stages)]
        last = max((self.needs.stage_of[e.number] for e in trace.events if e.extracts), default=-1)
        return [stage < last for stage in range(stages)]

    def _inputs_used(self, positions: set[int]) -> InputsUsed:
        """positions: of tensors, counted through all arguments. Of numpy arrays nobody sees who reads them."""
        assert self.request.example is not None
        args, kwargs = self.request.example
        used: list[Any] = []
        count = 0
        for key, value in [*enumerate(args), *kwargs.items()]:
            end = count + len(tensors_in(value))
            if any(count <= position < end for position in positions) or _holds_array(flatten(value)[1]):
                used.append(key)
            count = end
        names = frozenset(key for key in used if isinstance(key, str))
        return InputsUsed(frozenset(key for key in used if isinstance(key, int)), names)


def _holds_array(outline: Any) -> bool:
    """Whether a value has numpy arrays in it, by its outline (see `flatten`)."""
    if isinstance(outline, list):
        return any(map(_holds_array, outline))
    if isinstance(outline, dict):
        return not outline.keys().isdisjoint({"numpy", "numpy_scalar"}) or any(map(_holds_array, outline.values()))
    return False

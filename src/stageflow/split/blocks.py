"""Any nn.Module, cut between the modules it calls: every stage replays the model's own forward. See `split.replay`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageflow.errors import SplitError
from stageflow.graph import StageGraph
from stageflow.split.follow import with_values
from stageflow.split.measure import ROUNDS, smooth, timed, undisturbed
from stageflow.split.replay.ghost import Ghost
from stageflow.split.replay.interception import tensors_in
from stageflow.split.replay.needs import Flow, Needs
from stageflow.split.replay.opening import Opening, record_calls
from stageflow.split.replay.program import Plan, ReplaySpec, haunt, switch_cache_off
from stageflow.split.replay.trace import Event, Trace, run_trace
from stageflow.split.request import Request
from stageflow.split.spec import InputsUsed, LayerInfo, Split
from stageflow.split.state import assign_owners, named_state, take_census

ATTEMPTS = 30
CPU = torch.device("cpu")


def cut(request: Request) -> Split:
    """Cut a model between the modules it calls.

    Raises SplitError if the model does not run on the example or can't be cut into so many stages.
    """
    if request.example is None:
        raise SplitError("following the model's forward takes example inputs: pass example=")
    census = take_census(request.model)
    hollow = request.deferred is not None
    work = _copy_model(request.model, {})
    cached = "use_cache" not in request.example[1] and switch_cache_off(work)
    if hollow:
        buffers = {census.first_name(name) for name, _, kind in named_state(work) if kind == "buffer"}
        haunt(work, buffers, census.aliases, CPU)
    with undisturbed(work), _own_chance():
        with torch.set_grad_enabled(not hollow):
            trace = _trace(work, request)
        pieces = _pieces(trace, request.stages)
        costs, unit = _costs(request.model if hollow else work, pieces, request)
    flow = Flow(trace)
    bounds = _choose(request, flow, pieces, costs)
    needs = flow.needs([pieces[b].number for b in bounds[1:-1]], request.stages)
    return _assemble(request, census, trace, flow, needs, pieces, costs, unit, cached)


@contextmanager
def _own_chance() -> Iterator[None]:
    """Random numbers of our own: a forward that leaves layers out by chance is to be seen the same way each time."""
    states = random.getstate(), np.random.get_state()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _trace(work: nn.Module, request: Request) -> Trace:
    """Record the model on the example, taken apart until nothing escapes and there are cuts enough."""
    assert request.example is not None
    hollow = request.deferred is not None
    opening = Opening(work, record_calls(work, request.example, hollow))
    opening.start()
    for path in request.boundaries or ():
        if not opening.open_around(path):
            raise SplitError(f"boundary {path!r} is no module that the model calls on the example")
    trace = None
    for _ in range(ATTEMPTS):
        trace = run_trace(work, request.example, opening.opened, hollow)
        if "" in trace.sealed:
            raise SplitError(f"the model can't be taken apart: {trace.sealed['']}")
        for path in trace.sealed:
            opening.seal(path)
        for path in trace.escapes.keys() - opening.sealed:
            opening.open(path)
        if trace.opened == opening.opened and not trace.escapes:
            if request.boundaries is not None or _possible(trace) >= request.stages or not opening.grow():
                return trace
    escapes = trace.escapes if trace is not None else {}
    raise SplitError("; ".join(f"{path!r} can't be followed: {reason}" for path, reason in escapes.items()))


def _possible(trace: Trace) -> int:
    forbidden = Flow(trace).forbidden()
    return sum(event.is_atom and event.number not in forbidden for event in trace.events)


def _pieces(trace: Trace, stages: int) -> list[Event]:
    """The events before which a cut may be: calls of atoms; if these are too few, also the uses of bare parameters."""
    enough = _possible(trace) >= stages
    return [event for event in trace.events if event.is_atom or (not enough and event.parameter is not None)]


def _choose(request: Request, flow: Flow, atoms: list[Event], costs: list[float]) -> list[int]:
    forbidden = flow.forbidden()
    allowed = {k for k, event in enumerate(atoms) if k and event.number not in forbidden}
    try:
        return request.choose_cuts([event.label for event in atoms], costs, allowed)
    except SplitError as problem:
        reasons = sorted({reason for event in atoms if (reason := forbidden.get(event.number))})
        raise SplitError("; ".join([str(problem), *reasons[:3]])) from None


def _costs(work: nn.Module, atoms: list[Event], request: Request) -> tuple[list[float], str]:
    sizes = [_size(work, event) for event in atoms]
    if request.balance == "parameters" or not all(event.is_atom for event in atoms):
        return sizes, "parameters"
    samples: list[list[float]] = [[] for _ in atoms]
    kinds = [_kind(work, event) for event in atoms]
    for _ in range(ROUNDS):
        for number, event in enumerate(atoms):
            module = work.get_submodule(event.name)
            if request.deferred is not None:
                module = with_values(module)
            seconds, _ = timed(lambda e, m=module: m(*e[0], **e[1]), event.example, module.parameters(), number > 0)
            samples[number].append(seconds)
    return smooth(samples, kinds), "s"


def _size(work: nn.Module, piece: Event) -> float:
    if piece.is_atom:
        return float(sum(p.numel() for p in work.get_submodule(piece.name).parameters()))
    return float(sum(v.tensor.numel() for v in piece.uses if v.key.startswith("s:")))


def _kind(work: nn.Module, event: Event) -> object:
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_in(event.example))
    return repr(work.get_submodule(event.name)), shapes


def _copy_model(model: nn.Module, replace: dict[int, Tensor]) -> nn.Module:
    """A copy that shares all parameters and buffers but those replaced (by id)."""
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor, _ in named_state(model)}
    memo.update(replace)
    for module in model.modules():  # results of an earlier call that lie around in attributes
        memo.update((id(t), t.detach()) for t in module.__dict__.values() if isinstance(t, Tensor) and not t.is_leaf)
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:
        raise SplitError(f"the model can't be copied: {problem}") from problem


def _assemble(
    request: Request,
    census: Any,
    trace: Trace,
    flow: Flow,
    needs: Needs,
    atoms: list[Event],
    costs: list[float],
    unit: str,
    cached: bool,
) -> Split:
    model, stages = request.model, request.stages
    holders = _holders(model, census, trace, needs, atoms)
    owners, mirrors = assign_owners(census, holders)
    edges = {(s, s + 1) for s in range(stages - 1)} | set(needs.sends)
    cautious = _cautious(trace, needs, stages)
    within = flow.within_checkpoints()
    specs = []
    for stage in range(stages):
        plan = Plan(
            index=stage,
            n_stages=stages,
            stage_of={(e.name, e.call): needs.stage_of[e.number] for e in atoms if e.call is not None},
            end=_end(trace, needs, stage),
            opened=trace.opened,
            names=tuple(e.name for e in trace.events),
            choices={e.number: e.outcome.outline for e in trace.events if e.extracts},
            handed_back={e.number: e.outcome.handed_back for e in trace.events if e.outcome.handed_back},
            sends={c: keys for (p, c), keys in sorted(needs.sends.items()) if p == stage},
            cautious=cautious[stage],
            common=frozenset(v.key for v in flow.cheap),
            classes=trace.classes,
            draws_unseen=trace.draws_unseen,
            within_checkpoints=within,
        )
        part = request.deferred
        if part is None:
            ghosts = {
                id(tensor): Ghost.of(f"s:{census.first_name(name)}", tensor, tensor.device)
                for name, tensor, _ in named_state(model)
                if census.first_name(name) not in holders[stage]
            }
            part = _copy_model(model, ghosts)
        specs.append(ReplaySpec(stage, plan, part, frozenset(holders[stage]), dict(census.aliases), cached))
    return Split(
        graph=StageGraph(stages, frozenset(edges)),
        way="blocks",
        reason=f"{type(model).__name__} in {len(atoms)} pieces, balanced by "
        + ("measured time" if unit == "s" else unit)
        + (", key-value cache switched off" if cached else ""),
        specs=specs,
        owners=owners,
        mirrors=mirrors,
        aliases=census.aliases,
        inputs_used=[_inputs_used(request, needs.inputs[s], any(cautious)) for s in range(stages)],
        layers=[LayerInfo(e.label, c, needs.stage_of[e.number]) for e, c in zip(atoms, costs, strict=True)],
        tensors=census.tensors,
        unit=unit,
    )


def _holders(model: nn.Module, census: Any, trace: Trace, needs: Needs, atoms: list[Event]) -> list[set[str]]:
    """Per stage, the first names of the parameters and buffers it holds."""
    holders = [{census.first_name(name) for name in states} for states in needs.states]
    for event in atoms:
        if event.is_atom:
            holders[needs.stage_of[event.number]].update(_names_within(model, event.name, census))
    called = {event.name for event in atoms if event.is_atom}
    last = 0
    for path in trace.atom_paths:  # in the model's order
        if path in called:
            last = max(needs.stage_of[e.number] for e in atoms if e.name == path)
            continue
        names = _names_within(model, path, census)
        holders[last].update(names)
        for holder in holders:
            holder.update(names)
    holders[0] |= census.tensors.keys() - set().union(*holders)  # never used, but it has to be somewhere
    return holders


def _end(trace: Trace, needs: Needs, stage: int) -> int | None:
    """The event at which a stage ends, where that is no call of an atom."""
    first = next((n for n, s in enumerate(needs.stage_of) if s > stage), None)
    return None if first is None or trace.events[first].is_atom else first


def _names_within(model: nn.Module, path: str, census: Any) -> set[str]:
    return {census.first_name(f"{path}.{name}" if path else name) for name, _, _ in named_state(model.get_submodule(path))}


def _cautious(trace: Trace, needs: Needs, stages: int) -> list[bool]:
    """Per stage, whether the model still decides by data once the stage is over."""
    if trace.draws_unseen:
        return [True] * (stages - 1) + [False]
    last = max((e.number for e in trace.events if e.extracts), default=-1)
    stage = needs.stage_of[last] if last >= 0 else -1
    return [s < stage for s in range(stages)]


def _inputs_used(request: Request, positions: set[int], everything: bool) -> InputsUsed | None:
    assert request.example is not None
    if everything:
        return None
    args, kwargs = request.example
    count, used_args, used_kwargs = 0, set(), set()
    for key, value in [*enumerate(args), *kwargs.items()]:
        n = len(tensors_in(value))
        if positions & set(range(count, count + n)):
            (used_args if isinstance(key, int) else used_kwargs).add(key)
        count += n
    return InputsUsed(frozenset(used_args), frozenset(used_kwargs))

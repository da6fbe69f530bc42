"""Any nn.Module, cut between the modules it calls: every stage replays the model's own forward. See `split.replay`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from stageflow.errors import SplitError
from stageflow.split.hooks import refuse_backward_hooks
from stageflow.split.measure import undisturbed
from stageflow.split.replay.assembly import Assembly, copy_model
from stageflow.split.replay.costs import NotMeasured, count_parameters, measure
from stageflow.split.replay.events import TraceEvent
from stageflow.split.replay.interception import is_compiled
from stageflow.split.replay.needs import Flow
from stageflow.split.replay.opening import Opening, record_calls
from stageflow.split.replay.stage import haunt, switch_cache_off
from stageflow.split.replay.trace import Trace, run_trace
from stageflow.split.request import ExampleFailed, Request
from stageflow.split.spec import Split
from stageflow.split.state import named_state, take_census

ATTEMPTS = 30
CPU = torch.device("cpu")


def cut(request: Request) -> Split:
    """Cut a model between the modules it calls.

    The model itself is not run and not changed: a copy that shares its weights is.
    Raises SplitError if the model does not run on the example or can't be cut into so many stages.
    """
    if request.example is None:
        raise SplitError("following the model's forward takes example inputs: pass example=")
    _refuse(request.model)
    census = take_census(request.model)
    hollow = request.deferred is not None
    work = copy_model(request.model)
    cached = "use_cache" not in request.example[1] and switch_cache_off(work)
    if hollow:
        buffers = {census.first_name(name) for name, _, kind in named_state(work) if kind == "buffer"}
        haunt(work, buffers, census.aliases, CPU)
    with undisturbed(work), _own_chance():
        with torch.set_grad_enabled(not hollow):
            trace, planned = _trace(work, request)
        pieces = _pieces(trace, request.stages)
        costs, warnings = count_parameters(request.model, pieces), []
        unit = "parameters"
        if request.balance == "time":
            try:
                costs, unit = measure(request.model if hollow else work, request.example, pieces, hollow), "s"
            except NotMeasured as problem:
                if request.boundaries is None:
                    warnings.append(f"balanced by parameters, since {problem}")
    flow = Flow(trace)
    bounds = _choose(request, flow, pieces, costs)
    needs = flow.needs([pieces[bound].number for bound in bounds[1:-1]], request.stages)
    split = Assembly(request, census, flow, needs, pieces, costs, unit, cached, planned).split()
    split.warnings += warnings
    return split


def _refuse(model: nn.Module) -> None:
    """Name what hides its code, or could not be met alike on all workers."""
    refuse_backward_hooks(model)
    if is_compiled(model):
        raise SplitError("the model as a whole came from torch.compile: pass the module that it was made from")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SplitError(f"{path or 'the model'!r} is a scripted module: pass the module that it was made from")


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


def _trace(work: nn.Module, request: Request) -> tuple[Trace, bool]:
    """Record the model on the example, taken apart until nothing escapes and there are cuts enough.

    Also returns whether its blocks are those of the model's own plan.
    """
    assert request.example is not None
    hollow = request.deferred is not None
    try:
        calls = record_calls(work, request.example, hollow)
    except Exception as problem:
        raise ExampleFailed(
            f"running {type(request.model).__name__} on the example failed: {type(problem).__name__}: {problem}"
        ) from problem
    opening = Opening(work, calls)
    opening.start()
    for path in request.boundaries or ():
        if not opening.open_around(path):
            raise SplitError(f"boundary {path!r} is no module that the model calls on the example")
    reasons: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        trace = run_trace(work, request.example, opening.opened, hollow)
        sealed = trace.surroundings.sealed
        if "" in sealed:
            raise SplitError(f"the model can't be taken apart: {sealed['']}")
        for path in sealed:
            opening.seal(path)
        for path in trace.escapes.keys() - opening.sealed:
            opening.open(path)
        if opening.opened == trace.opened and not trace.escapes:
            enough = request.boundaries is not None or _possible(trace) >= request.stages
            if enough or not opening.grow():
                return trace, opening.planned
        reasons = trace.escapes
    raise SplitError("; ".join(f"{path!r} can't be followed: {reason}" for path, reason in reasons.items()))


def _possible(trace: Trace) -> int:
    """How many stages could be cut at calls of atoms."""
    forbidden = Flow(trace).forbidden()
    return sum(event.is_atom and event.number not in forbidden for event in trace.events)


def _pieces(trace: Trace, stages: int) -> list[TraceEvent]:
    """The events before which a cut may be: calls of atoms; if these are too few, also the uses of bare parameters."""
    enough = _possible(trace) >= stages
    return [event for event in trace.events if event.is_atom or (not enough and event.parameter is not None)]


def _choose(request: Request, flow: Flow, pieces: list[TraceEvent], costs: list[float]) -> list[int]:
    forbidden = flow.forbidden()
    allowed = {k for k, piece in enumerate(pieces) if k and piece.number not in forbidden}
    try:
        return request.choose_cuts([piece.label for piece in pieces], costs, allowed)
    except SplitError as problem:
        reasons = sorted({forbidden[piece.number] for piece in pieces if piece.number in forbidden})
        raise SplitError("; ".join([str(problem), *reasons[:3]])) from None

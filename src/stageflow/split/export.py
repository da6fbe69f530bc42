"""Any model whose forward torch.export can capture: its graph of operations, cut into runs of equal time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from stageflow.errors import SplitError
from stageflow.split.balance import chain_min_max
from stageflow.split.capture import Args, Capture, capture
from stageflow.split.graph_stages import assemble
from stageflow.split.hooks import refuse_backward_hooks
from stageflow.split.measure import undisturbed
from stageflow.split.pieces import (
    ROUNDS,
    Observed,
    Piece,
    crossing_bytes,
    find_pieces,
    forbidden,
    matching_bounds,
    observe,
)
from stageflow.split.request import Request
from stageflow.split.spec import LayerInfo, Split
from stageflow.split.state import Census, named_state, take_census
from stageflow.transport.structure import flatten

TOLERANCE = 0.03  # of the slowest stage; measured times are no more exact, and fewer bytes cross for it
_VERIFIED_TO = 1e-3  # of the largest value of an output or gradient


def cut(request: Request) -> Split:
    """Cut a model's captured graph.

    Values go straight from the stage that makes them to each stage that uses them. Both the train and the eval graph
    are captured; where eval can't be, the split says so in its warnings.

    Raises SplitError where torch.export fails, or gives a graph with other outputs or gradients than the model.
    """
    if request.example is None:
        raise SplitError("capturing a graph takes example inputs: pass example=")
    warnings: list[str] = []
    model = request.model
    if request.deferred is not None:
        model = request.deferred.materialise(request.deferred.shapes.keys())
        warnings.append("the whole model was built once, here, to capture its graph; each worker builds its part")
    _refuse_mixed_modes(model)
    refuse_backward_hooks(model)
    census = take_census(model)
    seen = _look(model, request.example, census, training=True)
    pieces = find_pieces(seen.graph.nodes)
    if not pieces:
        raise SplitError("the captured graph is empty: the model computes nothing")
    costs = _costs(request, seen, pieces, census)
    bounds = _bounds(request, seen, pieces, costs)
    captures = {True: (seen.graph, bounds)}
    try:
        other = _look(model, request.example, census, training=False)
        bad = forbidden(other.graph, other.observed, seen.changed)
        captures[False] = other.graph, matching_bounds(seen.graph.nodes, bounds, other.graph.nodes, bad)
    except SplitError as problem:
        warnings.append(f"no evaluation: {problem}")
    result = assemble(request, model, census, captures, seen.observed.draws)
    result.layers = _layers(model, pieces, costs, bounds)
    result.unit = "s" if request.balance == "time" else "parameters"
    result.warnings += warnings
    return result


def _refuse_mixed_modes(model: nn.Module) -> None:
    """A graph is captured in train mode and in eval mode, each as a whole."""
    flags = {name: module.training for name, module in model.named_modules()}
    with undisturbed(model, model.training):
        odd = next((name for name, module in model.named_modules() if module.training != flags[name]), None)
    if odd is not None:
        own, whole = ("train", "eval") if flags[odd] else ("eval", "train")
        raise SplitError(f"{odd!r} is in {own} mode and the model in {whole} mode, which a captured graph can't keep")


@dataclass
class _Seen:
    """A mode's graph and what running it showed. changed: names of the buffers that it changes."""

    graph: Capture
    observed: Observed
    changed: set[str]


def _look(model: nn.Module, example: Args, census: Census, training: bool) -> _Seen:
    """Capture a mode's graph, and make sure that it does what the model does."""
    truth = _run_plain(model, example, training)
    graph = capture(model, example, census, training)
    with undisturbed(model, training), torch.enable_grad():
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        torch.manual_seed(0)
        observed = observe(graph, _placeholder_values(model, graph, example), ROUNDS if training else 1)
        changed = {name for name, buffer in model.named_buffers() if not torch.equal(before[name], buffer)}
        outputs = [leaf for leaf in observed.outputs if isinstance(leaf, Tensor)]
        gradients = _gradients(model, outputs)
    if len(outputs) != len(truth.outputs) or not all(map(_close, outputs, truth.outputs)):
        raise SplitError(f"the captured graph gives other outputs than {type(model).__name__} on the example")
    for name, gradient in truth.gradients.items():
        if not _close(gradients.get(name), gradient):
            raise SplitError(f"the captured graph gives {name!r} another gradient than {type(model).__name__}")
    return _Seen(graph, observed, changed)


@dataclass
class _Truth:
    """What the model itself gives: outputs and the gradients of `_probe`, by parameter name."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]


def _run_plain(model: nn.Module, example: Args, training: bool) -> _Truth:
    with undisturbed(model, training), torch.enable_grad():
        torch.manual_seed(0)
        try:
            outputs = list(flatten(model(*example[0], **example[1]))[0].values())
            gradients = _gradients(model, outputs)
        except Exception as problem:
            raise SplitError(f"{type(model).__name__} fails on the example: {problem}") from problem
        _refuse_own_backward(outputs)
        return _Truth(outputs, gradients)


def _refuse_own_backward(outputs: list[Tensor]) -> None:
    """torch.export takes the forward of a custom function apart and forgets its backward: other gradients, no error."""
    for node in _autograd_nodes(outputs):
        if isinstance(node, BackwardCFunction):
            function = type(node)._forward_cls  # type: ignore[attr-defined]
            if not function.__module__.startswith("torch."):
                raise SplitError(
                    f"the custom autograd function {function.__name__} would lose its own backward in a captured graph"
                )


def _autograd_nodes(outputs: list[Tensor]) -> Iterator[Any]:
    stack = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions)


def _gradients(model: nn.Module, outputs: list[Any]) -> dict[str, Tensor | None]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    if not roots or not trained:
        return {}
    probe = torch.stack([t.abs().float().square().mean() for t in roots if t.numel()]).sum()
    return dict(zip(trained, torch.autograd.grad(probe, list(trained.values()), allow_unused=True), strict=True))


def _close(ours: Tensor | None, true: Tensor | None) -> bool:
    if ours is None or true is None:
        other = ours if true is None else true
        return other is None or not other.any()
    if ours.shape != true.shape or ours.dtype != true.dtype:
        return False
    scale = float(true.detach().abs().max()) if true.numel() else 0.0
    return torch.allclose(ours, true, rtol=_VERIFIED_TO, atol=_VERIFIED_TO * scale, equal_nan=True)


def _placeholder_values(model: nn.Module, graph: Capture, example: Args) -> list[Any]:
    state: dict[str, Any] = {name: tensor for name, tensor, _ in named_state(model)}
    leaves = pytree.tree_leaves(example)
    kinds = {"state": state, "constant": graph.constants, "input": dict(enumerate(leaves))}
    return [
        kinds[source.kind][int(source.key) if source.kind == "input" else source.key]
        for source in graph.sources.values()
    ]


def _costs(request: Request, seen: _Seen, pieces: list[Piece], census: Census) -> list[float]:
    graph, seconds = seen.graph, seen.observed.costs
    nodes = graph.nodes
    ends = [piece.start for piece in pieces[1:]] + [len(nodes)]
    if request.balance == "time":
        return [sum(seconds[node.name] for node in nodes[p.start : end]) for p, end in zip(pieces, ends, strict=True)]
    counted: set[str] = set()
    costs = []
    for piece, end in zip(pieces, ends, strict=True):
        used = {graph.sources[i].key for n in nodes[piece.start : end] for i in n.all_input_nodes if i in graph.sources}
        new = [name for name in used - counted if name in census.tensors and census.tensors[name].kind == "parameter"]
        counted.update(new)
        costs.append(float(sum(census.tensors[name].numel for name in new)))
    return costs


def _bounds(request: Request, seen: _Seen, pieces: list[Piece], costs: list[float]) -> list[int]:
    """Bounds of the stages among the graph's operations."""
    bad = forbidden(seen.graph, seen.observed, seen.changed)
    allowed = {i for i, piece in enumerate(pieces) if i and piece.start not in bad}
    best = request.choose_cuts([piece.path for piece in pieces], costs, allowed)
    if request.boundaries is None and request.balance == "time" and request.stages > 1:
        best = _fewest_bytes(seen, pieces, costs, sorted(allowed), best)
    return [pieces[bound].start for bound in best[:-1]] + [len(seen.graph.nodes)]


def _fewest_bytes(
    seen: _Seen, pieces: list[Piece], costs: list[float], allowed: list[int], best: list[int]
) -> list[int]:
    """Among cuts nearly as balanced as ``best``, those across which the least has to travel."""
    stages = len(best) - 1
    limit = (1 + TOLERANCE) * _slowest(costs, best)
    crossing = crossing_bytes(seen.graph.nodes, [pieces[i].start for i in allowed], seen.observed.nbytes)
    for most in sorted(set(crossing)):
        narrow = {i for i, nbytes in zip(allowed, crossing, strict=True) if nbytes <= most}
        if len(narrow) >= stages - 1:
            bounds = chain_min_max(costs, stages, allowed=narrow)
            if _slowest(costs, bounds) <= limit:
                return bounds
    return best


def _slowest(costs: list[float], bounds: list[int]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise(bounds))


def _layers(model: nn.Module, pieces: list[Piece], costs: list[float], bounds: list[int]) -> list[LayerInfo]:
    stage_of = [sum(piece.start >= bound for bound in bounds[1:-1]) for piece in pieces]
    root = type(model).__name__
    return [LayerInfo(p.path or root, cost, s) for p, cost, s in zip(pieces, costs, stage_of, strict=True)]

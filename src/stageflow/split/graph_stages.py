"""From a captured graph and its cuts to the specs of the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stageflow.graph import StageGraph, StageSpec
from stageflow.split.capture import Capture, Source
from stageflow.split.graph_program import GraphSpec, Named, StageCode, draw
from stageflow.split.request import Request
from stageflow.split.spec import InputsUsed, Split
from stageflow.split.state import Census, assign_owners, named_state

Mode = tuple[Capture, list[int]]


@dataclass
class _Part:
    """One stage's share of one mode's graph.

    takes: what it needs from outside, in order of first use. sends: consumer -> nodes.
    """

    nodes: list[fx.Node]
    takes: list[fx.Node] = field(default_factory=list)
    sends: dict[int, list[fx.Node]] = field(default_factory=dict)


def assemble(request: Request, model: nn.Module, census: Census, captures: dict[bool, Mode], draws: set[str]) -> Split:
    """Make the stages.

    captures: training -> graph and bounds of the stages among its operations. draws: operations that draw.
    """
    n_stages = request.stages
    parts = {training: _share_out(graph, bounds) for training, (graph, bounds) in captures.items()}
    held: list[set[str]] = [set() for _ in range(n_stages)]
    for training, (graph, _) in captures.items():
        for stage, part in enumerate(parts[training]):
            sources = [graph.sources[node] for node in part.takes if node in graph.sources]
            held[stage] |= {source.key for source in sources if source.kind == "state"}
    held[0] |= census.tensors.keys() - set().union(*held)
    owners, mirrors = assign_owners(census, held)
    edges = {(s, c) for shares in parts.values() for s, part in enumerate(shares) for c in part.sends}
    graph_of_stages = StageGraph(n_stages, frozenset(edges))
    state: dict[str, Tensor] = {name: tensor for name, tensor, _ in named_state(model)}
    specs: list[StageSpec] = []
    for stage in range(n_stages):
        modes = {
            training: _code(graph, parts[training], stage, n_stages, draws) for training, (graph, _) in captures.items()
        }
        names = [name for name in census.tensors if name in held[stage]]
        specs.append(
            GraphSpec(
                index=stage,
                n_stages=n_stages,
                modes=modes,
                state={name: census.tensors[name].kind for name in names},
                successors=graph_of_stages.successors(stage),
                weights=request.deferred or {name: state[name] for name in names},
                training=model.training,
            )
        )
    operations = len(captures[True][0].nodes)
    balanced_by = "measured time" if request.balance == "time" else "parameters"
    return Split(
        graph=graph_of_stages,
        way="export",
        reason=f"graph of {operations} operations, balanced by {balanced_by}",
        specs=specs,
        owners=owners,
        mirrors=mirrors,
        aliases=census.aliases,
        inputs_used=[_inputs_used(captures, parts, stage) for stage in range(n_stages)],
        layers=[],
        tensors=census.tensors,
    )


def _share_out(graph: Capture, bounds: list[int]) -> list[_Part]:
    """Each stage's operations, with what crosses between stages."""
    nodes = graph.nodes
    parts = [_Part(nodes[start:end]) for start, end in pairwise(bounds)]
    home = {node: stage for stage, part in enumerate(parts) for node in part.nodes}

    def use(node: fx.Node, stage: int) -> None:
        if node.op == "get_attr" or home.get(node) == stage or node in parts[stage].takes:
            return
        parts[stage].takes.append(node)
        if node in home:
            parts[home[node]].sends.setdefault(stage, []).append(node)

    for stage, part in enumerate(parts):
        for node in part.nodes:
            for value in node.all_input_nodes:
                use(value, stage)
    for node in _output_nodes(graph):
        use(node, len(parts) - 1)
    return parts


def _code(graph: Capture, parts: list[_Part], stage: int, n_stages: int, draws: set[str]) -> StageCode:
    part = parts[stage]
    home = {node: number for number, share in enumerate(parts) for node in share.nodes}
    drawing = [node for node in graph.nodes if node.name in draws or _may_draw(node)]
    is_last = stage == n_stages - 1
    outputs = _output_nodes(graph) if is_last else []
    gives = list(dict.fromkeys([*(node for nodes in part.sends.values() for node in nodes), *outputs]))
    text, names, modules = _source(graph, part, gives, {node: k for k, node in enumerate(drawing)})
    takes = [graph.sources[node] if node in graph.sources else (home[node], node.name) for node in part.takes]
    constants = {s.key for s in takes if isinstance(s, Source) and s.kind == "constant"}
    return StageCode(
        source=text,
        names=names,
        modules=modules,
        takes=takes,
        gives=[node.name for node in gives],
        sends={consumer: [node.name for node in nodes] for consumer, nodes in part.sends.items()},
        constants={name: graph.constants[name] for name in constants},
        contract=graph.contract,
        output=pytree.tree_map_only(fx.Node, lambda node: Named(node.name), graph.output) if is_last else None,
    )


def _output_nodes(graph: Capture) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(graph.output) if isinstance(leaf, fx.Node)]


def _may_draw(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _source(
    graph: Capture, part: _Part, gives: list[fx.Node], draw_numbers: dict[fx.Node, int]
) -> tuple[str, dict[str, Any], dict[str, nn.Module]]:
    """Text of a function of (seed, *takes) that returns the tuple of ``gives``, and what it refers to."""
    stage = fx.Graph()
    seed = stage.placeholder("seed")
    copies = {node: stage.placeholder(node.name) for node in part.takes}
    modules: dict[str, nn.Module] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a nested block of operations, named where it is used
            assert node.op == "get_attr"
            modules[str(node.target)] = graph.root.get_submodule(str(node.target))
            copies[node] = stage.node_copy(node)
        return copies[node]

    for node in part.nodes:
        inputs = {value: copy_of(value) for value in node.all_input_nodes}
        if node in draw_numbers:
            stage.call_function(draw, (seed, draw_numbers[node]))
        copies[node] = stage.node_copy(node, inputs.__getitem__)
    stage.output(tuple(copies[node] for node in gives))
    code = stage.python_code("self")
    return code.src, dict(code.globals), modules


def _inputs_used(captures: dict[bool, Mode], parts: dict[bool, list[_Part]], stage: int) -> InputsUsed:
    arguments: set[int | str] = set()
    for training, (graph, _) in captures.items():
        owners = graph.contract.top_level()
        for node in parts[training][stage].takes:
            source = graph.sources.get(node)
            if source is not None and source.kind == "input":
                arguments.add(owners[int(source.key)])
    positions = frozenset(a for a in arguments if isinstance(a, int))
    return InputsUsed(positions, frozenset(a for a in arguments if isinstance(a, str)))

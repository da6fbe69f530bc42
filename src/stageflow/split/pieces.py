"""A captured graph as a chain of pieces that may be cut apart, and what each piece costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from stageflow.split.capture import Capture

ROUNDS = 3
BACKWARD_OVER_FORWARD = 2.0  # what the backward of a matrix product or convolution takes, two products for one


@dataclass
class Piece:
    """Consecutive operations of one module, that stay together.

    start: position of the first operation. path: of the module.
    """

    start: int
    path: str


def find_pieces(nodes: list[fx.Node]) -> list[Piece]:
    """Group operations by the module they were called in; parts of a tuple stay with it."""
    pieces: list[Piece] = []
    for position, node in enumerate(nodes):
        path = module_path(node)
        if pieces and (path is None or path == pieces[-1].path or _is_part(node)):
            continue
        pieces.append(Piece(position, path or ""))
    return pieces


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module whose forward made this operation."""
    stack = [entry[0] for key, entry in (node.meta.get("nn_module_stack") or {}).items() if not key.startswith("_")]
    return stack[-1] if stack else None


def _is_part(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def forbidden(capture: Capture, observed: Observed, changed: set[str]) -> set[int]:
    """Positions right before which there may be no cut, lest a change in place be missed on the other side.

    changed: names of the state that a forward was seen to change.
    """
    nodes = capture.nodes
    position = {node: i for i, node in enumerate(nodes)}
    groups = _alias_groups(capture, nodes, observed)
    bad: set[int] = set()
    for members in groups.values():
        writes = [
            position[user]
            for node in members
            for user in node.users
            if user in position and _writes(user, node, observed)
        ]
        outer = [capture.sources[node] for node in members if node in capture.sources]
        state_changes = any(source.kind == "state" and source.key in changed for source in outer)
        touched = [position[n] for n in members if n in position]
        touched += [position[user] for node in members for user in node.users if user in position]
        if not touched or not (writes or state_changes):
            continue
        # A value made here is final after the last write; state and inputs are read by others as they were.
        last = max(touched) if outer else max(writes)
        bad.update(range(min(touched) + 1, last + 1))
    return bad


def _alias_groups(capture: Capture, nodes: list[fx.Node], observed: Observed) -> dict[fx.Node, list[fx.Node]]:
    """Values that share memory, or may, by one of them."""
    leader = {node: node for node in (*capture.sources, *nodes)}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    by_source: dict[Any, fx.Node] = {}
    for node, source in capture.sources.items():
        leader[node] = by_source.setdefault(source, node)
    for node in nodes:
        for other in _aliased(node, observed):
            if other in leader:
                leader[find(node)] = find(other)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in leader:
        groups.setdefault(find(node), []).append(node)
    return groups


def _aliased(node: fx.Node, observed: Observed) -> list[fx.Node]:
    """Inputs whose memory the result shares: as declared, and as seen (dropout may give its very input)."""
    seen = [value for value in node.all_input_nodes if (node.name, value.name) in observed.aliases]
    if getattr(node.target, "_schema", None) is None:
        return seen
    return seen + [argument for argument, declared in _arguments(node) if declared.alias_info is not None]


def _writes(user: fx.Node, node: fx.Node, observed: Observed) -> bool:
    if (user.name, node.name) in observed.writes:
        return True
    if getattr(user.target, "_schema", None) is None:
        return False
    return any(
        argument is node and declared.alias_info is not None and declared.alias_info.is_write
        for argument, declared in _arguments(user)
    )


def _arguments(node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[position] if position < len(node.args) else node.kwargs.get(declared.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, fx.Node):
                yield leaf, declared


class _Watch(fx.Interpreter):
    """Runs a graph and notes what its operations do."""

    def __init__(self, root: fx.GraphModule) -> None:
        super().__init__(root, garbage_collect_values=False)  # freed memory, used again, would look shared
        self._operations: fx.Graph = root.graph
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self.draws: set[str] = set()
        self.needs_grad: set[str] = set()
        self.aliases: set[tuple[str, str]] = set()
        self.writes: set[tuple[str, str]] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        inputs = [(value.name, tensor, tensor._version) for value in n.all_input_nodes for tensor in self._held(value)]
        random = torch.get_rng_state()
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n.name] = time.perf_counter() - start
        if not torch.equal(random, torch.get_rng_state()):
            self.draws.add(n.name)
        outputs = _tensors(result)
        self.nbytes[n.name] = sum(tensor.nbytes for tensor in outputs)
        if any(tensor.requires_grad for tensor in outputs):
            self.needs_grad.add(n.name)
        memory = {_memory(tensor) for tensor in outputs}
        self.aliases.update((n.name, name) for name, tensor, _ in inputs if _memory(tensor) in memory)
        self.writes.update((n.name, name) for name, tensor, version in inputs if tensor._version != version)
        return result

    def run(self, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As torch's own, whose bar of progress, shown or not, leaves a thread behind."""
        graph = self._operations
        self.env = {}
        self.args_iter = iter(graph.process_inputs(*args))
        for node in graph.nodes:
            self.env[node] = self.run_node(node)
        return graph.process_outputs(self.env[graph.output_node()])

    def _held(self, node: fx.Node) -> list[Tensor]:
        return _tensors(self.env[node])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Observed:
    """What running a graph showed, by names of operations.

    costs: seconds of forward and, by rule of thumb, backward. nbytes: of the result. draws: those that draw random
    numbers. aliases, writes: (operation, input) where it gives the input's memory, where it changes it.
    outputs: what the graph gave the first time.
    """

    costs: dict[str, float]
    nbytes: dict[str, int]
    draws: set[str]
    aliases: set[tuple[str, str]]
    writes: set[tuple[str, str]]
    outputs: list[Any]


def observe(capture: Capture, values: list[Any], rounds: int = ROUNDS) -> Observed:
    """Run the graph a few times on the values of its placeholders."""
    first = _Watch(capture.root)
    outputs = list(first.run(*values))
    watches = [first]
    for _ in range(rounds - 1):
        watches.append(_Watch(capture.root))
        watches[-1].run(*values)
        watches[-1].env.clear()
    costs = {}
    for name in first.seconds:
        factor = 1 + BACKWARD_OVER_FORWARD * (name in first.needs_grad)
        costs[name] = factor * median(watch.seconds[name] for watch in watches)
    return Observed(costs, first.nbytes, first.draws, first.aliases, first.writes, outputs)


def crossing_bytes(nodes: list[fx.Node], positions: list[int], nbytes: dict[str, int]) -> list[int]:
    """Bytes of results that are used on the other side, for a cut right before each position."""
    place = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        last = max((place.get(user, len(nodes) - 1) for user in node.users), default=i)
        change[i] += nbytes.get(node.name, 0)
        change[last] -= nbytes.get(node.name, 0)
    live = list(accumulate(change))
    return [live[position - 1] for position in positions]


def matching_bounds(nodes: list[fx.Node], bounds: list[int], others: list[fx.Node], bad: set[int]) -> list[int]:
    """Where to cut another graph of the same model so that equal operations fall into equal stages.

    bad: positions in ``others`` that may not be cut; the next later one is taken.
    """
    blocks = SequenceMatcher(a=_keys(nodes), b=_keys(others), autojunk=False).get_matching_blocks()
    result = [0]
    for bound in bounds[1:-1]:
        place = next((b.b + max(0, bound - b.a) for b in blocks if b.size and b.a + b.size > bound), len(others))
        while place in bad:
            place += 1
        result.append(min(max(place, result[-1]), len(others)))
    return [*result, len(others)]


def _keys(nodes: list[fx.Node]) -> list[str]:
    return [f"{module_path(node)}:{node.target}" for node in nodes]

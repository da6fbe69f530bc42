"""A model's forward as one graph of operations, captured by torch.export."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree

from stageflow.errors import SplitError
from stageflow.split.contract import InputContract
from stageflow.split.measure import undisturbed
from stageflow.split.state import Census

_symbolic: Any = _config  # torch adds `patch` to its settings at run time

Args = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """Where the value of a placeholder comes from.

    kind: "state" (parameter or buffer, by first name), "constant" (by name) or "input" (leaf number, as text).
    """

    kind: Literal["state", "constant", "input"]
    key: str


@dataclass
class Capture:
    """One mode's graph.

    root: holds the graph and the modules that its get_attr nodes name.
    sources: of each placeholder, by node. output: the model's, with nodes in place of tensors.
    """

    root: fx.GraphModule
    sources: dict[fx.Node, Source]
    constants: dict[str, Tensor]
    contract: InputContract
    output: Any

    @property
    def nodes(self) -> list[fx.Node]:
        """What is computed, in order."""
        return [node for node in self.root.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class _Attempt:
    strict: bool
    dynamic: bool
    sizes_below_two: bool


_ATTEMPTS = (
    _Attempt(strict=False, dynamic=True, sizes_below_two=True),
    _Attempt(strict=False, dynamic=True, sizes_below_two=False),
    _Attempt(strict=False, dynamic=False, sizes_below_two=False),
    _Attempt(strict=True, dynamic=False, sizes_below_two=False),
)


def capture(model: nn.Module, example: Args, census: Census, training: bool) -> Capture:
    """Capture ``model`` in train or eval mode, for any input sizes if possible, else for the example's.

    Raises SplitError with torch.export's reason, in one line.
    """
    reason = ""
    for attempt in _ATTEMPTS:
        args, kwargs = _at_least_two(example) if attempt.dynamic else example
        try:
            with undisturbed(model, training), _quiet(), _symbolic.patch(backed_size_oblivious=attempt.sizes_below_two):
                program = export(
                    model, args, kwargs, dynamic_shapes=_any_sizes(model, args, kwargs, attempt), strict=attempt.strict
                )
            return _read(program, census)
        except SplitError:
            raise
        except Exception as problem:  # torch.export raises many kinds, none of them its own
            reason = reason or _one_line(problem)
            if "ata-dependent" in str(problem) or "data_dependent" in type(problem).__name__:
                break
    raise SplitError(f"torch.export can't capture {type(model).__name__}: {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the running commentary of torch.export; what matters is in its exception."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _at_least_two(example: Args) -> Args:
    """The example with a batch of one doubled: torch.export takes a size of 1 for a constant."""

    def double(leaf: Any) -> Any:
        batch_of_one = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if batch_of_one else leaf

    return pytree.tree_map(double, example)


def _any_sizes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], attempt: _Attempt) -> Any:
    """Every dimension of every input free, as far as the model lets it be; by names of forward's parameters."""
    if not attempt.dynamic:
        return None

    def sizes(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, Tensor) else None

    return pytree.tree_map(sizes, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))


def _one_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = lines[0] if lines else type(problem).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


def _read(program: ExportedProgram, census: Census) -> Capture:
    signature = program.graph_signature
    if any(getattr(node.target, "__module__", "").startswith("torch._functorch") for node in program.graph.nodes):
        # begin and end are operations of their own: a graph left in between would leave torch transformed for all
        raise SplitError(
            "the model calls torch.func (vmap, grad, jvp) around operations, and cuts between can't be told"
        )
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    sources: dict[fx.Node, Source] = {}
    constants: dict[str, Tensor] = {}
    leaves: list[fx.Node | ConstantArgument] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            sources[node] = Source("state", census.first_name(str(spec.target)))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            sources[node] = Source("constant", str(spec.target))
            constants[str(spec.target)] = _tensor(program.constants[str(spec.target)])
        elif spec.kind is InputKind.USER_INPUT:
            sources[node] = Source("input", str(len(leaves)))
            leaves.append(spec.arg if isinstance(spec.arg, ConstantArgument) else node)
        else:
            raise SplitError(f"the captured graph needs a {spec.kind.name.lower()}, which can't be cut")
    odd = {spec.kind.name.lower() for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT}
    if odd:
        raise SplitError(f"the captured graph gives a {', '.join(sorted(odd))}, which can't be cut")
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    spec = program.call_spec
    assert spec.in_spec is not None
    assert spec.out_spec is not None
    _settle_buffers(program.graph, sources, output)
    contract = InputContract.read(leaves, spec.in_spec, program.range_constraints)
    result = pytree.tree_unflatten(list(output.args[0]), spec.out_spec)
    return Capture(program.graph_module, sources, constants, contract, result)


def _settle_buffers(graph: fx.Graph, sources: dict[fx.Node, Source], output: fx.Node) -> None:
    """Write buffers back as early as may be: torch.export does it at the very end, in the last stage therefore."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    node = output.prev
    while node.target is torch.ops.aten.copy_.default and node.args[0] in sources:
        previous = node.prev
        before = [*node.all_input_nodes, *(user for user in node.all_input_nodes[0].users if user is not node)]
        anchor = max(before, key=order.__getitem__)
        if anchor not in sources and anchor is not previous:
            anchor.append(node)
        node = previous


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise SplitError(f"the captured graph needs a constant {type(value).__name__}, which can't be cut")
    return value.detach()

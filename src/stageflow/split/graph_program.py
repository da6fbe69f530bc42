"""One stage of a captured graph, as its worker runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageflow.errors import SplitError
from stageflow.graph import Bundle, StageResult, StageSpec
from stageflow.split.capture import Source
from stageflow.split.contract import InputContract
from stageflow.split.deferred import DeferredModel
from stageflow.split.state import tensor_named

_DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")  # as torch.fx writes a device into source text


def draw(seed: Callable[[int], None], number: int) -> None:
    """Stands before each operation that draws random numbers."""
    seed(number)


@dataclass
class StageCode:
    """What one stage computes in one mode, as source text.

    source, names: text of ``forward(self, seed, *values)`` and what it refers to. modules: of nested blocks.
    takes: per value where it comes from: a Source, or (stage, name) for one that another stage sends.
    gives: per result its name. sends: consumer -> names.
    output: on the last stage the model's, with `Named` in place of each value that is computed.
    """

    source: str
    names: dict[str, Any]
    modules: dict[str, nn.Module]
    takes: list[Source | tuple[int, str]]
    gives: list[str]
    sends: dict[int, list[str]]
    constants: dict[str, Tensor]
    contract: InputContract
    output: Any = None

    def compile(self, device: torch.device) -> Callable[..., tuple[Any, ...]]:
        names = {**self.names, "_here": device}
        exec(_DEVICE.sub("_here", self.source), names)  # the text that torch.fx wrote for this graph
        return names["forward"]


@dataclass(frozen=True)
class Named:
    """Stands in an output for the value of this name."""

    name: str


@dataclass
class GraphSpec(StageSpec):
    """A run of consecutive operations.

    modes: training -> code. state: name and kind of what this stage holds. successors: stages it sends to.
    weights: values by first name, or the recipe of the whole model. training: the mode that the model was in.
    """

    index: int
    n_stages: int
    modes: dict[bool, StageCode]
    state: dict[str, str]
    successors: tuple[int, ...]
    weights: dict[str, Tensor] | DeferredModel
    training: bool = True

    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> GraphProgram:
        weights = self.weights
        if isinstance(weights, DeferredModel):
            model = weights.materialise(set(self.state))
            weights = {name: tensor_named(model, name) for name in self.state}
        module = nn.Module()
        for name, tensor in weights.items():
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(_key(name), tensor)
            else:
                module.register_buffer(_key(name), tensor)
        return GraphProgram(self, module.to(device, dtype).train(self.training), device)


def _key(name: str) -> str:
    return name.replace(".", "/")


class GraphProgram:
    """Runs its part of the graph; see `stageflow.graph.StageProgram`.

    Each operation that draws random numbers does so after ``seed(k)``, k being its number among all such operations.
    """

    def __init__(self, spec: GraphSpec, module: nn.Module, device: torch.device) -> None:
        self.index = spec.index
        self.module = module
        self.layers = None  # a graph of operations has no modules left
        state = {name: getattr(module, _key(name)) for name in spec.state}
        self.parameters: dict[str, nn.Parameter] = {n: t for n, t in state.items() if spec.state[n] == "parameter"}
        self.buffers: dict[str, Tensor] = {n: t for n, t in state.items() if spec.state[n] == "buffer"}
        self._modes = {training: _Runner(spec, code, state, device) for training, code in spec.modes.items()}

    def origin(self, value: str) -> str:
        """See `StageProgram.origin`."""
        return f"what operation {value!r} of the captured graph gives"

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        """Run the stage's operations on one micro-batch, in the mode that `module` is in."""
        runner = self._modes.get(self.module.training)
        if runner is None:
            mode = "train" if self.module.training else "eval"
            raise SplitError(f"stage {self.index} was captured without {mode} mode: see the split's warnings")
        return runner.run(args, kwargs, received, seed)


class _Runner:
    """One mode of a stage, ready to run."""

    def __init__(self, spec: GraphSpec, code: StageCode, state: dict[str, Any], device: torch.device) -> None:
        self._index = spec.index
        self._code = code
        self._function = code.compile(device)
        self._modules = SimpleNamespace(**code.modules)
        self._successors = spec.successors
        self._output_leaves, self._output_spec = pytree.tree_flatten(code.output)
        self._is_last = spec.index == spec.n_stages - 1
        constants = {name: tensor.to(device) for name, tensor in code.constants.items()}
        self._values: list[Any] = [None] * len(code.takes)
        self._inputs: list[tuple[int, int]] = []
        self._received: list[tuple[int, int, str]] = []
        for place, source in enumerate(code.takes):
            if isinstance(source, tuple):
                self._received.append((place, *source))
            elif source.kind == "input":
                self._inputs.append((place, int(source.key)))
            else:
                self._values[place] = state[source.key] if source.kind == "state" else constants[source.key]

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        values = list(self._values)
        if self._inputs or self._index == 0:
            leaves = self._code.contract.flatten(args, kwargs)
            for place, leaf in self._inputs:
                values[place] = leaves[leaf]
        for place, stage, name in self._received:
            bundle = received[stage]
            values[place] = bundle.tensors[name] if name in bundle.tensors else bundle.meta[name]
        results = self._function(self._modules, seed, *values)
        return self._result(dict(zip(self._code.gives, results, strict=True)))

    def _result(self, results: dict[str, Any]) -> StageResult:
        bundles = {}
        for consumer in self._successors:
            names = self._code.sends.get(consumer, ())
            tensors = {name: results[name] for name in names if isinstance(results[name], Tensor)}
            bundles[consumer] = Bundle(tensors, {name: results[name] for name in names if name not in tensors} or None)
        output = None
        if self._is_last:
            leaves = [results[leaf.name] if isinstance(leaf, Named) else leaf for leaf in self._output_leaves]
            output = pytree.tree_unflatten(leaves, self._output_spec)
        return StageResult(bundles, output)

"""One stage of a sequence, as its worker runs it. Short, because its cost is added to every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.graph import Bundle, StageResult, StageSpec
from stageflow.split.deferred import DeferredModel
from stageflow.split.state import named_state, tensor_named
from stageflow.split.travel import needs_packing, pack, unpack
from stageflow.transport.structure import flatten, unflatten

ALONE: Any = {"tensor": "0"}  # the outline of a value that is just one tensor


@dataclass
class Given:
    """The modules of one stage, and tensors that belong to no module of the sequence, with their values."""

    modules: list[nn.Module]
    loose: dict[str, Tensor]

    def __reduce__(self) -> Any:
        if any(map(needs_packing, self.modules)):
            return _unpacked, (pack((self.modules, self.loose)),)
        return Given, (self.modules, self.loose)


def _unpacked(data: bytes) -> Given:
    return Given(*unpack(data))


@dataclass
class SequenceSpec(StageSpec):
    """A run of consecutive layers.

    numbers, names: of the layers in the whole sequence.
    first_names: every name of a parameter or buffer in this stage -> the name it is owned under.
    loose: names of parameters and buffers here that belong to no layer.
    one_input: the first layer takes one positional input, as nn.Sequential does, not whatever it declares.
    classes: of the values that cross, for those that can't be imported by name.
    """

    index: int
    n_stages: int
    numbers: list[int]
    names: list[str]
    first_names: dict[str, str]
    loose: list[str]
    one_input: bool
    classes: dict[str, type]
    weights: Given | DeferredModel

    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> SequenceProgram:
        weights = self.weights
        if isinstance(weights, DeferredModel):
            model = weights.materialise(set(self.first_names.values()))
            weights = Given(
                [model.get_submodule(name) for name in self.names],
                {name: tensor_named(model, name) for name in self.loose},
            )
        stage = nn.ModuleList([*weights.modules, _holder(weights.loose)])
        return SequenceProgram(self, stage.to(device, dtype))


def _holder(loose: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in loose.items():
        key = name.replace(".", "/")
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(key, tensor)
        else:
            module.register_buffer(key, tensor)
    return module


class SequenceProgram:
    """Runs layers one after the other; see `stageflow.graph.StageProgram`.

    The random draws of layer k come after ``seed(2 * k)``; what follows the last layer (the loss) draws after
    ``seed(2 * k + 1)``.
    """

    takes_leaves = True  # layers that change their input in place are given a copy

    def __init__(self, spec: SequenceSpec, module: nn.ModuleList) -> None:
        self.index = spec.index
        self.module: nn.Module = module
        self.layers: Sequence[nn.Module] | None = list(module[:-1])
        self.parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}
        *layers, loose = module
        for name, layer in zip(spec.names, layers, strict=True):
            self._register(layer, f"{name}.", spec.first_names)
        for name in spec.loose:
            key = name.replace(".", "/")
            if key in loose._parameters:
                self.parameters[name] = getattr(loose, key)
            else:
                self._buffers[name] = (loose, key)
        self._steps = [(2 * number, layer) for number, layer in zip(spec.numbers, layers, strict=True)]
        if spec.index == 0:
            self._steps[0] = (0, _take_one(layers[0]) if spec.one_input else _take_all(layers[0]))
        self._previous = spec.index - 1
        self._next = spec.index + 1 if spec.index + 1 < spec.n_stages else None
        self._last = spec.names[-1]
        self._classes = dict(spec.classes)
        self._steps: list[tuple[int, Callable[[Any], Any]]]
        self._changes_input: dict[bool, bool] = {}

    def _register(self, layer: nn.Module, prefix: str, first_names: dict[str, str]) -> None:
        for name, tensor, _ in named_state(layer):
            first = first_names[prefix + name]
            if isinstance(tensor, nn.Parameter):
                self.parameters.setdefault(first, tensor)
            else:
                path, _, last = name.rpartition(".")
                self._buffers.setdefault(first, (layer.get_submodule(path), last))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The live buffers; a forward may put another tensor in a buffer's place."""
        return {name: getattr(module, last) for name, (module, last) in self._buffers.items()}

    def origin(self, value: str) -> str:
        """See `StageProgram.origin`; all that is sent comes from the last layer."""
        return f"what layer {self._last!r} gives" + (f" (its {value!r})" if value != "0" else "")

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        """Run the layers on one micro-batch; the value from the previous stage, or the model's own arguments."""
        bundle = received[self._previous] if self._previous >= 0 else None
        if self._changes_input.get(self.module.training, True) and not torch.is_inference_mode_enabled():
            value = self._run_on_copy(bundle or Bundle(*flatten((args, kwargs), self._classes)), seed)
        elif bundle is None:
            value = self._run((args, kwargs), seed)
        else:
            value = self._run(self._open(bundle), seed)
        if self._next is None:
            seed(self._steps[-1][0] + 1)
            return StageResult({}, value)
        if type(value) is Tensor:
            return StageResult({self._next: Bundle({"0": value}, ALONE)})
        tensors, meta = flatten(value, where=f"the value after stage {self.index}")
        return StageResult({self._next: Bundle(tensors, meta)})

    def _open(self, bundle: Bundle) -> Any:
        if bundle.meta == ALONE:
            return bundle.tensors["0"]
        return unflatten(bundle.meta, bundle.tensors, self._classes)

    def _run(self, value: Any, seed: Callable[[int], None]) -> Any:
        for number, layer in self._steps:
            seed(number)
            value = layer(value)
        return value

    def _run_on_copy(self, bundle: Bundle, seed: Callable[[int], None]) -> Any:
        """Run on a copy, and learn whether that is needed.

        What arrives is a leaf that requires grad, which autograd forbids to change in place, and may be memory that
        the sender, or a second run of this forward, still needs. Whether the layers change their input (a ReLU with
        inplace=True does) is seen once per train/eval mode.
        """
        tensors = {name: tensor.clone() for name, tensor in bundle.tensors.items()}
        value = self._run(unflatten(bundle.meta, tensors, self._classes), seed)
        self._changes_input[self.module.training] = any(tensor._version for tensor in tensors.values())
        return value


def _take_one(first: nn.Module) -> Callable[[Any], Any]:
    """Call with the model's arguments as nn.Sequential does; those that don't fit raise TypeError."""

    def only(input: Any) -> Any:
        return first(input)

    return lambda inputs: only(*inputs[0], **inputs[1])


def _take_all(first: nn.Module) -> Callable[[Any], Any]:
    """Call with all the model's arguments."""
    return lambda inputs: first(*inputs[0], **inputs[1])

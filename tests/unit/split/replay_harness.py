"""All stages of a split run in one thread, in order: forward, backward by hand, optimizer steps."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageflow.graph import Bundle, StageProgram
from stageflow.split import blocks
from stageflow.split.request import Request
from stageflow.split.spec import InputsUsed, Split

CPU = torch.device("cpu")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def cut(model: nn.Module, *args: Any, stages: int, boundaries: tuple[str, ...] | None = None, **kwargs: Any) -> Split:
    return blocks.cut(Request(model, (args, kwargs), stages, "parameters", boundaries))


@dataclass
class Ran:
    """One micro-batch that went through all stages."""

    output: Any
    bundles: dict[tuple[int, int], Bundle]
    leaves: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)


class Line:
    """The stages of a split, built from specs that travelled."""

    def __init__(self, split: Split, travel: bool = True) -> None:
        self.split = split
        self.sizes = [len(cloudpickle.dumps(spec)) for spec in split.specs] if travel else []
        specs = [pickle.loads(cloudpickle.dumps(spec)) for spec in split.specs] if travel else split.specs
        self.programs: list[StageProgram] = [spec.build(CPU) for spec in specs]

    def train(self, mode: bool = True) -> Line:
        for program in self.programs:
            program.module.train(mode)
        return self

    def forward(self, *args: Any, key: int = 0, grad: bool = True, **kwargs: Any) -> Ran:
        """key: of the random numbers of this micro-batch."""
        graph = self.split.graph
        ran = Ran(None, {})
        for stage, program in enumerate(self.programs):
            received = {p: self._enter(ran, p, stage, grad) for p in graph.predecessors(stage)}
            inputs = hide((args, kwargs), self.split.inputs_used[stage])
            with nullcontext() if grad else torch.no_grad():
                seed_of(key)(-1)
                result = program.forward(*inputs, received, seed_of(key))
            assert set(result.bundles) == set(graph.successors(stage))
            ran.bundles.update({(stage, consumer): bundle for consumer, bundle in result.bundles.items()})
            ran.output = result.output
        return ran

    def _enter(self, ran: Ran, producer: int, stage: int, grad: bool) -> Bundle:
        bundle, tensors = ran.bundles[producer, stage], {}
        for name, tensor in bundle.tensors.items():
            leaf = tensor.detach().clone()
            if tensor.requires_grad and grad:
                ran.leaves[producer, stage, name] = leaf.requires_grad_()
                leaf = leaf * 1
            tensors[name] = leaf
        return Bundle(tensors, bundle.meta)

    def backward(self, ran: Ran, loss: Tensor) -> None:
        for stage in reversed(range(len(self.programs))):
            roots: dict[int, tuple[Tensor, Tensor]] = {}
            for consumer in self.split.graph.successors(stage):
                for name, tensor in ran.bundles[stage, consumer].tensors.items():
                    leaf = ran.leaves.get((stage, consumer, name))
                    if leaf is not None and leaf.grad is not None:
                        before = roots.get(id(tensor))
                        roots[id(tensor)] = tensor, leaf.grad if before is None else before[1] + leaf.grad
            if stage == len(self.programs) - 1 and loss.requires_grad:
                roots[id(loss)] = loss, torch.ones_like(loss)
            if roots:
                torch.autograd.backward(*zip(*roots.values(), strict=True))

    def gradients(self) -> dict[str, Tensor | None]:
        """By the model's own names, copies summed."""
        gradients: dict[str, Tensor | None] = {}
        for name in self._names("parameter"):
            parts = [p.grad for p in self._copies(name) if p.grad is not None]
            gradients[name] = sum(parts[1:], parts[0].clone()) if parts else None
        return gradients

    def buffers(self) -> dict[str, Tensor]:
        return {name: self.programs[self.split.owners[name]].buffers[name] for name in self._names("buffer")}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Plain SGD."""
        for name, gradient in self.gradients().items():
            for parameter in self._copies(name):
                if gradient is not None:
                    parameter -= lr * gradient
                parameter.grad = None

    def _copies(self, name: str) -> list[nn.Parameter]:
        stages = (self.split.owners[name], *self.split.mirrors.get(name, ()))
        return [self.programs[stage].parameters[name] for stage in stages]

    def _names(self, kind: str) -> list[str]:
        return [name for name, info in self.split.tensors.items() if info.kind == kind]


def seed_of(key: int) -> Callable[[int], None]:
    def seed(layer: int) -> None:
        number = 1 + layer + 100_003 * (key + 1)
        torch.default_generator.manual_seed(number)
        random.seed(number)

    return seed


def hide(inputs: Inputs, used: InputsUsed | None) -> Inputs:
    """Inputs as the driver hands them to a stage: what it does not read, as shapes only."""
    if used is None:
        return inputs
    args, kwargs = inputs

    def stand_in(value: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)

    return (
        tuple(v if k in used.args else stand_in(v) for k, v in enumerate(args)),
        {k: v if k in used.kwargs else stand_in(v) for k, v in kwargs.items()},
    )


def assert_same_training(
    model: nn.Module,
    split: Split,
    microbatches: Iterable[dict[str, Any]],
    loss_of: Callable[[Any], Tensor],
    *,
    steps: int = 2,
    lr: float = 0.05,
    tolerance: float = 1e-5,
) -> Line:
    """Train the stages and ``model`` itself on the same micro-batches; loss, gradients and buffers must agree."""
    line, batches = Line(split), list(microbatches)
    for _ in range(steps):
        for batch in batches:
            expected = loss_of(model(**batch))
            (expected / len(batches)).backward()
            ran = line.forward(**batch)
            loss = loss_of(ran.output)
            line.backward(ran, loss / len(batches))
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        parameters = dict(model.named_parameters())
        for name, gradient in line.gradients().items():
            assert_close(name, gradient, parameters[name].grad, tolerance)
        buffers = dict(model.named_buffers())
        for name, buffer in line.buffers().items():
            assert_close(name, buffer, buffers[name], tolerance)
        line.step(lr)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
                parameter.grad = None
    return line


def assert_close(name: str, got: Tensor | None, expected: Tensor | None, tolerance: float = 1e-5) -> None:
    """No gradient and a gradient of zeros are the same."""
    if got is None or expected is None:
        other = got if expected is None else expected
        assert other is None or not other.any(), f"{name}: {got} instead of {expected}"
        return
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")

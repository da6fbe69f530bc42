"""Stages of one layer each, over any graph, and what their runtime needs; beside them the truth by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stageflow.graph import Bundle, StageGraph, StageResult
from stageflow.runtime.batch import Batch, cut_batch
from stageflow.runtime.random import Generators
from stageflow.runtime.stage import Stage, StageOptions

CPU = torch.device("cpu")
WIDTH = 4


class Program:
    """Adds up what its predecessors sent (stage 0 takes the input), runs a layer, sends it to all successors."""

    layers = None

    def __init__(self, index: int, graph: StageGraph, module: nn.Module) -> None:
        self.index = index
        self.module = module
        self.parameters = {f"{index}.{name}": p for name, p in module.named_parameters()}
        self.buffers: Mapping[str, Tensor] = {f"{index}.{name}": b for name, b in module.named_buffers()}
        self.calls: list[tuple[int, ...]] = []
        self._graph = graph

    def origin(self, value: str) -> str:
        return f"what stage {self.index} gives"

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        seed(self.index)
        self.calls.append(tuple(sorted(received)))
        x = args[0] if self.index == 0 else sum(bundle.tensors["x"] for bundle in received.values())
        y = self.module(x)
        consumers = self._graph.successors(self.index)
        last = self.index == self._graph.output_stage
        return StageResult({c: Bundle({"x": y}) for c in consumers}, y if last else None)


def programs(graph: StageGraph, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> dict[int, Program]:
    torch.manual_seed(0)
    return {index: Program(index, graph, make()) for index in range(graph.n_stages)}


def stages(graph: StageGraph, made: Mapping[int, Program], **options: Any) -> dict[int, Stage]:
    chosen = StageOptions(F.mse_loss, **options)
    return {index: Stage(program, graph, CPU, chosen, Generators(CPU)) for index, program in made.items()}


def a_batch(microbatches: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2 * microbatches, WIDTH, generator=generator) for _ in range(2))
    return cut_batch((x,), {}, y, microbatches, {})


def truth(graph: StageGraph, made: Mapping[int, Program], batch: Batch, weights: Sequence[float]) -> dict[str, Tensor]:
    """Gradients by plain autograd over the same modules."""
    total = torch.zeros(())
    for index, weight in enumerate(weights):
        microbatch = batch.microbatch(index)
        given: dict[int, Tensor] = {}
        for stage, program in made.items():
            before = [given[p] for p in graph.predecessors(stage)]
            given[stage] = program.module(torch.stack(before).sum(0) if before else microbatch.args[0])
        total = total + weight * F.mse_loss(given[graph.output_stage], microbatch.target)
    named = {name: p for program in made.values() for name, p in program.parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, gradients, strict=True) if gradient is not None}

"""What the stages of one worker hold, by the whole model's names: to be taken, given and counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stageflow.errors import InputError
from stageflow.graph import StageProgram
from stageflow.runtime.optimize import OptimizerOptions, StageOptimizer

StateKind = Literal["weights", "gradients", "optimizer"]


class WorkerState:
    """Parameters, buffers, gradients and optimizers of one worker's stages.

    owned: stage -> the parameters it owns, by name. trained: those of them that require grad, of all stages.
    optimizers: of the stages that have something to train.
    """

    def __init__(
        self, programs: Mapping[int, StageProgram], owners: Mapping[str, int], options: OptimizerOptions
    ) -> None:
        """owners: name -> stage, as in `Split`. options: may be without an optimizer."""
        self._programs = programs
        self._owners = owners
        self.owned: dict[int, dict[str, nn.Parameter]] = {
            index: {name: p for name, p in program.parameters.items() if owners[name] == index}
            for index, program in programs.items()
        }
        self.trained = [p for owned in self.owned.values() for p in owned.values() if p.requires_grad]
        self.optimizers: dict[int, StageOptimizer] = {}
        if options.optimizer is not None:
            for index, owned in self.owned.items():
                trained = {name: p for name, p in owned.items() if p.requires_grad}
                if trained:
                    self.optimizers[index] = StageOptimizer(trained, options)

    @property
    def names(self) -> set[str]:
        """Of all parameters and buffers here, owned or not."""
        return {name for program in self._programs.values() for name in (*program.parameters, *program.buffers)}

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for program in self._programs.values():
            for parameter in program.parameters.values():
                parameter.grad = None

    def set_training(self, mode: bool) -> None:
        """`train` or `eval` for all modules here."""
        for program in self._programs.values():
            program.module.train(mode)

    def take(self, kind: StateKind) -> tuple[dict[str, Tensor], Any]:
        """(tensors, plain rest) of what is owned here.

        "weights": parameters and buffers. "gradients": those there are. "optimizer": see `StageOptimizer.state`.
        """
        if kind == "optimizer":
            tensors: dict[str, Tensor] = {}
            rest = {}
            for index, optimizer in self.optimizers.items():
                own, rest[str(index)] = optimizer.state()
                tensors.update(own)
            return tensors, rest
        if kind == "gradients":
            named = [item for owned in self.owned.values() for item in owned.items()]
            return {name: p.grad.to_dense() for name, p in named if p.grad is not None}, None
        weights: dict[str, Tensor] = {}
        for index, program in self._programs.items():
            weights.update({name: p.detach() for name, p in self.owned[index].items()})
            weights.update({n: b.detach() for n, b in program.buffers.items() if self._owners[n] == index})
        return weights, None

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters and buffers here, owned or not. Raises InputError for another shape."""
        with torch.no_grad():
            for program in self._programs.values():
                for name, target in [*program.parameters.items(), *program.buffers.items()]:
                    value = tensors.get(name)
                    if value is not None:
                        if value.shape != target.shape:
                            raise InputError(f"{name!r} has shape {tuple(target.shape)}, given {tuple(value.shape)}")
                        target.copy_(value)

    def memory(self) -> dict[str, int]:
        """Bytes held here: parameters, gradients, optimizer state."""
        own = {id(p): p for program in self._programs.values() for p in program.parameters.values()}
        optimizer = [t for each in self.optimizers.values() for t in each.state()[0].values()]
        return {
            "parameters": sum(p.nbytes for p in own.values()),
            "gradients": sum(_nbytes(p.grad) for p in own.values() if p.grad is not None),
            "optimizer": sum(_nbytes(t) for t in optimizer),
        }


def _nbytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes

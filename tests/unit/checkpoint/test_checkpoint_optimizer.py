"""Optimizers and schedulers continue on another number of stages as if they had never been saved."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR

from stageflow.checkpoint import Progress, Saving, open_checkpoint, write_shard
from stageflow.errors import CheckpointError
from stageflow.runtime.optimize import OptimizerOptions, StageOptimizer
from stageflow.runtime.schedulers import join, narrow

NAMES = ["norm.bias", "a.weight", "a.bias", "b.weight", "b.bias", "c.weight"]


def own_rates(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0, "lr": 0.02} if name.endswith("bias") else {}


class Stages:
    """The parameters, spread over some stages, each with its own optimizer."""

    def __init__(self, counts: list[int], options: OptimizerOptions):
        generator = torch.Generator().manual_seed(0)
        values = {name: torch.randn(2, 3, generator=generator) for name in NAMES}
        self.parameters = {name: nn.Parameter(value) for name, value in values.items()}
        names = iter(NAMES)
        self.held = [[next(names) for _ in range(count)] for count in counts]
        self.optimizers = [StageOptimizer({n: self.parameters[n] for n in held}, options) for held in self.held]

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for name in NAMES:
                self.parameters[name].grad = torch.randn(2, 3, generator=generator)
            for optimizer in self.optimizers:
                optimizer.step()

    def save(self, directory: Path) -> None:
        n = len(self.optimizers)
        with Saving(directory) as saving:
            entries = [
                write_shard(saving.path, "model", i, n, {name: self.parameters[name] for name in held})
                for i, held in enumerate(self.held)
            ]
            for i, optimizer in enumerate(self.optimizers):
                tensors, rest = optimizer.state()
                entries.append(write_shard(saving.path, "optimizer", i, n, tensors, {str(i): rest}))
            saving.finish(entries, Progress(1, 0))

    def load(self, directory: Path) -> None:
        checkpoint = open_checkpoint(directory)
        for name, value in checkpoint.weights().items():
            self.parameters[name].data.copy_(value)
        for held, optimizer in zip(self.held, self.optimizers, strict=True):
            tensors, plain = checkpoint.optimizer(held)
            optimizer.load(tensors, plain)


def groups_of(optimizer: StageOptimizer) -> list[list[str]]:
    return [group["names"] for group in optimizer.state()[1]["groups"]]


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


SCHEDULERS: dict[str, Callable | None] = {
    "none": None,
    "steps": partial(StepLR, step_size=2, gamma=0.5),
    "cosine": partial(CosineAnnealingLR, T_max=9),
    "function": partial(LambdaLR, lr_lambda=warm_up),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=20),
    "two after another": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, warm_up), CosineAnnealingLR(optimizer, 6)], milestones=[4]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("groups", [None, own_rates], ids=["one group", "two groups"])
def test_six_steps_are_three_and_three_on_other_stages(tmp_path, groups, scheduler):
    optimizer = partial(SGD, lr=0.01, momentum=0.9) if groups else partial(AdamW, lr=0.01)
    options = OptimizerOptions(optimizer, SCHEDULERS[scheduler], groups)
    straight = Stages([6], options)
    straight.train(range(6))
    for before, after in (([1, 2, 3], [6]), ([3, 3], [2, 1, 3])):
        first = Stages(before, options)
        first.train(range(3))
        first.save(tmp_path / "run")
        second = Stages(after, options)
        second.load(tmp_path / "run")
        second.train(range(3, 6))
        for name in NAMES:
            assert torch.equal(second.parameters[name], straight.parameters[name]), (before, after, name)


def test_matrices_of_muon_and_a_rate_that_is_a_tensor(tmp_path):
    for optimizer in (partial(Muon, lr=0.02), partial(AdamW, lr=torch.tensor(0.01), foreach=False)):
        options = OptimizerOptions(optimizer)
        straight = Stages([6], options)
        straight.train(range(4))
        first = Stages([4, 2], options)
        first.train(range(2))
        first.save(tmp_path / "run")
        second = Stages([3, 3], options)
        second.load(tmp_path / "run")
        second.train(range(2, 4))
        assert all(torch.equal(second.parameters[name], straight.parameters[name]) for name in NAMES)


def test_options_come_back_as_they_were(tmp_path):
    options = OptimizerOptions(partial(AdamW, lr=0.01, betas=(0.8, 0.99)), parameter_groups=own_rates)
    stages = Stages([3, 3], options)
    stages.train(range(1))
    stages.save(tmp_path / "run")
    tensors, plain = open_checkpoint(tmp_path / "run").optimizer(["a.bias", "c.weight"])
    of_each = ("step", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {f"{name}/{key}" for name in ("a.bias", "c.weight") for key in of_each}
    assert plain["options"]["a.bias"]["betas"] == (0.8, 0.99)
    assert plain["options"]["a.bias"]["lr"] == 0.02
    assert plain["options"]["c.weight"]["weight_decay"] == 0.01


def test_only_what_is_asked_for_is_read(tmp_path):
    stages = Stages([3, 3], OptimizerOptions(partial(SGD, lr=0.1, momentum=0.9)))
    stages.train(range(1))
    stages.save(tmp_path / "run")
    checkpoint = open_checkpoint(tmp_path / "run")
    tensors, _ = checkpoint.optimizer(["embedding"], {"a.weight": "embedding"})
    assert tensors.keys() == {"embedding/momentum_buffer"}
    # and it does not hold on to the whole file, which a later save removes
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())


def test_no_optimizer_and_parameters_that_were_not_trained(tmp_path, save, weights):
    save(tmp_path / "run", weights)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert not checkpoint.has_optimizer
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        checkpoint.optimizer(["layer0.weight"])
    stages = Stages([6], OptimizerOptions(partial(SGD, lr=0.1)))
    stages.save(tmp_path / "run")
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.has_optimizer
    assert checkpoint.optimizer(NAMES)[0] == {}
    with pytest.raises(CheckpointError, match="no optimizer state of 'frozen'"):
        checkpoint.optimizer(["a.weight", "frozen"])


def test_narrow_and_join_are_opposites():
    state = {
        "last_epoch": 3,
        "base_lrs": [0.1, 0.2],
        "_milestones": [4, 9],
        "_schedulers": [{"base_lrs": [0.1, 0.2], "T_max": 5}, {"base_lrs": [0.3, 0.4], "T_max": 6}],
    }
    parts = [narrow(state, group) for group in range(2)]
    assert parts[1] == {
        "last_epoch": 3,
        "base_lrs": [0.2],
        "_milestones": [4, 9],
        "_schedulers": [{"base_lrs": [0.2], "T_max": 5}, {"base_lrs": [0.4], "T_max": 6}],
    }
    assert join(parts) == state

"""What is found of a model's blocks, and what they are taken to cost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageflow.split import split_model

X = torch.ones(2, 4)


def block(name: str) -> nn.Module:
    """A block of a class of its own."""
    return type(name, (nn.Sequential,), {})(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Base(nn.Module):
    """Blocks that are each of another class, which nobody would take for repeated ones; with a plan, or without."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_pp_plan=plan)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(block(f"Block{number}") for number in range(10))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class WithHead(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.model = Base(plan)
        self.config = self.model.config  # as the models of transformers, whose plan is the base model's
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


PLAN = {"embed": (["x"], ["x"]), "layers": (["x"], ["x"]), "norm": (["x"], ["x"])}


@pytest.mark.parametrize(("model", "prefix"), [(Base(PLAN), ""), (WithHead(PLAN), "model.")], ids=["base", "with head"])
def test_a_models_own_plan_says_which_its_blocks_are(model, prefix):
    found = split_model(model, (X,), stages=3, split="blocks")
    assert "blocks as in its config's base_model_pp_plan" in found.reason
    names = [layer.name for layer in found.layers]
    assert names[:12] == [f"{prefix}embed", *(f"{prefix}layers.{number}" for number in range(10)), f"{prefix}norm"]


@pytest.mark.parametrize("plan", [None, {}, {"nothing": ([], [])}, ["layers"], {"norm": ([], [])}], ids=str)
def test_a_plan_that_names_no_blocks_is_left_aside(plan):
    found = split_model(Base(plan), (X,), stages=3, split="blocks")
    assert "base_model_pp_plan" not in found.reason


def test_a_plan_of_transformers_is_found():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=9, num_attention_heads=2, vocab_size=16
    )
    model = transformers.LlamaForCausalLM(config)
    found = split_model(model, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, stages=3)
    assert "base_model_pp_plan" in found.reason
    assert [layer.name for layer in found.layers][:2] == ["model.embed_tokens", "model.layers.0"]


class SlowBetween(nn.Module):
    """Its own code after the first of four equal layers takes as long as many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                time.sleep(0.02)
        return x


def test_code_between_the_modules_counts_with_the_module_before_it():
    found = split_model(SlowBetween(), (X,), stages=2, split="blocks")
    assert found.layer_names(0) == ["layers.0"]
    assert found.layers[0].cost == pytest.approx(0.06, rel=0.5)  # forward, and twice that for the backward
    assert found.layers[1].cost < 0.01


class NeedsItsCaller(nn.Module):
    """Has a layer that does not run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(self) for _ in range(4))
        self.running = False

    def forward(self, x: Tensor) -> Tensor:
        self.running = True
        for layer in self.layers:
            x = layer(x)
        self.running = False
        return x


class Counted(nn.Linear):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__(4, 4)
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        if not self.owner[0].running:
            raise RuntimeError("not without the model")
        return super().forward(x)


def test_a_balance_that_falls_back_to_parameters_warns():
    found = split_model(NeedsItsCaller(), (X,), stages=2, split="blocks")
    assert found.unit == "parameters"
    assert "warning: balanced by parameters, since 'layers.0' does not run by itself" in str(found)
    chosen = split_model(NeedsItsCaller(), (X,), stages=2, split="blocks", balance="parameters")
    assert chosen.warnings == []


def test_a_sequence_without_an_example_warns():
    assert "without example=" in str(split_model([nn.Linear(4, 4), nn.Linear(4, 4)], stages=2))
    assert split_model([nn.Linear(4, 4), nn.Linear(4, 4)], stages=2, balance="parameters").warnings == []

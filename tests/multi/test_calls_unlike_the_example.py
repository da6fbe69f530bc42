"""Batches given in another way than the example: each stage still gets the values that it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf


class Gated(nn.Module):
    """The last layer reads a second input, which may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if gate is None else x * gate


X, GATE, Y = torch.randn(6, 4), torch.rand(6, 4) + 1, torch.randn(6, 4)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((X, GATE), {}),
    "by name": ((), {"x": X, "gate": GATE}),
    "both": ((X,), {"gate": GATE}),
    "less": ((X,), {}),
    "nothing there": ((X,), {"gate": None}),
}


@pytest.mark.parametrize("built", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("shown", ["by position", "by name", "both"])
def test_other_places_and_names(shown: str, built: bool) -> None:
    torch.manual_seed(0)
    model = Gated()

    def build() -> Gated:
        made = Gated()
        made.load_state_dict(state)
        return made

    state = model.state_dict()
    example = CALLS[shown]
    with sf.Pipeline(
        build if built else model,
        stages=2,
        microbatches=3,
        loss=F.mse_loss,
        split="blocks",
        example=example,
        launch="threads",
    ) as pipe:
        for name in ("by position", "by name", "both"):
            args, kwargs = CALLS[name]
            assert pipe.train_step(*args, target=Y, **kwargs).item() == pytest.approx(
                F.mse_loss(model(X, GATE), Y).item(), rel=1e-5
            ), name


@pytest.mark.parametrize("shown", ["less", "nothing there"])
def test_an_input_that_the_example_did_not_have(shown: str) -> None:
    torch.manual_seed(0)
    model = Gated()
    with sf.Pipeline(
        model,
        stages=2,
        microbatches=3,
        loss=F.mse_loss,
        example=CALLS[shown],
        launch="threads",
        boundaries=["layers.2"],
    ) as pipe:
        for name in ("by name", "both", "less"):
            args, kwargs = CALLS[name]
            want = F.mse_loss(model(*args, **kwargs), Y).item()
            assert pipe.train_step(*args, target=Y, **kwargs).item() == pytest.approx(want, rel=1e-5), name

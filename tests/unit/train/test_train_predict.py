"""What `predict` gives has the shape that one device gives; workers are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stageflow as sf


class Tabled(nn.Module):
    """Its output holds a table that no sample changes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(16.0).reshape(8, 2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": self.second(self.first(x)), "table": self.table * 1}


def test_a_batch_that_is_not_the_first_dimension() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(8, 8, 3)
    with sf.Pipeline(model, 2, 4, batch_dims={"0": 1}, launch="threads") as pipe:
        torch.testing.assert_close(pipe.predict(x), model(x).detach())


def test_a_constant_table_comes_once() -> None:
    model, x = Tabled(), torch.randn(8, 3)
    with sf.Pipeline(model, 2, 2, launch="threads") as pipe:
        got = pipe.predict(x)
    torch.testing.assert_close(got["x"], model(x)["x"].detach())
    torch.testing.assert_close(got["table"], model.table)

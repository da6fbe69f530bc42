"""Whole numbers among arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf
from stageflow.plan import Block, make_plan
from stageflow.whole import as_whole


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_pythons_own(value: Any) -> None:
    assert as_whole(value, 3) == 3
    assert type(as_whole(value)) is int
    assert as_whole(value, 4) is None


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float64(3), "3", None, [3]])
def test_what_is_no_whole_number(value: Any) -> None:
    assert as_whole(value) is None


def test_numpys_numbers_are_taken_wherever_a_whole_number_is() -> None:
    two, x = np.int64(2), torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    counts: dict[str, Any] = {"stages": two, "microbatches": two, "workers": two, "seed": two, "threads": np.int32(1)}
    options: dict[str, Any] = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1), "launch": "threads"}
    with sf.Pipeline(model, batch_dims={"0": np.int64(0)}, **counts, **options) as pipe:
        pipe.fit([(x, x)], steps=two, callbacks=[sf.Evaluate([(x, x)], every=two)])
        assert pipe.steps == 2
    plan = make_plan(
        profile=[Block(str(i), 1.0, 2.0, 1.0, 1.0) for i in range(2)],
        devices=two,
        stages=two,
        microbatches=two,
        seconds=0.1,
        progress=False,
    )
    assert sf.Plan.from_json(plan.to_json()) == plan

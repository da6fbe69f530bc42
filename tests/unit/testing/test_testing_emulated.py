"""Emulated stages take the time they are told, in the action they are told, and have right gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf
from stageflow.testing.emulated import EmulatedStage

SHORT = 0.004


@pytest.mark.parametrize(("schedule", "kinds"), [("1f1b", "FB"), ("zb_h1", "FIW")])
def test_each_action_sleeps_its_own_part(schedule: str, kinds: str) -> None:
    model = nn.Sequential(*(EmulatedStage(SHORT, 2 * SHORT, 3 * SHORT) for _ in range(2)))
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    want = [layer.weight.grad for layer in model]
    with sf.Pipeline(
        model, 2, 3, schedule, F.mse_loss, launch="threads", boundaries=["1"], balance="parameters", example=x
    ) as pipe:
        for _ in range(2):  # nothing is left over from a step to the next
            torch.testing.assert_close(pipe.train_step(x, target=y), loss.detach())
            torch.testing.assert_close(list(pipe.gradients().values()), want)
        sleeps = {"F": SHORT, "B": 5 * SHORT, "I": 2 * SHORT, "W": 3 * SHORT}
        shortest: dict[str, float] = {}
        for event in pipe.last_step.events:
            if event.kind in sleeps:
                shortest[event.kind] = min(event.duration, shortest.get(event.kind, 1.0))
    assert set(shortest) == set(kinds)
    for kind, seconds in shortest.items():
        assert seconds >= sleeps[kind]
        # no other action's sleep is in it: that would be a SHORT more
        assert seconds < sleeps[kind] + SHORT

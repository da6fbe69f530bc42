"""Plans where workers are processes: of this machine, and of torchrun, where one rank plans for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])


def test_a_plan_runs_in_processes_with_the_numbers_of_one_device() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    plain = _build()
    want = F.mse_loss(plain(x), y)
    want.backward()
    plan = sf.make_plan(
        _build(), x, target=y, loss=F.mse_loss, devices=2, microbatches=4, recompute=True, seconds=0.2, rounds=2
    )
    with sf.Pipeline(_build(), plan=plan, loss=F.mse_loss, timeout=60.0) as pipe:
        torch.testing.assert_close(pipe.train_step(x, target=y), want.detach())
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


@pytest.mark.timeout(200)
def test_ranks_of_torchrun_follow_one_plan() -> None:
    script = Path(__file__).with_name("planned_torchrun.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    planned = [line for line in done.stdout.splitlines() if line.startswith("planned")]
    assert len(planned) == 2
    assert planned[0] == planned[1]

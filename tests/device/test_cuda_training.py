"""Stages on CUDA devices give the numbers of one CUDA device."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = Path(__file__).parent.parent / "multi" / "torchrun_training.py"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("launch", ["threads", "processes"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_numbers_of_one_cuda_device(schedule: str, launch: str) -> None:
    torch.manual_seed(0)
    model, x, y = Tied(), torch.randint(23, (8, 5)), torch.randint(23, (8, 5))
    reference = copy.deepcopy(model).cuda()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [_loss(reference(a), b) / 4 for a, b in zip(x.cuda().chunk(4), y.cuda().chunk(4), strict=True)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    with sf.Pipeline(
        model,
        stages=2,
        microbatches=4,
        schedule=schedule,
        loss=_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        launch=launch,
        device="cuda",
        max_grad_norm=1e6,
    ) as pipe:
        assert [pipe.train_step(x, target=y).item() for _ in range(3)] == pytest.approx(losses, rel=1e-3)
        state = pipe.state_dict()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value.cpu(), rtol=1e-3, atol=1e-4)
        assert pipe.predict(x).shape == (8, 5, 23)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices for NCCL")
def test_nccl_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), "train", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "STAGEFLOW_TEST_DEVICE": "cuda"},
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Trains under torchrun with schedule="auto", and compares with one device on every rank."""

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])


x, y = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, -1, 64).view(8, 8)
plain = build()
want = F.mse_loss(plain(x), y)
want.backward()
with sf.Pipeline(build(), schedule="auto", workers=2, microbatches=4, loss=F.mse_loss, timeout=100.0) as pipe:
    loss = pipe.train_step(x, target=y)
    torch.testing.assert_close(loss, want.detach())
    for name, gradient in pipe.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    assert pipe.plan is not None
    print("planned", pipe.plan.schedule.orders)

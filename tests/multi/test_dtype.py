"""A pipeline in another dtype than its model came in has the numbers of the model converted."""

import copy

import pytest
import torch
from torch import nn

import stageflow as sf


class Residual(nn.Module):
    """Blocks with glue between them that asks a later block for its dtype."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chain():
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)])


@pytest.mark.parametrize("launch", ["threads", "processes"])
@pytest.mark.parametrize(("split", "build"), [("sequence", chain), ("blocks", Residual)])
def test_the_numbers_of_the_converted_model(split, build, launch):
    torch.manual_seed(0)
    model = build()
    alone = copy.deepcopy(model).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    y = torch.zeros_like(alone(x))
    alone = copy.deepcopy(model).double()
    losses = [nn.functional.mse_loss(alone(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    options = {"loss": nn.functional.mse_loss, "launch": launch, "split": split, "dtype": torch.float64}
    # a sequence's layers see the example as they are, blocks may convert it
    example = x.float() if split == "sequence" else x
    with sf.Pipeline(model, stages=2, microbatches=2, example=example, **options) as pipe:
        torch.testing.assert_close(pipe.train_step(x, target=y).double(), sum(losses).detach(), rtol=1e-6, atol=0)
        gradients = pipe.gradients()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)  # the dtype, too
        state = pipe.state_dict()
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(state[name], buffer)


def test_a_captured_model_keeps_its_dtype():
    options = {"loss": nn.functional.mse_loss, "launch": "threads", "split": "export", "dtype": torch.float64}
    x = torch.randn(8, 6)
    with (
        sf.Pipeline(chain(), stages=2, microbatches=2, example=x, **options) as pipe,
        pytest.raises(sf.StageflowError, match=r"dtype=torch.float64 .* convert the model first"),
    ):
        pipe.train_step(x, target=x)

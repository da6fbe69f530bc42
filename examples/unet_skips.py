"""Train a U-Net in four stages: its skip connections cross stages.

    python examples/unet_skips.py

The stages are not a chain. Prints which stage feeds which: what the way down makes goes straight to the stage of the
way up that uses it, past the stages between. Then prints the loss as it falls, and the shape of a prediction.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf


def convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Two levels down, two up; images [batch, 1, height, width] in and out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, width), convolutions(width, 2 * width)])
        self.bottom = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([convolutions(6 * width, 2 * width), convolutions(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model = UNet()
    clean = torch.zeros(16, 1, 32, 32)
    clean[:, :, 8:24, 8:24] = 1.0  # a square, to be found in noise

    optimizer = partial(torch.optim.Adam, lr=5e-3)
    cuts = ["down.1", "bottom", "up.1"]  # without them, stages would be made equal in time
    with sf.Pipeline(model, stages=4, microbatches=4, loss=F.mse_loss, optimizer=optimizer, boundaries=cuts) as pipe:
        for step in range(10):
            loss = pipe.train_step(clean + 0.5 * torch.randn_like(clean), target=clean)
            if step == 0:
                for stage in range(pipe.stages):
                    feeds = ", ".join(map(str, pipe.split.graph.successors(stage))) or "the output"
                    print(f"stage {stage} ({', '.join(pipe.split.layer_names(stage))}) feeds {feeds}")
            if step % 3 == 0:
                print(f"step {step}   loss {loss:.4f}")
        print(f"prediction: {tuple(pipe.predict(clean).shape)}")


if __name__ == "__main__":
    main()

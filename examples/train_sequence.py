"""Train an nn.Sequential in two stages, and see that the losses are those of one process.

    python examples/train_sequence.py

Prints how the model was cut, and three columns: the step, the loss of the pipeline, the loss of the same training
without a pipeline. The two losses agree to the last digits shown.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def main() -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(5)]
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    plain = build_model()
    plain_optimizer = optimizer(plain.parameters())

    with sf.Pipeline(build_model(), stages=2, microbatches=4, loss=F.cross_entropy, optimizer=optimizer) as pipe:
        for step, (x, y) in enumerate(batches):
            loss = pipe.train_step(x, target=y)
            if step == 0:
                print(pipe, end="\n\n")

            # the same without a pipeline: four micro-batches of eight samples
            plain_optimizer.zero_grad()
            plain_loss = 0.0
            for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
                part = F.cross_entropy(plain(part_x), part_y) / 4
                part.backward()
                plain_loss += part.item()
            plain_optimizer.step()

            print(f"step {step}   in two stages {loss:.5f}   in one process {plain_loss:.5f}")


if __name__ == "__main__":
    main()

"""Stop a training and go on from its checkpoint, in another number of stages.

    python examples/resume.py

Trains six steps in two stages. Trains three steps in two stages, saves, and goes on for three steps in three stages.
Prints both columns of losses: they agree, dropout and AdamW's state included. Then loads the weights into the plain
model and compares its loss with the pipeline's.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(32, 1))


def pipeline(stages: int) -> sf.Pipeline:
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    warm_up = partial(torch.optim.lr_scheduler.LinearLR, total_iters=4)
    return sf.Pipeline(
        build_model(),
        stages=stages,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=optimizer,
        lr_scheduler=warm_up,
        example=torch.zeros(16, 32),  # so that the model is split, and can load, before the first batch
    )


def main() -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(16, 32), torch.randn(16, 1)) for _ in range(6)]

    with pipeline(stages=2) as pipe:
        straight = [pipe.train_step(x, target=y) for x, y in batches]

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run1"
        with pipeline(stages=2) as pipe:
            resumed = [pipe.train_step(x, target=y) for x, y in batches[:3]]
            pipe.save(checkpoint)
        with pipeline(stages=3) as pipe:
            pipe.load(checkpoint)
            resumed += [pipe.train_step(x, target=y) for x, y in batches[pipe.steps :]]
            pipe.save(checkpoint)
            x, y = batches[0]
            of_pipeline = pipe.evaluate(x, target=y)

        model = build_model().eval()
        model.load_state_dict(sf.load_weights(checkpoint))

    for step, (a, b) in enumerate(zip(straight, resumed, strict=True)):
        print(f"step {step}   straight {a:.6f}   {'saved, loaded' if step >= 3 else 'before saving'} {b:.6f}")
    with torch.no_grad():
        print(f"evaluated: pipeline {of_pipeline:.6f}, plain model {F.mse_loss(model(x), y):.6f}")


if __name__ == "__main__":
    main()

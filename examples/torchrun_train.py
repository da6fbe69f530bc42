"""The same script alone and under torchrun, where every rank runs it and holds one stage.

    python examples/torchrun_train.py
    torchrun --nproc-per-node 2 examples/torchrun_train.py

Prints how the workers were started and the losses, which are the same both ways. Every rank gets every loss; rank 0
prints. All ranks must call the pipeline with the same batches in the same order.
"""

import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf


def main() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(32, 4))
    x, y = torch.randn(16, 32), torch.randint(4, (16,))

    leads = int(os.environ.get("RANK", "0")) == 0
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    with sf.Pipeline(model, stages=2, microbatches=4, loss=F.cross_entropy, optimizer=optimizer) as pipe:
        if leads:
            print(f"workers started by: {pipe.launch}")
        for step in range(5):
            loss = pipe.train_step(x, target=y)
            if leads:
                print(f"step {step}   loss {loss:.5f}")


if __name__ == "__main__":
    main()

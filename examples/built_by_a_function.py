"""Give a function that builds the model: no process ever holds more than its own stages.

    python examples/built_by_a_function.py

Prints how many bytes of parameters the whole model has, how many each worker holds, and how many this process holds
(none). The weights are nevertheless those of a plain build from the same seed: the loss is the same.
"""

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf

WIDTH = 512


def build_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)], nn.Linear(WIDTH, 4))


def main() -> None:
    x, y = torch.ones(8, WIDTH), torch.zeros(8, 4)

    torch.manual_seed(0)
    plain = build_model()
    plain_loss = F.mse_loss(plain(x), y)
    print(f"whole model: {sum(p.nbytes for p in plain.parameters()):>10,} bytes of parameters")
    del plain

    torch.manual_seed(0)  # workers build from the random state at this point
    with sf.Pipeline(build_model, stages=4, microbatches=4, loss=F.mse_loss) as pipe:
        loss = pipe.train_step(x, target=y)
        for stage in range(pipe.stages):
            held = sum(pipe.split.tensors[name].numel for name in pipe.split.parameter_names(stage)) * 4
            print(f"stage {stage}:     {held:>10,}")
    print(f"loss in four stages {loss:.6f}, of a plain build {plain_loss:.6f}")


if __name__ == "__main__":
    main()

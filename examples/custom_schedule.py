"""Write a schedule by hand, see it refused when it is wrong, and train with it when it is right.

    python examples/custom_schedule.py

A schedule is a list of actions for each worker; 1F0 is stage 1, forward, micro-batch 0. Prints the error for a
schedule that would deadlock, a picture of one that runs beside that of 1F1B, and that both give the same loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf
from stageflow.schedule import Schedule

WRONG = [
    "0F0 0B0 0F1 0B1",
    "1F1 1B1 1F0 1B0",  # waits for micro-batch 1, which worker 0 starts only after 1B0
]

# B is split into I (gradient of the inputs) and W (gradient of the weights): worker 1 hands gradients back sooner,
# and worker 0 fills its waiting with the W of an earlier micro-batch.
MINE = [
    "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2",
    "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
]


def main() -> None:
    try:
        Schedule.from_orders(WRONG).validate()
    except sf.StageflowError as error:
        print(f"{type(error).__name__}: {error}\n")

    mine = Schedule.from_orders(MINE, name="mine")
    usual = sf.build_schedule("1f1b", stages=2, microbatches=3)
    for schedule in (usual, mine):
        report, simulation = schedule.validate(), schedule.simulate()
        print(f"{schedule.name}: bubble {simulation.bubble:.1%}, activations kept {report.peak_activations}")
        print(schedule.draw(), end="\n\n")

    torch.manual_seed(0)
    x, y = torch.randn(12, 16), torch.randn(12, 4)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    for schedule in (usual, mine):
        with sf.Pipeline(model, schedule=schedule, loss=F.mse_loss) as pipe:
            print(f"{schedule.name}: loss {pipe.train_step(x, target=y):.6f}")


if __name__ == "__main__":
    main()

"""Every model of the zoo trains in 2 and in 4 stages with the numbers of one device."""

from functools import lru_cache, partial

import pytest
import torch

import stageflow as sf
from stageflow.testing.leaks import no_leaks
from zoo.entry import Entry, own_loss
from zoo.harness import Record, compare, one_device
from zoo.registry import ZOO

STEPS, MICROBATCHES = 3, 4
# By measured time, as users get it; and by size, which cuts in the same places on every machine.
BALANCE = {1: "parameters", 2: "time", 4: "parameters"}

# Model code of other packages warns about itself.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(_warm):
    """In place of a look after every test, which takes as long as the test."""
    with no_leaks():
        yield


def train(entry: Entry, stages: int) -> Record:
    model, inputs, _ = entry.build()
    record = Record()
    with sf.Pipeline(
        model,
        stages=stages,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        balance=BALANCE[stages],
        launch="threads",
        optimizer=partial(torch.optim.SGD, lr=entry.lr),
        loss=None if entry.loss is own_loss else entry.loss,
    ) as pipe:
        for _ in range(STEPS):
            record.losses.append(float(pipe.train_step(**inputs)))
            record.gradients.append(pipe.gradients())
        record.state = pipe.state_dict()
    return record


@lru_cache(maxsize=1)
def reference(name: str) -> Record:
    """One device; for models that draw random numbers, the pipeline itself in one stage."""
    entry = ZOO[name]
    return train(entry, stages=1) if entry.random else one_device(entry, STEPS, MICROBATCHES)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ZOO)
def test_trains_like_one_device(name: str, stages: int) -> None:
    compare(reference(name), train(ZOO[name], stages))

"""What a pipeline is made of, before and after the model is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.runtime.optimize import OptimizerOptions
from stageflow.runtime.stage import StageOptions
from stageflow.schedule import SCHEDULES, Schedule, build_schedule
from stageflow.split import split_model
from stageflow.train.blueprint import MANY, Blueprint


class Masked(nn.Module):
    """Its last layer reads a mask that the first did not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x * mask)


X, MASK = torch.ones(2, 4), torch.ones(2, 4)


def split_blueprint(schedule: str = "1f1b", stages: int = 3) -> Blueprint:
    made = Blueprint(stages, 4, schedule, None)
    made.show((X, MASK), {})
    made.split = split_model(Masked(), (X, MASK), stages=stages, split="blocks")
    return made


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_one_schedule_is_made_for_each_number_of_micro_batches(name):
    made = Blueprint(2, 4, name, None)
    full = made.schedule_for(4)
    assert made.schedule_for(4) is full
    assert made.schedule_for(3).microbatches == 3
    assert made.schedule_for(3).placement == full.placement
    assert (full.name, made.n_workers) == (name, 2)


def test_forwards_alone_keep_the_placement_of_training():
    made = Blueprint(4, 4, "interleaved_1f1b", 2)
    forward = made.schedule_for(4, train=False)
    assert not forward.has_backward
    assert forward.placement == made.placement == (0, 1, 0, 1)


def test_very_many_micro_batches_are_planned_once_a_batch_has_them():
    made = Blueprint(2, 50 * MANY, "1f1b", None)
    assert made.outline.microbatches == MANY
    assert made.placement == (0, 1)
    assert made.schedule_for(3).microbatches == 3


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward_only"])
def test_every_named_schedule_takes_a_short_last_batch_on_the_same_workers(name):
    made = Blueprint(4, 8, name, None)
    for microbatches in (1, 3, 7):
        short = made.schedule_for(microbatches)
        assert (short.microbatches, short.placement) == (microbatches, made.placement)


def test_too_few_micro_batches_for_a_full_batch_are_refused():
    with pytest.raises(InputError, match="dualpipe_v"):
        Blueprint(4, 2, "dualpipe_v", None)


def test_an_own_schedule_is_for_its_own_number_of_micro_batches():
    own = build_schedule("1f1b", stages=2, microbatches=4)
    made = Blueprint(2, 4, own, None)
    assert made.schedule_for(4).orders == own.orders
    with pytest.raises(InputError, match="made for 4 micro-batches, this batch gives 3: give batches of at least 4"):
        made.schedule_for(3)


@pytest.mark.parametrize(
    ("stages", "schedule", "words"),
    [
        (3, build_schedule("1f1b", stages=2, microbatches=4), "is for 2 stages, stages=3"),
        (2, "1f2b", r"unknown schedule '1f2b'; known: gpipe.*, auto"),
        (2, "forward_only", "has no backward, so it can't train"),
        (2, Schedule.from_orders(["0F0 0F1 0F2 0F3", "1F0 1F1 1F2 1F3"]), "has no backward"),
        (2, build_schedule("pipedream_2bw", stages=2, microbatches=4), "pipedream_2bw"),
        (2, "pipedream_2bw", "pipedream_2bw"),
    ],
    ids=["stages", "unknown", "forward_only", "own without backward", "own with stale weights", "stale weights"],
)
def test_what_can_not_be_is_refused_at_once(stages, schedule, words):
    with pytest.raises(InputError, match=words):
        Blueprint(stages, 4, schedule, None)


def test_every_schedule_that_trains_validates_over_the_graph_of_the_split():
    """A model whose graph is no chain, and each schedule that this number of stages allows."""
    tried = 0
    for name in SCHEDULES:
        try:
            made = Blueprint(4, 4, name, None)
        except InputError:
            continue
        graph = StageGraph(4, frozenset({(0, 1), (1, 2), (2, 3), (0, 3)}))
        split = split_model([nn.Linear(4, 4) for _ in range(4)], (X,), stages=4)
        split.graph = graph
        made.split = split
        assert made.schedule_for(4).graph == graph
        tried += 1
    assert tried >= 4


def test_after_the_split_each_worker_is_set_up_with_its_own_stages():
    made = split_blueprint()
    setups = made.worker_setups(
        options=StageOptions(), optimizer=OptimizerOptions(), seed=0, device="cpu", dtype=None, timeout=1.0
    )
    assert [[spec.index for spec in setup.specs] for setup in setups] == [[0], [1], [2]]
    assert all(setup.n_workers == 3 and setup.placement == (0, 1, 2) for setup in setups)


def test_a_worker_wants_what_its_stages_were_seen_to_read_and_what_nobody_knows_of():
    made = split_blueprint()
    # the code right before the last layer, which reads the mask, is the stage before's; what the example did not show,
    # a keyword say, goes to all
    assert [made.wants(worker, "0/0") for worker in range(3)] == [True, False, False]
    assert [made.wants(worker, "1/0") for worker in range(3)] == [False, True, False]
    assert [made.wants(worker, "=scale/0") for worker in range(3)] == [True, True, True]
    assert [made.wants(worker, "target/0") for worker in range(3)] == [False, False, True]

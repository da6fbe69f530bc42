"""One stage: forward, backward, and what is kept between them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import CPU, WIDTH, Program, a_batch, programs, stages
from torch import Tensor, nn

from stageflow.errors import InputError, PipelineError
from stageflow.graph import Bundle, StageGraph
from stageflow.runtime.random import Generators, Turns
from stageflow.runtime.stage import Stage, StageOptions

CHAIN = StageGraph.chain(2)
KEY = (0, 0)


def two(**options: Any) -> tuple[Program, Stage, Program, Stage]:
    made = programs(CHAIN)
    ready = stages(CHAIN, made, **options)
    return made[0], ready[0], made[1], ready[1]


def forward(first: Stage, last: Stage, **how: Any) -> Any:
    inputs = a_batch(1).microbatch(0)
    sent = first.forward(0, inputs, {}, KEY, train=True, **how).bundles[1]
    return last.forward(0, inputs, {0: sent}, KEY, train=True, **how)


def test_a_message_says_which_of_its_tensors_have_a_gradient():
    _, first, _, _ = two()
    bundle = first.forward(0, a_batch(1).microbatch(0), {}, KEY, train=True).bundles[1]
    assert bundle.meta == [None, ["x"]]
    assert not bundle.tensors["x"].requires_grad


def test_a_frozen_first_stage_sends_nothing_to_differentiate_and_keeps_no_graph():
    program, first, _, last = two()
    program.module.requires_grad_(False)
    inputs = a_batch(1).microbatch(0)
    sent = first.forward(0, inputs, {}, KEY, train=True).bundles[1]
    assert sent.meta == [None, []]
    last.forward(0, inputs, {0: sent}, KEY, train=True)
    assert last.backward(0, {}, 1.0) == {0: Bundle()}
    assert first.backward(0, {1: Bundle()}, 1.0) == {}
    assert program.module.weight.grad is None


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_backward_gives_the_gradient_of_the_input_and_adds_that_of_the_weights(recompute):
    _, first, program, last = two(recompute=recompute)
    forward(first, last)
    gradients = last.backward(0, {}, 0.5)[0].tensors
    assert gradients.keys() == {"x"}
    once = program.module.weight.grad.clone()
    forward(first, last)
    torch.testing.assert_close(last.backward(0, {}, 0.5)[0].tensors["x"], gradients["x"])
    torch.testing.assert_close(program.module.weight.grad, 2 * once)


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_i_and_w_together_give_what_b_gives(recompute):
    _, first, program, last = two(recompute=recompute)
    forward(first, last)
    whole = last.backward(0, {}, 1.0)[0].tensors["x"]
    weight = program.module.weight.grad.clone()
    program.module.zero_grad()
    for stage in (first, last):
        stage.prepare_split_backward()
    forward(first, last, split=True)
    torch.testing.assert_close(last.backward_inputs(0, {}, 1.0)[0].tensors["x"], whole)
    assert program.module.weight.grad is None  # put off
    assert last.in_flight == 1
    last.backward_weights(0)
    torch.testing.assert_close(program.module.weight.grad, weight)
    assert last.in_flight == 0


def test_recomputation_runs_the_forward_again_once_and_counts_a_batch_norm_once():
    made = programs(CHAIN, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
    plain = programs(CHAIN, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
    for each, options in ((made, {"recompute": "stage"}), (plain, {})):
        ready = stages(CHAIN, each, **options)
        forward(ready[0], ready[1])
        ready[0].backward(0, {1: ready[1].backward(0, {}, 1.0)[0]}, 1.0)
    assert len(made[0].calls) == 2
    for index in range(2):
        for name, buffer in plain[index].buffers.items():
            torch.testing.assert_close(made[index].buffers[name], buffer)
        for name, parameter in plain[index].parameters.items():
            torch.testing.assert_close(made[index].parameters[name].grad, parameter.grad)


class Counting(nn.Module):
    """Counts, from its second forward on, how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.ran = False

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.ran
        self.ran = True
        return self.layer(x) + self.count


def test_recomputation_counts_once_what_changes_in_training_after_a_step_in_eval_mode():
    made = programs(CHAIN, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    ready = stages(CHAIN, made, recompute="stage")
    for training in (False, True):
        made[0].module.train(training)
        forward(ready[0], ready[1])
        ready[0].backward(0, {1: ready[1].backward(0, {}, 1.0)[0]}, 1.0)
    assert made[0].buffers["0.1.num_batches_tracked"] == 1


def test_recomputation_starts_from_what_a_buffer_was_also_if_only_later_forwards_change_it():
    made = programs(CHAIN, Counting)
    first = stages(CHAIN, made, recompute="stage")[0]
    batch, sent, again = a_batch(3), {}, []
    for microbatch in range(3):
        sent[microbatch] = first.forward(microbatch, batch.microbatch(microbatch), {}, KEY, train=True).bundles[1]
    made[0].module.register_forward_hook(lambda *call: again.append(call[2].detach()))
    for microbatch in range(3):
        first.backward(microbatch, {1: Bundle({"x": torch.ones(2, WIDTH)})}, 1.0)
    assert made[0].buffers["0.count"] == 2
    for microbatch in (1, 2):
        torch.testing.assert_close(again[microbatch], sent[microbatch].tensors["x"])


class LateDropout(nn.Module):
    """Draws only once it is told to, from torch's generator and from Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * random.random() if self.on else x


def test_a_stage_beside_others_is_keyed_also_if_it_first_draws_in_a_later_step():
    drawn = []
    for late in (True, False):
        program = programs(CHAIN, LateDropout)[0]
        stage = Stage(program, CHAIN, CPU, StageOptions(), Generators(CPU), Turns())
        program.module.on = not late
        batch = a_batch(2)
        for step in range(2):
            random.seed(late)
            torch.manual_seed(late)
            sent = [stage.forward(i, batch.microbatch(i), {}, (0, step), train=True).bundles[1] for i in range(2)]
            program.module.on = True
            stage.clear()
        drawn.append([bundle.tensors["x"] for bundle in sent])
    torch.testing.assert_close(drawn[0], drawn[1])


def test_a_loss_without_weight_adds_nothing_not_even_a_nan():
    _, first, program, last = two()
    inputs = a_batch(1).microbatch(0)
    sent = first.forward(0, inputs, {}, KEY, train=True).bundles[1]
    sent.tensors["x"].fill_(float("nan"))
    last.forward(0, inputs, {0: sent}, KEY, train=True)
    assert last.backward(0, {}, 0.0) == {0: Bundle()}
    assert program.module.weight.grad is None


def test_a_value_for_two_stages_gets_the_sum_of_their_gradients():
    graph = StageGraph(3, frozenset({(0, 1), (0, 2), (1, 2)}))
    made = programs(graph)
    first = stages(graph, made)[0]
    first.forward(0, a_batch(1).microbatch(0), {}, KEY, train=True)
    ones = torch.ones(2, WIDTH)
    first.backward(0, {1: Bundle({"x": ones}), 2: Bundle({"x": 2 * ones})}, 1.0)
    torch.testing.assert_close(made[0].module.bias.grad, torch.full((WIDTH,), 6.0))


def test_an_evaluation_keeps_nothing():
    _, first, _, _ = two()
    bundle = first.forward(0, a_batch(1).microbatch(0), {}, KEY, train=False).bundles[1]
    assert bundle.meta == [None, []]
    assert first.in_flight == 0


def test_what_an_interrupted_step_left_is_dropped():
    _, first, _, last = two()
    forward(first, last)
    assert (first.in_flight, last.in_flight) == (1, 1)
    first.clear()
    assert first.in_flight == 0


def test_a_nan_is_told_with_what_gave_it():
    program, first, _, _ = two(check_finite=True)
    with torch.no_grad():
        program.module.bias[0] = float("inf")
    words = "stage 0, micro-batch 3: what stage 0 gives, for stage 1, holds NaN or infinity"
    with pytest.raises(PipelineError, match=words):
        first.forward(3, a_batch(4).microbatch(3), {}, KEY, train=True)


def test_a_stage_without_layers_can_not_recompute_them_one_by_one():
    with pytest.raises(InputError, match="stage 0 has no layers to recompute one by one"):
        Stage(programs(CHAIN)[0], CHAIN, CPU, StageOptions(recompute="layer"), Generators(CPU))

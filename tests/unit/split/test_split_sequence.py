import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from split_harness import Scale, build_programs, check_equals_whole, forward, no_seed, outputs_with_seeds
from torch import nn

from stageflow.errors import SplitError
from stageflow.split import split_model

WIDTH = 6


def batches(n=2, size=3, width=WIDTH):
    generator = torch.Generator().manual_seed(3)
    return [((torch.randn(size, width, generator=generator),), {}) for _ in range(n)]


def mlp(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_sequential_trains_as_it_does_whole(stages):
    model = mlp()
    split = split_model(model, stages=stages, split="sequence")
    assert split.way == "sequence"
    check_equals_whole(split, model, batches())


def test_splitting_and_measuring_leave_the_model_as_it_was():
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
    ).eval()
    model[1].train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(4)
    random = torch.get_rng_state()
    hooks = []
    model[0].weight.register_post_accumulate_grad_hook(hooks.append)

    split = split_model(model, batches()[0][0], stages=2)

    assert split.unit == "s"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model] == [False, True, False, False]
    assert model[0].weight.grad is None
    assert not hooks


class Widen(nn.Module):
    def forward(self, x):
        return {"pair": (x, 2 * x), "size": x.shape[0], "nothing": None}


class Narrow(nn.Module):
    def forward(self, value):
        assert value["nothing"] is None
        assert type(value["pair"]) is tuple
        return value["pair"][0] * value["size"] + value["pair"][1]


def test_values_between_layers_may_be_nested():
    model = [nn.Linear(WIDTH, WIDTH), Widen(), Narrow(), nn.Linear(WIDTH, WIDTH)]
    split = split_model(model, stages=2, boundaries=["2"])
    assert split.layer_names(1) == ["2", "3"]
    check_equals_whole(split, model, batches())


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_classes_that_no_worker_could_import_travel_when_an_example_shows_them():
    @dataclass
    class Local:
        x: torch.Tensor

    class Wrap(nn.Module):
        def forward(self, x):
            return Local(x)

    class Unwrap(nn.Module):
        def forward(self, value):
            return value.x + 1

    model = [nn.Linear(WIDTH, WIDTH), Wrap(), Unwrap()]
    split = split_model(model, batches()[0][0], stages=2, boundaries=["2"])
    check_equals_whole(split, model, batches(), steps=1)


def test_the_first_of_a_list_takes_all_arguments():
    class Mix(nn.Module):
        def forward(self, x, y, *, scale=1.0):
            return x + scale * y

    model = [Mix(), Scale(WIDTH), Scale(WIDTH)]
    (x,), (y,) = batches()[0][0], batches(2)[1][0]
    split = split_model(model, ((x, y), {"scale": 2.0}), stages=3)
    check_equals_whole(split, model, [((x, y), {"scale": 3.0})])


def test_a_sequential_takes_one_input_as_ever():
    (x,), _ = batches()[0]
    split = split_model(mlp(), stages=2)
    programs = build_programs(split)
    output, _, _ = forward(split, programs, (), {"input": x})
    torch.testing.assert_close(output, mlp()(x))
    with pytest.raises(TypeError):
        programs[0].forward((x, x), {}, {}, no_seed)


def test_nested_sequentials_are_opened_and_keep_their_names():
    model = nn.Sequential(
        OrderedDict(
            stem=nn.Linear(WIDTH, WIDTH), body=nn.Sequential(Scale(WIDTH), nn.Sequential(Scale(WIDTH), nn.ReLU()))
        )
    )
    split = split_model(model, stages=4)
    assert [layer.name for layer in split.layers] == ["stem", "body.0", "body.1.0", "body.1.1"]
    assert set(split.owners) == set(dict(model.named_parameters()))
    check_equals_whole(split, model, batches())
    assert split_model(model, stages=2, boundaries=["body.1"]).layer_names(1) == ["body.1.0", "body.1.1"]


def test_tied_weights_have_one_owner_and_stay_equal():
    embed, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), head)
    split = split_model(model, stages=4)
    assert split.aliases == {"3.weight": "0.weight"}
    assert split.mirrors == {"0.weight": (3,)}
    assert split.owners["0.weight"] == 0
    programs = check_equals_whole(split, model, batches())
    assert torch.equal(programs[0].parameters["0.weight"], programs[3].parameters["0.weight"])


def test_a_module_listed_three_times_is_one_module():
    shared = nn.Linear(WIDTH, WIDTH)
    model = [shared, Scale(WIDTH), shared, nn.Tanh(), shared]
    split = split_model(model, stages=3, boundaries=["2", "3"])
    assert split.mirrors == {"0.weight": (1, 2), "0.bias": (1, 2)}
    check_equals_whole(split, model, batches())


@pytest.mark.parametrize("stages", [2, 3])
def test_batch_norm_sees_each_microbatch_once(stages):
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
    )
    split = split_model(model, batches()[0][0], stages=stages)
    programs = check_equals_whole(split, model, batches(3))
    assert int(programs[split.owners["1.num_batches_tracked"]].buffers["1.num_batches_tracked"]) == 9


def test_layers_that_share_a_changing_buffer_stay_together():
    norm = nn.BatchNorm1d(WIDTH)
    model = [nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)]
    for example in (None, batches()[0][0]):
        split = split_model(model, example, stages=2)
        assert split.owners["1.running_mean"] == split.layers[1].stage == split.layers[3].stage
        check_equals_whole(split, model, batches())
        with pytest.raises(SplitError, match="'1' and '3' share a buffer that changes in forward"):
            split_model(model, example, stages=4, split="sequence")


def test_a_shared_buffer_that_never_changes_does_not_bind_its_layers():
    class AddTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(float(WIDTH)))

        def forward(self, x):
            return x + self.table

    table = AddTable()
    model = [table, Scale(WIDTH), table, Scale(WIDTH)]
    split = split_model(model, batches()[0][0], stages=4)
    check_equals_whole(split, model, batches())


@pytest.mark.parametrize("position", range(4))
def test_a_stage_may_begin_with_a_layer_that_works_in_place(position):
    model = [Scale(WIDTH), Scale(WIDTH), Scale(WIDTH)]
    model.insert(position, nn.ReLU(inplace=True))
    check_equals_whole(split_model(model, stages=4), model, batches())


def test_working_in_place_leaves_what_arrived_as_it_was():
    split = split_model([Scale(WIDTH), nn.ReLU(inplace=True)], stages=2)
    programs = build_programs(split)
    (x,), _ = batches()[0]
    _, _, received = forward(split, programs, (x,), {})
    arrived = received[0, 1]
    before = arrived.tensors["0"].detach().clone()
    for training in (True, True, False, False):
        programs[1].module.train(training)
        with torch.no_grad():
            programs[1].forward((), {}, {0: arrived}, no_seed)
        assert torch.equal(arrived.tensors["0"], before)


def test_random_draws_do_not_depend_on_the_cuts():
    model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))])
    losses, gradients = outputs_with_seeds(split_model(model, stages=1), batches(3))
    for stages in (2, 3, 6):
        other_losses, other_gradients = outputs_with_seeds(split_model(model, stages=stages), batches(3))
        assert torch.equal(losses, other_losses)
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_frozen_parts_get_no_gradient():
    model = mlp()
    for parameter in [*model[0].parameters(), *model[2].parameters()]:
        parameter.requires_grad_(False)
    split = split_model(model, stages=4)
    programs = check_equals_whole(split, model, batches())
    assert not split.tensors["0.weight"].requires_grad
    assert not programs[0].parameters["0.weight"].requires_grad


def test_a_sequence_may_have_parameters_of_its_own():
    class WithExtra(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.extra = nn.Parameter(torch.ones(3))
            self.register_buffer("version", torch.tensor(2))

    model = WithExtra(*mlp())
    split = split_model(model, stages=2)
    assert split.owners["extra"] == split.owners["version"] == 0
    check_equals_whole(split, model, batches())


def test_a_sequential_with_a_forward_of_its_own_is_no_sequence():
    class Backwards(nn.Sequential):
        def forward(self, x):
            for module in reversed(self):
                x = module(x)
            return x

    with pytest.raises(SplitError, match="Backwards has a forward of its own"):
        split_model(Backwards(*mlp()), stages=2, split="sequence")


def test_hooks_of_the_sequence_would_be_lost_and_are_refused():
    model = mlp()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(SplitError, match="has hooks"):
        split_model(model, stages=2, split="sequence")


def test_a_layer_that_fails_on_the_example_is_named():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(5, 5))
    with pytest.raises(SplitError, match="layer '1' fails on the example: mat1 and mat2"):
        split_model(model, batches()[0][0], stages=2, split="sequence")


def test_no_cut_where_a_value_can_not_travel():
    class Opaque(nn.Module):
        def forward(self, x):
            return (lambda: x), x

    class Open(nn.Module):
        def forward(self, value):
            return value[0]() * 2

    model = [Scale(WIDTH), Opaque(), Open(), Scale(WIDTH)]
    split = split_model(model, batches()[0][0], stages=3)
    assert [layer.stage for layer in split.layers] == [0, 1, 1, 2]
    check_equals_whole(split, model, batches())
    with pytest.raises(SplitError, match=r"at most 3 stages, 4 were asked for; what '1' gives\[0\] is a .*function"):
        split_model(model, batches()[0][0], stages=4, split="sequence")


def test_more_stages_than_layers_names_the_count_that_works():
    with pytest.raises(SplitError, match="4 layers can be cut into at most 4 stages, 5 were asked for"):
        split_model(mlp(), stages=5, split="sequence")


def test_measured_time_decides_where_parameters_would_not():
    class Slow(nn.Module):
        def forward(self, x):
            for _ in range(300):
                x = x.sin()
            return x

    model = [Slow(), Slow(), Slow(), nn.Linear(WIDTH, 4000), nn.Linear(4000, WIDTH)]
    split = split_model(model, batches()[0][0], stages=2)
    assert split.unit == "s"
    assert "measured time" in split.reason
    assert split.layers[1].stage in (0, 1)
    assert split.layers[3].stage == 1
    assert split.layers[0].stage == 0
    assert len(split.layer_names(0)) < 3
    by_size = split_model(model, batches()[0][0], stages=2, balance="parameters")
    assert by_size.layer_names(1) == ["4"]


def test_boundaries_that_are_no_layers_are_refused():
    with pytest.raises(SplitError, match="boundary '7' is none of the layers that can start a stage: 0, 1, 2, 3"):
        split_model(mlp(), stages=2, boundaries=["7"], split="sequence")
    with pytest.raises(SplitError, match="not in the order"):
        split_model(mlp(), stages=3, boundaries=["2", "1"], split="sequence")
    with pytest.raises(SplitError, match="right before '0'"):
        split_model(mlp(), stages=2, boundaries=["0"], split="sequence")


def test_the_table_shows_layers_parameters_and_costs():
    text = str(split_model(mlp(), stages=2))
    assert "split by sequence: Sequential of 4 layers, balanced by parameters" in text
    assert "0      0, 1            84  50.0%" in text
    assert "slowest stage has 1.00 x the mean cost" in text

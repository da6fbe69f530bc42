import copy

import pytest
import torch
from split_harness import build_programs, check_equals_whole, forward, outputs_with_seeds
from torch import nn

from stageflow.errors import InputError, SplitError
from stageflow.split import InputsUsed, split_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.export's own making


def images(batch, size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, 3, size, size, generator=generator),), {"mask": torch.rand(batch, generator=generator)}


class Branches(nn.Module):
    """Skips, a diamond, work in place, tied weights, buffers changed in place and by assignment, a dict as output."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.body_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.left = nn.Linear(5, 5, bias=False)
        self.right = nn.Linear(5, 5, bias=False)
        self.right.weight = self.left.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, x, *, mask=None):
        a = self.act(self.norm(self.stem(x)))
        b = self.body_norm(self.body(a)) * 1
        b += a
        self.seen = self.seen + x.detach().mean()
        y = (torch.tanh(b) + a).mean((2, 3))
        z = (self.head(y) + self.scale * torch.arange(5)) * mask[:, None]
        with torch.no_grad():
            size = z.norm() + 1
        return {"out": self.right(torch.tanh(self.left(z))) / size, "n": 3, "y": y.view(x.shape[0], -1), "none": None}


@pytest.fixture(scope="module")
def branches():
    torch.manual_seed(0)
    return Branches()


@pytest.mark.parametrize("stages", [2, 4])
def test_a_graph_with_skips_trains_as_its_model_at_any_size(branches, stages):
    split = split_model(branches, images(4, 8), stages=stages, split="export")
    assert split.way == "export"
    assert not split.warnings
    check_equals_whole(split, branches, [images(4, 8), images(3, 8), images(2, 6), images(1, 7)], rtol=1e-4)

    programs = build_programs(split)
    for program in programs:
        program.module.eval()
    args, kwargs = images(3, 9)
    whole = copy.deepcopy(branches).eval()
    output, _, _ = forward(split, programs, args, kwargs)
    torch.testing.assert_close(output, whole(*args, **kwargs))
    assert int(programs[split.owners["norm.num_batches_tracked"]].buffers["norm.num_batches_tracked"]) == 0


class UNet(nn.Module):
    """A value that skips two stages, draws in between, an input that only the end reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.4)

    def forward(self, x, bias):
        a = self.drop(self.first(x))
        b = self.drop(torch.relu(self.second(a)))
        return (self.drop(self.third(b)) + a, bias + 1)


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet(), (torch.randn(4, 6), torch.randn(6))


def test_values_go_straight_to_their_users(unet):
    model, example = unet
    split = split_model(model, example, stages=3, split="export", boundaries=["second", "third"])
    assert split.graph.edges == {(0, 1), (1, 2), (0, 2)}
    assert split.inputs_used == [InputsUsed(frozenset({0})), InputsUsed(), InputsUsed(frozenset({1}))]
    assert [split.owners[f"{name}.weight"] for name in ("first", "second", "third")] == [0, 1, 2]


def test_draws_do_not_depend_on_the_cuts(unet):
    model, example = unet
    batches = [(example, {})] * 2
    losses, gradients = outputs_with_seeds(split_model(model, example, stages=1, split="export"), batches)
    other = outputs_with_seeds(split_model(model, example, stages=3, split="export"), batches)
    assert torch.equal(losses, other[0])
    assert losses[0] != losses[1]
    assert all(torch.equal(gradients[name], other[1][name]) for name in gradients)


def test_eval_draws_nothing(unet):
    model, example = unet
    split = split_model(model, example, stages=2, split="export")
    programs = build_programs(split)
    for program in programs:
        program.module.eval()
    output, _, _ = forward(split, programs, example, {})
    torch.testing.assert_close(output, copy.deepcopy(model).eval()(*example))


def test_a_function_may_be_captured(unet):
    _, example = unet
    torch.manual_seed(0)
    split = split_model(UNet, example, stages=2, split="export")
    assert "whole model was built once" in split.warnings[0]
    torch.manual_seed(0)
    expected = UNet().state_dict()
    for program in build_programs(split):
        assert all(torch.equal(parameter, expected[name]) for name, parameter in program.parameters.items())


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, flag=True):
        x = self.first(x)
        return self.second(x.reshape(4, 6) if flag else x)


def test_calls_that_the_graph_is_not_good_for_are_refused():
    split = split_model(Fixed(), ((torch.randn(4, 6),), {"flag": True}), stages=2, split="export")
    programs = build_programs(split)
    good = torch.randn(4, 6)
    forward(split, programs, (good,), {"flag": True})
    with pytest.raises(InputError, match="dimension 0 of x is 8, but the graph of this model was captured for 4 only"):
        forward(split, programs, (torch.randn(8, 6),), {"flag": True})
    with pytest.raises(InputError, match="flag = True, got False"):
        forward(split, programs, (good,), {"flag": False})
    with pytest.raises(InputError, match="1 positional arguments and the keywords"):
        forward(split, programs, (good, True), {})
    with pytest.raises(InputError, match=r"x must be a torch.float32 tensor of 2 dimensions, got torch.int64 \[4, 6\]"):
        forward(split, programs, (good.long(),), {"flag": True})


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class StraightThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(Round.apply(self.first(x)))


class DataBranch(StraightThrough):
    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else self.second(-x)


class Mapped(StraightThrough):
    def forward(self, x):
        return self.second(torch.vmap(self.first)(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mapped, "the model calls torch.func"),
        (StraightThrough, "the custom autograd function Round would lose its own backward"),
        (DataBranch, "torch.export can't capture DataBranch: Could not guard on data-dependent expression"),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused(model, reason):
    with pytest.raises(SplitError, match=reason):
        split_model(model(), (torch.randn(4, 6),), stages=2, split="export")
    assert not torch._C._are_functorch_transforms_active()


def test_an_example_is_needed_and_has_to_run():
    with pytest.raises(SplitError, match="capturing a graph takes example inputs"):
        split_model(Fixed(), stages=2, split="export")
    with pytest.raises(SplitError, match="Fixed fails on the example: mat1 and mat2"):
        split_model(Fixed(), (torch.randn(4, 5),), stages=2, split="export")

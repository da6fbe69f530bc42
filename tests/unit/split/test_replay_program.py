"""Replayed stages at work: other shapes, other paths, other modes; what travels; what is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import cloudpickle
import pytest
import torch
from replay_harness import CPU, Line, assert_close, assert_same_training, cut, seed_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stageflow.errors import SplitError
from stageflow.graph import Bundle
from stageflow.split import blocks, split_model
from stageflow.split.replay.ghost import Ghost
from stageflow.split.replay.log import Log
from stageflow.split.request import Request

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    """Tokens in, one number per token out."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + torch.arange(tokens.shape[1])[:, None] / 10
        for block in self.blocks:
            x = block(x) if mask is None else block(x) * mask[..., None]
        return self.head(x)


def tokens(rows: int = 3, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_same_output(model: nn.Module, line: Line, *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(line.forward(*args, **kwargs).output, model(*args, **kwargs))


def test_shapes_may_change_from_one_micro_batch_to_the_next() -> None:
    model = Model()
    line = Line(cut(model, tokens(), stages=3))
    for rows, length in [(3, 5), (1, 9), (3, 5), (2, 1), (1, 9), (0, 4)]:
        assert_same_output(model, line, tokens(rows, length))


def test_stages_need_no_history() -> None:
    """A bundle can be used by a stage that saw no other before it, and in any order."""
    model = Model()
    line, fresh = (Line(cut(model, tokens(), stages=2)) for _ in range(2))
    inputs = [tokens(2, 3), tokens(2, 7), tokens(2, 3, seed=1)]
    bundles = [line.programs[0].forward((x,), {}, {}, seed_of(0)).bundles[1] for x in inputs]
    for x, bundle in reversed(list(zip(inputs, bundles, strict=True))):
        result = fresh.programs[1].forward((x.to("meta"),), {}, {0: bundle}, seed_of(0))
        torch.testing.assert_close(result.output, model(x))


def test_the_message_for_the_usual_shapes_is_made_once() -> None:
    line = Line(cut(Model(), tokens(), stages=2))
    first, other, again = (line.forward(tokens(*shape)).bundles[0, 1].meta for shape in [(3, 5), (2, 4), (3, 5)])
    assert first is again
    assert first != other
    assert Log.from_text(first).to_text() == first


def test_only_what_is_used_later_is_sent() -> None:
    split = cut(Model(), tokens(), stages=4, mask=torch.ones(3, 5))
    assert split.graph.edges == {(0, 1), (1, 2), (2, 3)}
    ran = Line(split).forward(tokens(), mask=torch.ones(3, 5))
    assert [len(bundle.tensors) for bundle in ran.bundles.values()] == [1, 1, 1]
    used = split.inputs_used
    assert used[0] is not None
    assert used[0].args == {0}
    assert all(u is not None and not u.args for u in used[1:])
    assert any("mask" in u.kwargs for u in used if u is not None)


def test_an_optional_input_may_come_or_go() -> None:
    model = Model()
    line = Line(cut(model, tokens(), stages=3, mask=None))
    assert_same_output(model, line, tokens())
    line = Line(cut(model, tokens(), stages=3, mask=torch.ones(3, 5)))
    assert_same_output(model, line, tokens(), mask=torch.rand(3, 5))
    assert_same_output(model, line, tokens())


class Chooses(Model):
    """A branch and a loop that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        key = int(tokens.sum())
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if key % 2:
            x = self.odd(x) + first
        for _ in range(key % 3):
            x = x * 0.9
        if (x.detach().abs().amax() > 1e9).item():
            x = x - first
        return self.head(x)


def test_paths_that_the_example_did_not_take() -> None:
    model = Chooses()
    keys = [tokens(2, 3, seed) for seed in range(12)]
    assert len({int(k.sum()) % 6 for k in keys}) >= 4
    example = next(k for k in keys if int(k.sum()) % 2 == 0)
    split = cut(model, tokens=example, stages=3)
    assert split.mirrors.keys() >= {"odd.weight", "odd.bias"}
    data = [{"tokens": k} for k in keys[:6]]
    assert_same_training(copy.deepcopy(model), split, data, lambda out: out.square().mean())


class ExitsEarly(Model):
    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if tokens.sum() > -1 and tokens.shape[1] < 4:
                return x
        return self.head(x)


def test_a_forward_that_ends_before_the_last_stage() -> None:
    model = ExitsEarly()
    line = Line(cut(model, tokens(), stages=3))
    assert_same_output(model, line, tokens(2, 3))
    assert_same_output(model, line, tokens(2, 6))


class Modes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, WIDTH)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x)


def test_train_and_eval_in_turn() -> None:
    model = Modes()
    split = cut(model, tokens(), stages=2)
    assert int(model.norm.num_batches_tracked) == 0, "splitting must leave the model alone"
    line = Line(split)
    assert not torch.equal(line.forward(tokens(), key=1).output, line.forward(tokens(), key=2).output)
    assert int(line.buffers()["norm.num_batches_tracked"]) == 2
    line.train(False)
    model.norm.load_state_dict({k.removeprefix("norm."): v for k, v in line.buffers().items()}, strict=False)
    model.eval()
    for _ in range(2):
        ran = line.forward(tokens(), grad=False)
        torch.testing.assert_close(ran.output, model(tokens()))
        assert not ran.output.requires_grad
    assert int(line.buffers()["norm.num_batches_tracked"]) == 2


def test_a_spec_holds_its_own_weights_only() -> None:
    model = Model(depth=4, width=64)
    split = cut(model, tokens(), stages=4)
    whole = len(cloudpickle.dumps(model))
    line = Line(split)
    assert max(line.sizes) < 0.25 * whole + 30_000
    for program in line.programs:
        real = {id(p) for p in program.module.parameters() if not isinstance(p, Ghost)}
        assert real == {id(p) for p in program.parameters.values()}
    held = [name for program in line.programs for name in program.parameters]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_splitting_leaves_the_model_as_it_was() -> None:
    model = Modes()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    cut(model, tokens(), stages=3)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) and module.training for module in model.modules())


@pytest.mark.parametrize("stages", [2, 3])
def test_a_model_built_by_a_function(stages: int) -> None:
    torch.manual_seed(0)
    split = split_model(Modes, (tokens(),), stages=stages, split="blocks", balance="time")
    line = Line(split).train(False)
    assert_same_output(Modes().eval(), line, tokens())
    assert max(line.sizes) < 40_000


def test_boundaries_by_name() -> None:
    split = cut(Model(), tokens(), stages=3, boundaries=("blocks.1", "head"))
    assert [split.layer_names(s)[0] for s in range(3)] == ["embed", "blocks.1", "head"]
    inside = cut(Model(), tokens(), stages=2, boundaries=("blocks.2.inner",))
    assert inside.layer_names(1)[0].startswith("blocks.2.inner")
    assert_same_output(Model(), Line(inside), tokens())
    with pytest.raises(SplitError, match="nowhere"):
        cut(Model(), tokens(), stages=2, boundaries=("nowhere",))


def test_more_stages_than_blocks_opens_the_blocks() -> None:
    model = Model(depth=2)
    split = cut(model, tokens(), stages=6)
    assert_same_output(model, Line(split), tokens())


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(SplitError, match="40 were asked for"):
        cut(Model(), tokens(), stages=40)


def test_an_example_is_needed() -> None:
    with pytest.raises(SplitError, match="example"):
        blocks.cut(Request(Model(), None, 2, "time", None))


class Shared(nn.Module):
    """One BatchNorm that runs early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return self.head(x)


def test_a_buffer_that_several_parts_change_stays_in_one_stage() -> None:
    x = torch.randn(4, WIDTH)
    split = cut(Shared(), x, stages=2)
    assert len({layer.stage for layer in split.layers if layer.name == "norm"}) == 1
    with pytest.raises(SplitError, match="norm"):
        cut(Shared(), x, stages=8)


class Impure(Model):
    """Takes another path at every call, for no reason that can be seen."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if next(COUNTER) % 7 else block(x) * 2
        return self.head(x)


COUNTER = itertools.count(1)


def test_paths_that_part_between_stages_are_noticed() -> None:
    line = Line(cut(Impure(), tokens(), stages=3), travel=False)

    def several_times() -> None:
        for _ in range(10):
            line.forward(tokens())

    with pytest.raises(SplitError, match="differs between workers"):
        several_times()


def test_a_missing_value_is_named() -> None:
    line = Line(cut(Model(), tokens(), stages=2))
    ran = line.forward(tokens())
    lost = Bundle({}, ran.bundles[0, 1].meta)
    with pytest.raises(SplitError, match=r"stage 1: .*'blocks\.\d'"):
        line.programs[1].forward((tokens(),), {}, {0: lost}, seed_of(0))


class Reversible(nn.Module):
    """An autograd.Function that runs modules: it can't be opened, but what is around it can."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return _ByHand.apply(x, self.blocks, *self.blocks.parameters())


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.blocks = blocks
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = start = ctx.saved_tensors[0].detach().requires_grad_()
            for block in ctx.blocks:
                x = block(x)
            gx, *gw = torch.autograd.grad(x, [start, *ctx.blocks.parameters()], gradient)
        return gx, None, *gw


def test_modules_run_by_an_autograd_function_stay_together() -> None:
    torch.manual_seed(0)
    data = [{"x": torch.randn(3, WIDTH)} for _ in range(2)]
    split = cut(Reversible(), stages=3, **data[0])
    assert [layer.name for layer in split.layers] == ["before", "middle", "after"]
    assert_same_training(Reversible(), split, data, lambda out: out.square().mean())


def test_tied_weights_are_mirrored() -> None:
    class Tied(Model):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x @ self.embed.weight.t()

    split = cut(Tied(), tokens(), stages=3)
    assert split.owners["embed.weight"] == 0
    assert split.mirrors["embed.weight"] == (2,)
    assert split.mirrors["head.weight"] == (1, 2), "what the example did not use may yet be used anywhere"
    model, line = Tied(), Line(split)
    ran = line.forward(tokens())
    line.backward(ran, ran.output.square().mean())
    model(tokens()).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(name, line.gradients()[name], parameter.grad)


def test_programs_are_built_on_the_device_asked_for() -> None:
    for spec in cut(Model(), tokens(), stages=2).specs:
        program = spec.build(CPU)
        assert {p.device for p in program.parameters.values()} == {CPU}
        assert program.index == spec.index

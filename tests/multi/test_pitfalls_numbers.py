"""Where pipelines are known to give wrong numbers without a word: here they are those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from one_device import (
    MICROBATCHES,
    Call,
    Plan,
    check,
    close,
    in_stages,
    on_more_plans,
    on_plans,
    pipeline,
    plainly,
    same,
    seeded,
)
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stageflow as sf
from stageflow.errors import CheckpointError, InputError, SplitError, StageFailed

WIDTH, SAMPLES, WORDS = 6, 10, 13


def rows(steps: int = 3) -> list[Call]:
    generator = torch.Generator().manual_seed(1)
    return [
        Call((torch.randn(SAMPLES, WIDTH, generator=generator),), target=torch.randn(SAMPLES, 3, generator=generator))
        for _ in range(steps)
    ]


def texts(steps: int = 3) -> list[Call]:
    generator = torch.Generator().manual_seed(1)
    return [
        Call(
            (torch.randint(WORDS, (SAMPLES, 5), generator=generator),),
            target=torch.randint(WORDS, (SAMPLES, 5), generator=generator),
        )
        for _ in range(steps)
    ]


def next_word(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100)


def dense(*extra: nn.Module) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), *extra, nn.Tanh()]


def chain(*between: nn.Module) -> nn.Sequential:
    """Linear layers with other modules between them."""
    layers: list[nn.Module] = []
    for module in between or (nn.Identity(),) * 4:
        layers += dense(module)
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Stack(nn.Module):
    """No sequence: glue around repeated blocks."""

    def __init__(self, make: Callable[[], nn.Module] = Block, blocks: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


# ------------------------------------------------------------------------------------------- sums of gradients


@on_more_plans
def test_two_batches_before_one_update_are_summed_each_scaled_once(plan: Plan) -> None:
    calls = rows(4)
    calls[0].update = calls[1].update = False
    check(chain, calls, plan, F.mse_loss)


@on_plans
def test_the_last_microbatches_are_smaller_and_weigh_less(plan: Plan) -> None:
    """10 samples in 4 parts are 3, 3, 2 and 2; together they are exactly the mean over the whole batch."""
    [call] = rows(1)
    model = seeded(chain)
    want = F.mse_loss(model(*call.args), call.target)
    want.backward()
    got = in_stages(chain, [call], plan, F.mse_loss)
    assert got.losses == pytest.approx([want.item()], rel=1e-5)
    close(got.gradients, {name: p.grad for name, p in model.named_parameters()})


@on_plans
@pytest.mark.parametrize("reduction", ["words", "sum"])
def test_a_loss_per_word_over_unequal_padding(plan: Plan, reduction: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, WORDS))

    [call] = texts(1)
    for row in range(SAMPLES):
        call.target[row, : row % 5] = -100
    per_word = {"words": "mean", "sum": "sum"}[reduction]

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100, reduction=per_word)

    weigh: Any = (lambda target: (target != -100).sum()) if reduction == "words" else "sum"
    model = seeded(build)
    want = loss(model(*call.args), call.target)
    want.backward()
    got = in_stages(build, [call], plan, loss, reduction=weigh)
    assert got.losses == pytest.approx([want.item()], rel=1e-5)
    close(got.gradients, {name: p.grad for name, p in model.named_parameters()})


@on_plans
def test_a_microbatch_without_a_single_word_weighs_nothing(plan: Plan) -> None:
    """Its own mean is 0 / 0: one NaN that must not reach the others."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(3)], nn.Linear(WIDTH, WORDS))

    [call] = texts(1)
    call.target[3:6] = -100  # all of the second micro-batch
    model = seeded(build)
    want = next_word(model(*call.args), call.target)
    want.backward()
    got = in_stages(build, [call], plan, next_word, reduction=lambda target: (target != -100).sum())
    assert got.losses == pytest.approx([want.item()], rel=1e-5)
    close(got.gradients, {name: p.grad for name, p in model.named_parameters()})


# ----------------------------------------------------------------------------------------------------- buffers


@on_more_plans
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_counts_exactly_the_microbatches_it_saw(plan: Plan, momentum: float | None) -> None:
    def build() -> nn.Module:
        return chain(*[nn.BatchNorm1d(WIDTH, momentum=momentum) for _ in range(4)])

    check(build, rows(), plan, F.mse_loss)
    state = in_stages(build, rows(), plan, F.mse_loss, recompute=True).state
    counts = [value.item() for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert counts == [3 * MICROBATCHES] * 4


class Slow(nn.Module):
    """Divides by an average that it moves first, in place; autograd keeps the average for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.size: Tensor
        self.register_buffer("size", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.size.mul_(0.8).add_(0.2 * x.abs().mean(0))
        return torch.tanh(self.linear(x) / self.size)


class SlowAfter(Slow):
    """Moves the average only after it was used."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) / self.size)
        with torch.no_grad():
            self.size.lerp_(x.abs().mean(0), 0.2)
        return y


@on_more_plans
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [
    lambda: nn.Sequential(*[Slow() for _ in range(4)], nn.Linear(WIDTH, 3)),
    lambda: Stack(Slow, 4),
], ids=["sequence", "blocks"])  # fmt: skip
def test_a_buffer_that_forward_moves_while_earlier_microbatches_wait_for_their_backward(
    plan: Plan, build: Callable[[], nn.Module], recompute: bool
) -> None:
    check(build, rows(), plan, F.mse_loss, recompute=recompute)


@on_plans
def test_evaluation_leaves_buffers_as_they_are(plan: Plan) -> None:
    def build() -> nn.Module:
        return chain(*[nn.BatchNorm1d(WIDTH) for _ in range(4)])

    [call] = rows(1)
    with pipeline(seeded(build), plan, F.mse_loss, example=call.args) as pipe:
        before = pipe.state_dict()
        pipe.evaluate(*call.args, target=call.target)
        pipe.predict(*call.args)
        after = pipe.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# ----------------------------------------------------------------------------------------------- frozen parts


def freeze(model: nn.Module, wanted: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not wanted(name))
    return model


def early_half() -> nn.Module:
    return freeze(chain(), lambda name: int(name.split(".")[0]) < 6)


def every_second() -> nn.Module:
    return freeze(chain(), lambda name: int(name.split(".")[0]) % 2 == 0 and name[0] not in "06")


def all_but_the_first() -> nn.Module:
    return freeze(chain(), lambda name: name[0] != "0")


def biases_only() -> nn.Module:
    return freeze(chain(), lambda name: name.endswith("weight"))


def low_rank() -> nn.Module:
    model = Stack(LowRank)
    return freeze(model, lambda name: "down" not in name and "up" not in name)


class LowRank(nn.Module):
    """A frozen base and a small trained detour around it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@on_more_plans
@pytest.mark.parametrize("build", [early_half, every_second, all_but_the_first, biases_only, low_rank])
def test_frozen_parts(plan: Plan, build: Callable[[], nn.Module]) -> None:
    """Every trainable parameter gets its gradient, frozen ones none, wherever they lie."""
    check(build, rows(), plan, F.mse_loss, max_grad_norm=0.05)


@on_plans
@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_that_is_only_an_embedding(plan: Plan, frozen: bool) -> None:
    """The embedding's input needs no gradient; frozen, its stage has nothing to train and nothing to clip."""
    stages = plan[1]

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, WORDS))
        return freeze(model, lambda name: frozen and name.startswith("0"))

    boundaries = [str(index + 1) for index in range(stages - 1)]
    check(build, texts(), plan, next_word, boundaries=boundaries, max_grad_norm=0.1)


@on_plans
def test_a_stage_without_parameters(plan: Plan) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0), nn.Sigmoid(), nn.Linear(WIDTH, 3))

    boundaries = [str(index + 1) for index in range(plan[1] - 1)]
    check(build, rows(), plan, F.mse_loss, boundaries=boundaries, max_grad_norm=0.1)


# ---------------------------------------------------------------------------------------------- shared weights


class Speaks(nn.Module):
    """The embedding's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_sequence() -> nn.Module:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, WORDS, bias=False))
    model[-1].weight = model[0].weight
    return model


def one_middle_layer() -> nn.Module:
    """The same block runs in every stage."""
    shared = Block()
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), shared, Block(), shared, Block(), shared, nn.Linear(WIDTH, WORDS)
    )


@on_more_plans
@pytest.mark.parametrize("build", [Speaks, tied_sequence, one_middle_layer])
def test_weights_of_several_stages_stay_one(plan: Plan, build: Callable[[], nn.Module]) -> None:
    """Eight steps of an optimizer with memory: a copy that drifted would show in the later losses."""
    adam = partial(torch.optim.AdamW, lr=0.03)
    check(build, texts(8), plan, next_word, optimizer=adam, max_grad_norm=0.5)


@pytest.mark.parametrize("build", [Speaks, tied_sequence, one_middle_layer])
def test_a_shared_weight_is_saved_once_and_listed_under_each_name(
    build: Callable[[], nn.Module], tmp_path: Any
) -> None:
    [call] = texts(1)
    with pipeline(seeded(build), ("1f1b", 4, 4), next_word) as pipe:
        pipe.train_step(*call.args, target=call.target)
        state = pipe.state_dict()
        pipe.save(tmp_path / "run")
        assert pipe.gradients().keys() == dict(build().named_parameters()).keys()
    model = build()
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    stored: list[str] = []
    for file in (tmp_path / "run").glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored += tensors.keys()
    assert len(stored) == len(set(stored))
    assert {*stored} == {*dict(model.named_parameters())}


# ------------------------------------------------------------------------------------- recomputation, own backward


class Counted(torch.autograd.Function):
    """Twice the input; counts its runs."""

    runs: ClassVar[dict[str, int]] = {"forward": 0, "backward": 0}

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        Counted.runs["forward"] += 1
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Counted.runs["backward"] += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class CountedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Counted.apply(self.linear(x), self.weight))


class Checkpointed(CountedLayer):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


def layers_of(layer: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[layer() for _ in range(4)], nn.Linear(WIDTH, 3))


@on_plans
@pytest.mark.parametrize(("layer", "forwards"), [(CountedLayer, 1), (Checkpointed, 2), (Reentrant, 2)])
@pytest.mark.parametrize("way", ["sequence", "blocks"])
def test_own_backward_and_checkpointing_run_once(plan: Plan, layer: type[nn.Module], forwards: int, way: str) -> None:
    build = layers_of(layer) if way == "sequence" else lambda: Stack(layer, 4)
    calls = rows()
    want = plainly(build, calls, F.mse_loss)
    with pipeline(seeded(build), plan, F.mse_loss, example=calls[0].args) as pipe:
        pipe.train_step(*calls[0].args, target=calls[0].target)
        Counted.runs = {"forward": 0, "backward": 0}
        for call in calls[1:]:
            pipe.train_step(*call.args, target=call.target)
        close(pipe.gradients(), want.gradients)
        close(pipe.state_dict(), want.state)
    layers_run = 4 * MICROBATCHES * len(calls[1:])
    assert Counted.runs == {"forward": forwards * layers_run, "backward": layers_run}


@on_plans
def test_recomputation_of_stages_runs_each_forward_twice(plan: Plan) -> None:
    build, calls = layers_of(CountedLayer), rows(2)
    want = plainly(build, calls, F.mse_loss)
    with pipeline(seeded(build), plan, F.mse_loss, recompute=True, example=calls[0].args) as pipe:
        pipe.train_step(*calls[0].args, target=calls[0].target)
        Counted.runs = {"forward": 0, "backward": 0}
        pipe.train_step(*calls[1].args, target=calls[1].target)
        close(pipe.state_dict(), want.state)
    assert Counted.runs == {"forward": 2 * 4 * MICROBATCHES, "backward": 4 * MICROBATCHES}


class Rounds(torch.autograd.Function):
    """Rounds; its own backward lets the gradient through, where autograd would find zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Coarse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Rounds.apply(torch.tanh(self.linear(x)))


@on_plans
@pytest.mark.parametrize("way", ["sequence", "blocks"])
def test_a_straight_through_gradient(plan: Plan, way: str) -> None:
    build = layers_of(Coarse) if way == "sequence" else lambda: Stack(Coarse)
    check(build, rows(), plan, F.mse_loss, split=way)
    assert all(value.abs().sum() > 0 for value in plainly(build, rows(1), F.mse_loss).gradients.values())


def test_a_captured_graph_that_would_lose_an_own_backward_is_refused() -> None:
    [call] = rows(1)
    with (
        pipeline(Stack(Coarse), ("1f1b", 2, 2), F.mse_loss, split="export") as pipe,
        pytest.raises(SplitError, match="Rounds would lose its own backward"),
    ):
        pipe.train_step(*call.args, target=call.target)


# ---------------------------------------------------------------------------------------------- hooks of the user


class Completed:
    """Names of parameters whose hook ran."""

    names: ClassVar[list[str]] = []


@on_plans
def test_hooks_on_parameters_run_where_the_parameters_are(plan: Plan) -> None:
    """One scales a gradient, one counts completed gradients (as data parallelism does)."""
    completed = Completed.names
    completed.clear()

    def build() -> nn.Module:
        model = chain()
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.register_hook(lambda gradient: gradient * 0.5)
            else:
                parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: Completed.names.append(name))
        return model

    want = plainly(build, rows(), F.mse_loss)
    expected = sorted(completed)
    completed.clear()
    same(in_stages(build, rows(), plan, F.mse_loss), want)
    assert sorted(completed) == expected


# -------------------------------------------------------------------------------- inputs and outputs of other stages


class Masked(nn.Module):
    """A keyword argument that only the last block and the glue after it read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x if mask is None else x * mask)
        return self.leave(x) * scale


@on_more_plans
def test_a_keyword_argument_reaches_the_stage_that_uses_it(plan: Plan) -> None:
    calls = rows()
    for index, call in enumerate(calls):
        mask = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % 3 != index
        call.kwargs = {"mask": mask.float(), "scale": 2.0}
    check(Masked, calls, plan, F.mse_loss)


class TwoOutputs(Stack):
    """Gives what stage 0 made, and trains on it too."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = first = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return {"scores": self.leave(x), "first": first, "note": "from stage 0"}


@on_more_plans
def test_an_output_made_in_stage_0_is_there(plan: Plan) -> None:
    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        return F.mse_loss(output["scores"], target) + output["first"].square().mean()

    check(TwoOutputs, rows(), plan, loss)
    [call] = rows(1)
    with pipeline(seeded(TwoOutputs), plan, loss) as pipe:
        got = pipe.predict(*call.args)
    model = seeded(TwoOutputs)
    torch.testing.assert_close(got["first"], torch.tanh(model.enter(*call.args)).detach())
    assert got["note"] == "from stage 0"


# ----------------------------------------------------------------------------------------------------- randomness


def with_dropout() -> nn.Module:
    return chain(*[nn.Dropout(0.4) for _ in range(6)])


def with_dropout_in_blocks() -> nn.Module:
    return Stack(lambda: nn.Sequential(Block(), nn.Dropout(0.3)))


@pytest.mark.parametrize("build", [with_dropout, with_dropout_in_blocks])
def test_the_same_dropout_for_any_stages_schedule_and_recomputation(build: Callable[[], nn.Module]) -> None:
    want = in_stages(build, rows(), ("1f1b", 1, 1), F.mse_loss, seed=3)
    other_seed = in_stages(build, rows(), ("1f1b", 1, 1), F.mse_loss, seed=4)
    assert other_seed.losses != pytest.approx(want.losses, rel=1e-3)
    for plan in (("gpipe", 2, 2), ("1f1b", 4, 4), ("zb_h1", 4, 4), ("zb_v", 4, 2), ("interleaved_1f1b", 4, 2)):
        for recompute in (False, True):
            same(in_stages(build, rows(), plan, F.mse_loss, seed=3, recompute=recompute), want)


@pytest.mark.parametrize("plan", [("1f1b", 1, 1), ("zb_h1", 4, 4)], ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("way", ["sequence", "blocks", "export"])
def test_eval_is_eval(plan: Plan, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch.export would leave its thread behind
    build = with_dropout if way == "sequence" else with_dropout_in_blocks
    calls = rows(2)

    def quiet() -> nn.Module:
        return build().eval()

    want = plainly(quiet, calls, F.mse_loss)
    same(in_stages(quiet, calls, plan, F.mse_loss, split=way), want)  # put in eval mode before
    with pipeline(seeded(build), plan, F.mse_loss, split=way, example=calls[0].args) as pipe:  # and after
        output = pipe.predict(*calls[0].args)
        torch.testing.assert_close(output, seeded(quiet)(*calls[0].args).detach())
        pipe.eval()
        assert [pipe.train_step(*c.args, target=c.target).item() for c in calls] == pytest.approx(want.losses, rel=1e-4)
        pipe.train()
        noisy = pipe.train_step(*calls[0].args, target=calls[0].target).item()
        assert noisy != pytest.approx(pipe.evaluate(*calls[0].args, target=calls[0].target).item(), rel=1e-3)


# --------------------------------------------------------------------------------------------------- whole updates


@on_more_plans
@pytest.mark.parametrize("build", [chain, Stack])
def test_clipping_by_the_norm_over_all_stages(plan: Plan, build: Callable[[], nn.Module]) -> None:
    check(build, rows(), plan, F.mse_loss, max_grad_norm=0.02)


@on_plans
def test_clipping_counts_a_tied_weight_once(plan: Plan) -> None:
    [call] = texts(1)
    model = seeded(Speaks)
    for size, share in call.cut(MICROBATCHES):
        (next_word(model(*share.args), share.target) * size / SAMPLES).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pipeline(seeded(Speaks), plan, next_word, max_grad_norm=0.1) as pipe:
        pipe.train_step(*call.args, target=call.target)
        assert pipe.last_step.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_an_overflow_in_one_stage_stops_all_from_updating() -> None:
    """A gradient that is too large for float16 in one stage only; every value before it was finite."""

    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 1e30 * 1e30

    class Overflows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = Steep.apply(self.weight) if x.abs().max() > 100 else self.weight
            return F.linear(x, weight, self.bias)

    linear = nn.Linear
    model = nn.Sequential(linear(WIDTH, WIDTH), Overflows(WIDTH, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, 3))
    [call] = rows(1)
    for schedule in ("1f1b", "zb_h1"):
        with pipeline(model, (schedule, 4, 4), F.mse_loss, check_finite=True, example=call.args) as pipe:
            before = pipe.state_dict()
            with pytest.raises(StageFailed, match=r"gradient of '1\.weight'") as caught:
                pipe.train_step(call.args[0] * 1000, target=call.target)
            assert caught.value.stage == 1
            after = pipe.state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert pipe.usable
            loss = pipe.train_step(*call.args, target=call.target)
        assert loss.item() == pytest.approx(
            sum(
                F.mse_loss(model(*share.args), share.target).item() * size / SAMPLES
                for size, share in call.cut(MICROBATCHES)
            ),
            rel=1e-5,
        )


@pytest.mark.parametrize(("schedule", "way"), [("1f1b", "sequence"), ("zb_h1", "blocks")])
def test_30_layers_on_4_stages_have_every_parameter_once(schedule: str, way: str) -> None:
    def build() -> nn.Module:
        blocks = [Block() for _ in range(30)]
        if way == "sequence":
            return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
        return Stack(Block, 30)

    calls = rows(1)
    check(build, calls, (schedule, 4, 4), F.mse_loss, balance="parameters")
    with pipeline(build(), (schedule, 4, 4), F.mse_loss, example=calls[0].args, balance="parameters") as pipe:
        names = [name for stage in range(4) for name in pipe.parameters_of(stage)]
        sizes = [len(pipe.parameters_of(stage)) for stage in range(4)]
    assert sorted(names) == sorted(name for name, _ in build().named_parameters())
    assert min(sizes) >= 6 * 6


@pytest.mark.parametrize("build", [chain, tied_sequence, Speaks])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_4_stages_saved_goes_on_in_others(build: Callable[[], nn.Module], stages: int, tmp_path: Any) -> None:
    data, loss = (rows(4), F.mse_loss) if build is chain else (texts(4), next_word)
    adam = partial(torch.optim.AdamW, lr=0.01)
    want = plainly(build, data, loss, optimizer=adam)
    with pipeline(seeded(build), ("1f1b", 4, 4), loss, optimizer=adam) as pipe:
        for call in data[:2]:
            pipe.train_step(*call.args, target=call.target)
        pipe.save(tmp_path / "run")
        saved = pipe.state_dict()
    model = build()
    model.load_state_dict(sf.load_weights(tmp_path / "run"))
    close(dict(model.state_dict()), saved)
    with pipeline(build(), ("zb_h1", stages, stages), loss, optimizer=adam, example=data[0].args) as pipe:
        pipe.load(tmp_path / "run")
        close(pipe.state_dict(), saved)
        losses = [pipe.train_step(*call.args, target=call.target).item() for call in data[2:]]
        assert losses == pytest.approx(want.losses[2:], rel=1e-4)
        close(pipe.state_dict(), want.state)


def test_a_checkpoint_of_another_model_is_refused_whole(tmp_path: Any) -> None:
    [call] = rows(1)
    with pipeline(chain(), ("1f1b", 2, 2), F.mse_loss, example=call.args) as pipe:
        pipe.save(tmp_path / "run")
    with pipeline(chain(*[nn.LayerNorm(WIDTH)] * 3), ("1f1b", 2, 2), F.mse_loss, example=call.args) as pipe:
        before = pipe.state_dict()
        with pytest.raises(CheckpointError):
            pipe.load(tmp_path / "run")
        after = pipe.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# --------------------------------------------------------------------------------------- models given as functions


@on_plans
@pytest.mark.parametrize("build", [with_dropout, Stack, Speaks, one_middle_layer, early_half])
def test_a_model_built_by_a_function_is_the_plain_one(plan: Plan, build: Callable[[], nn.Module]) -> None:
    calls, loss = (texts(2), next_word) if build in (Speaks, one_middle_layer) else (rows(2), F.mse_loss)
    want = in_stages(build, calls, plan, loss)
    torch.manual_seed(7)
    with pipeline(lambda: build(), plan, loss) as pipe:
        got = [pipe.train_step(*call.args, target=call.target).item() for call in calls]
        assert got == pytest.approx(want.losses, rel=1e-6)
        close(pipe.gradients(), want.gradients)
        close(pipe.state_dict(), want.state)


# ----------------------------------------------------------------------------------- optimizers, states, gradients


@on_plans
def test_learning_rates_and_groups_by_name(plan: Plan) -> None:
    def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.0 if name.endswith("bias") else 0.1, "lr": 0.02 if name.startswith("0") else 0.05}

    calls = rows(5)
    adam = partial(torch.optim.AdamW, lr=1.0)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model = seeded(chain)
    stepper = adam([{"params": [p], **options(name, p)} for name, p in model.named_parameters()])
    rates = halve(stepper)
    for call in calls:
        stepper.zero_grad()
        for size, share in call.cut(MICROBATCHES):
            (F.mse_loss(model(*share.args), share.target) * size / SAMPLES).backward()
        stepper.step()
        rates.step()
    with pipeline(
        seeded(chain), plan, F.mse_loss, optimizer=adam, lr_scheduler=halve, parameter_groups=options
    ) as pipe:
        for call in calls:
            pipe.train_step(*call.args, target=call.target)
        close(pipe.state_dict(), dict(model.state_dict()))


@on_plans
def test_a_state_goes_round(plan: Plan) -> None:
    [call] = rows(1)
    other = {name: value + 1 for name, value in chain(*[nn.BatchNorm1d(WIDTH)] * 4).state_dict().items()}
    with pipeline(chain(*[nn.BatchNorm1d(WIDTH)] * 4), plan, F.mse_loss, example=call.args) as pipe:
        pipe.load_state_dict(other)
        close(pipe.state_dict(), other)
        with pytest.raises(InputError, match=r"missing: .*0\.weight"):
            pipe.load_state_dict({name: value for name, value in other.items() if name != "0.weight"})
        with pytest.raises(InputError, match="shape"):
            pipe.load_state_dict({**other, "0.weight": torch.zeros(2, 2)})
        close(pipe.state_dict(), other)


@on_plans
def test_gradients_bear_the_models_own_names(plan: Plan) -> None:
    [call] = rows(1)
    with pipeline(seeded(early_half), plan, F.mse_loss, optimizer=None) as pipe:
        pipe.train_step(*call.args, target=call.target)
        got = pipe.gradients()
        assert list(got) == [name for name, _ in early_half().named_parameters()]
        assert {name for name, value in got.items() if value is None} == {
            name for name, p in early_half().named_parameters() if not p.requires_grad
        }
        pipe.train_step(*call.args, target=call.target)
        close(pipe.gradients(), got)  # without an optimizer each step starts anew


def test_a_loss_that_is_a_module_or_has_parameters_of_its_own() -> None:
    """A loss module without parameters is a function; math in it is plain."""
    [call] = rows(1)
    got = in_stages(chain, [call], ("1f1b", 2, 2), nn.SmoothL1Loss())
    want = plainly(chain, [call], nn.SmoothL1Loss())
    same(got, want)
    assert math.isfinite(got.losses[0])


import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stageflow.cli.demo.gpt import Block, Embedding, GPTConfig, Head, build_gpt, next_token_loss
from stageflow.errors import InputError, SplitError
from stageflow.plan import make_plan
from stageflow.plan.profile import Profile, profile_model
from stageflow.split import split_model
from stageflow.testing.emulated import EmulatedStage

CONFIG = GPTConfig(layers=2, width=32, heads=2, length=16)
TOKENS = torch.arange(4 * 16).view(4, 16) % 256
QUICK = {"rounds": 1, "warm_up": 0, "threads": 1}


class Skipping(nn.Module):
    """Tied embedding and head, and a value that skips blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = Embedding(CONFIG)
        self.blocks = nn.ModuleList(Block(CONFIG) for _ in range(blocks))
        self.head = Head(CONFIG)
        self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x + first if number else x)
        return self.head(x)


def vision() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )  # fmt: skip


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def saved_by(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that autograd saves in one plain forward, but for parameters, buffers and inputs."""
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    del output
    return sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in ours)


def test_blocks_of_a_sequence_by_hand():
    profile = profile_model(mlp(), torch.randn(5, 8), **QUICK)
    first, relu, last = profile.blocks
    hidden, output = 5 * 16 * 4, 5 * 4 * 4
    assert [block.name for block in profile.blocks] == ["0", "1", "2"]
    assert (first.activation, first.boundary, first.exit, first.output) == (0, 0, hidden, hidden)
    assert (relu.activation, relu.entry, relu.boundary, relu.exit) == (hidden, hidden, hidden, 0)
    assert (last.activation, last.entry, last.boundary, last.output) == (0, hidden, hidden, 0)
    assert (last.parameters, last.gradients) == ((16 * 4 + 4) * 4,) * 2
    assert last.deferred == hidden + output
    assert (profile.way, profile.samples, profile.measured, profile.threads) == ("sequence", 5, True, 1)


@pytest.mark.parametrize(
    ("make", "example"),
    [(partial(build_gpt, CONFIG), TOKENS), (vision, torch.randn(2, 3, 8, 8)), (mlp, torch.randn(5, 8))],
)
def test_what_blocks_keep_adds_up_to_what_the_whole_model_keeps(make, example: Tensor):
    model = make()
    profile = profile_model(model, example, **QUICK)
    total = sum(block.activation for block in profile.blocks)
    assert total == saved_by(with_inplace_off(make()), example)


def with_inplace_off(model: nn.Module) -> nn.Module:
    """A block that writes into its input is given a copy, so it saves memory of its own."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


@pytest.mark.parametrize(("way", "blocks"), [("blocks", 3), ("export", 1)])
def test_a_model_of_any_wiring_whose_stages_can_start_at_any_block(way: str, blocks: int):
    model = Skipping(blocks)
    profile = profile_model(model, TOKENS, target=TOKENS, loss=next_token_loss, split=way, **QUICK)
    assert profile.way == way
    assert len({block.name for block in profile.blocks}) == len(profile.blocks) > 4
    assert sum(block.parameters for block in profile.blocks) == sum(p.nbytes for p in model.parameters())
    assert all(block.forward > 0 for block in profile.blocks)
    (tie,) = profile.ties
    assert tie.blocks[-1] >= len(profile.blocks) - 2
    assert tie.parameters == tie.gradients == model.head.logits.weight.nbytes
    names = [block.name for block in profile.blocks[1:]]
    split = split_model(model, TOKENS, stages=len(names) + 1, split=way, boundaries=names)
    assert [split.layer_names(stage)[0] for stage in range(1, split.n_stages)] == names


def test_a_value_that_skips_blocks_crosses_every_cut_between():
    profile = profile_model(Skipping(), TOKENS, split="blocks", **QUICK)
    one = 4 * 16 * 32 * 4
    assert [block.output for block in profile.blocks] == [
        one,
        2 * one,
        one,
        one,
        0,
    ]  # the sum is made before the last block


def test_the_model_and_the_world_stay_as_they_were():
    model = vision().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), np.random.random())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    threads = torch.get_num_threads()
    profile_model(model, torch.ones(2, 3, 8, 8), optimizer=partial(torch.optim.AdamW, lr=1.0), **QUICK)
    assert (torch.rand(1).item(), random.random(), np.random.random()) == expected
    assert torch.get_num_threads() == threads
    assert [type(module) for module in model.modules()] == kinds
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_time_goes_where_it_was_spent():
    model = nn.Sequential(EmulatedStage(0.01, 0.0, 0.02), EmulatedStage(0.0, 0.02, 0.0), nn.Linear(4, 4))
    profile = profile_model(model, torch.randn(2, 4), rounds=3, warm_up=1)
    slow_weights, slow_input, _ = profile.blocks
    assert slow_weights.forward >= 0.01
    assert slow_weights.backward >= 0.02
    assert slow_weights.backward_weight >= 0.02
    assert slow_input.backward_input >= 0.02
    assert slow_input.backward_weight < slow_weights.backward_weight
    assert profile.forward >= 0.01


def test_recomputation_takes_the_forward_again():
    model = nn.Sequential(nn.Linear(4, 4), EmulatedStage(0.03, 0.0, 0.0))
    profile = profile_model(model, torch.randn(2, 4), rounds=3, warm_up=1)
    assert profile.blocks[1].recompute > 0.015


def test_bytes_of_the_optimizer():
    plain = profile_model(mlp(), torch.randn(5, 8), **QUICK)
    adam = profile_model(mlp(), torch.randn(5, 8), optimizer=partial(torch.optim.AdamW, lr=0.1), **QUICK)
    assert [block.optimizer for block in plain.blocks] == [0, 0, 0]
    assert adam.blocks[0].optimizer == 2 * adam.blocks[0].parameters + 2 * 4  # two moments, and two counts of steps


def test_frozen_blocks_have_no_gradients():
    model = mlp()
    model[0].requires_grad_(False)
    first = profile_model(model, torch.randn(5, 8), **QUICK).blocks[0]
    assert (first.gradients, first.backward_weight < 1e-3, first.parameters > 0) == (0, True, True)


def test_a_function_gives_the_same_bytes_as_its_model():
    build = partial(build_gpt, CONFIG)
    ours, other = (profile_model(model, TOKENS, **QUICK) for model in (build, build()))
    for block, same in zip(ours.blocks, other.blocks, strict=True):
        assert (block.activation, block.parameters, block.output) == (same.activation, same.parameters, same.output)


class SequenceFirst(nn.Module):
    """Takes (length, batch, width), gives (batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(0)


def test_batch_dims_name_positional_arguments_as_the_model_does():
    x = torch.randn(5, 8, 3)
    assert profile_model(SequenceFirst(), (x,), batch_dims={"x": 1}, **QUICK).samples == 8
    target = torch.randn(8, 3)
    options = {"target": target, "loss": F.mse_loss, "seconds": 0.1, "progress": False, **QUICK}
    plan = make_plan(SequenceFirst(), (x,), devices=2, batch_dims={"x": 1}, microbatches=4, **options)
    assert plan.samples == 8
    with pytest.raises(InputError, match=r"batch_dims names \['y'\]"):
        make_plan(SequenceFirst(), (x,), devices=2, batch_dims={"y": 1}, **options)


def test_a_micro_batch_is_part_of_the_example():
    whole = profile_model(mlp(), torch.randn(6, 8), **QUICK)
    third = profile_model(mlp(), torch.randn(6, 8), microbatch=2, **QUICK)
    assert (whole.samples, third.samples) == (6, 2)
    assert whole.blocks[1].activation == 3 * third.blocks[1].activation


def test_more_blocks_when_asked_for():
    coarse = profile_model(Skipping(), TOKENS, split="blocks", **QUICK)
    fine = profile_model(Skipping(), TOKENS, split="blocks", at_least=9, **QUICK)
    assert len(coarse.blocks) < 9 <= len(fine.blocks)


@pytest.mark.parametrize(("make", "example"), [(mlp, torch.randn(5, 8)), (Skipping, TOKENS)])
def test_dtype_halves_the_bytes(make, example: Tensor):
    whole, half = (profile_model(make(), example, dtype=d, **QUICK) for d in (None, torch.bfloat16))
    assert half.blocks[2].parameters * 2 == whole.blocks[2].parameters
    assert half.blocks[1].output * 2 == whole.blocks[1].output


def test_a_table_for_people():
    text = str(profile_model(Skipping(), TOKENS, split="blocks", **QUICK))
    assert "Skipping by blocks, micro-batches of 4 samples" in text
    assert "one weight of 32 KiB is shared by embedding, head" in text
    assert "blocks.1" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"microbatch": 4}, "must divide the samples of the example, which has 5"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"split": "halves"}, "split must be one of"),
        ({"at_least": 0}, "at_least must be"),
        ({"on": "abacus"}, "'abacus' is none of"),
        ({"on": "h100", "efficiency": 0.0}, "efficiency must be"),
        ({"on": "h100", "autocast": torch.bfloat16}, "give dtype="),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict, words: str):
    with pytest.raises(InputError, match=words):
        profile_model(mlp(), torch.randn(5, 8), **arguments)


def test_a_model_that_can_not_be_taken_apart_that_far():
    with pytest.raises(SplitError, match="at most 3 blocks"):
        profile_model(mlp(), torch.randn(5, 8), split="sequence", at_least=4)


def test_json_brings_back_the_same(tmp_path):
    profile = profile_model(Skipping(), TOKENS, split="blocks", **QUICK)
    assert Profile.from_json(profile.to_json()) == profile
    profile.to_json(tmp_path / "profile.json")
    assert Profile.from_json(tmp_path / "profile.json") == profile
    assert Profile.from_json(str(tmp_path / "profile.json")) == profile


def test_damaged_profiles_are_refused(tmp_path):
    text = profile_model(mlp(), torch.randn(5, 8), **QUICK).to_json()
    for damaged, words in [
        (text.replace('"samples": 5', '"samples": 6'), "was changed or cut off"),
        (text[:-20], "is no JSON"),
        (text.replace('"version": 1', '"version": 9'), "of version 9"),
        (text.replace("stageflow profile", "shopping list"), "is no profile"),
        ("{}", "is no profile"),
    ]:
        with pytest.raises(InputError, match=words):
            Profile.from_json(damaged)
    with pytest.raises(InputError, match="can't be read"):
        Profile.from_json(tmp_path / "missing.json")


def test_counted_bytes_are_the_measured_ones():
    model = Skipping()
    arguments = {"target": TOKENS, "loss": next_token_loss, "optimizer": partial(torch.optim.AdamW, lr=0.1)}
    measured = profile_model(model, TOKENS, split="blocks", **arguments, **QUICK)
    counted = profile_model(model, TOKENS, split="blocks", on="A100-SXM4-80GB", **arguments)
    names = ("name", "entry", "exit", "deferred", "boundary", "parameters", "optimizer", "output")
    for block, same in zip(counted.blocks, measured.blocks, strict=True):
        assert [getattr(block, name) for name in names] == [getattr(same, name) for name in names]
        assert block.activation == pytest.approx(same.activation, rel=0.01)  # attention's sums are padded there
    assert counted.ties == measured.ties
    assert not counted.measured
    assert "A100-SXM4-80GB at 50% of its roofline (counted)" in str(counted)


def test_counted_time_of_a_matrix_product_by_hand():
    rows, width = 4096, 8192
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(3)))
    counted = profile_model(model, torch.empty(rows, width), on="h100", dtype=torch.bfloat16, efficiency=1.0)
    product = 2 * rows * width * width / 989e12
    second = counted.blocks[1]
    assert second.forward == pytest.approx(product, rel=0.05)
    assert second.backward_input == pytest.approx(product, rel=0.05)
    assert second.backward_weight == pytest.approx(product, rel=0.05)
    assert second.backward == pytest.approx(2 * product, rel=0.1)
    added = 2 * width * width * 2 / 3350e9  # the gradient, and what is there of it from earlier micro-batches
    assert counted.blocks[0].backward == pytest.approx(product + added, rel=0.05)  # the batch needs no gradient


def test_counting_takes_no_memory_for_weights():
    big = GPTConfig(layers=2, width=16384, heads=128, vocabulary=1000, length=128)
    counted = profile_model(partial(build_gpt, big), torch.zeros(1, 128, dtype=torch.int64), on="h100")
    assert counted.blocks[1].parameters > 12 * 16384**2 * 4  # 13 GB for each of two blocks


class Deciding(nn.Module):
    """Looks at values, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 7).all()):
            return x
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_that_looks_at_values_is_counted_by_running_it():
    model = Deciding()
    counted = profile_model(model, torch.randn(5, 8), on="h100", efficiency=1.0)
    measured = profile_model(model, torch.randn(5, 8), **QUICK)
    assert [block.activation for block in counted.blocks] == [block.activation for block in measured.blocks]
    assert all(0 < block.forward < 1e-6 for block in counted.blocks)


class AsksForGradients(nn.Module):
    """Its forward needs a graph, so it can't be run without one and recomputed later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        inner = torch.ones(3, 8).requires_grad_()
        (slope,) = torch.autograd.grad(self.layers[-1](inner).sum(), inner)
        return x * slope.mean()


def test_a_model_that_can_not_recompute_is_measured_all_the_same():
    profile = profile_model(AsksForGradients(), torch.randn(5, 8), **QUICK)
    assert [block.recompute for block in profile.blocks] == pytest.approx([block.forward for block in profile.blocks])
    assert all(block.backward_input > 0 for block in profile.blocks)


def test_a_model_that_decides_by_chance():
    class Chancy(Skipping):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                if torch.rand(()) < 0.5:
                    x = block(x)
            return self.head(x)

    assert profile_model(Chancy(), TOKENS, split="blocks", **QUICK).blocks


def test_counting_a_convolution_and_its_loss():
    counted = profile_model(
        vision(), torch.randn(2, 3, 8, 8), target=torch.zeros(2, dtype=torch.int64), loss=F.cross_entropy, on="L40S"
    )
    assert all(block.forward >= 0 for block in counted.blocks)
    assert counted.blocks[3].backward_weight > 0

import copy
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from safetensors.torch import save_file
from split_harness import build_programs, check_equals_whole
from torch import nn

from stageflow.errors import InputError, SplitError
from stageflow.split import split_model
from stageflow.split.deferred import DeferredModel, as_model
from stageflow.split.state import named_state

WIDTH = 96  # wide enough that weights are larger than what is always built


class Written(nn.Module):
    """Values from before registration, copies, plain attributes, a buffer made from a weight."""

    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.02)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.copied = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.copied.data.copy_(self.linear.weight)
        self.register_buffer("average", self.drawn.detach().clone())
        self.plain = self.linear.weight.detach() * 2
        self.scaled = nn.Parameter(torch.empty(WIDTH, WIDTH))
        with torch.no_grad():
            self.scaled.copy_(self.drawn[:10, :10].sum() * torch.ones(WIDTH, WIDTH))


def initialised():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    nn.init.trunc_normal_(model[0].weight, std=0.9, a=-1, b=1)
    nn.init.orthogonal_(model[1].weight)
    nn.init.sparse_(model[2].weight, 0.3)
    nn.init.xavier_normal_(model[3].weight)
    with torch.no_grad():
        model[4].weight.bernoulli_(0.3).mul_(2).sub_(1)
    return model


def tied():
    embed, head, block = nn.Embedding(300, WIDTH), nn.Linear(WIDTH, 300, bias=False), nn.Linear(WIDTH, WIDTH)
    head.weight = embed.weight
    return [embed, block, copy.deepcopy(block), nn.Linear(WIDTH, WIDTH), head]


def student_and_teacher():
    student, teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    teacher.load_state_dict(student.state_dict())
    return nn.Sequential(student, nn.Linear(WIDTH, WIDTH), teacher, copy.deepcopy(teacher))


def reads_values():
    layer = nn.Linear(WIDTH, WIDTH)
    first = layer.weight.detach()[0, :2]
    numbers = [layer.weight[0, 0].item(), first.tolist()[1], float(first.numpy()[0])]
    other = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        other.bias.copy_(torch.tensor(numbers).sum() * torch.ones(WIDTH))
    return nn.Sequential(layer, other, nn.Linear(round(WIDTH * (1 if numbers[0] else 2)), WIDTH))


BUILDERS = {
    "linear": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]),
    "conv": lambda: nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.ConvTranspose2d(64, 32, 3)),
    "embedding": lambda: nn.Sequential(nn.Embedding(300, WIDTH, padding_idx=3), nn.LayerNorm(8192)),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(WIDTH, 4), nn.LSTM(WIDTH, WIDTH, num_layers=2)),
    "layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=300, batch_first=True),
    "clones": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 300, batch_first=True), 3),
    "big": lambda: nn.Sequential(
        nn.Embedding(11003, 101),  # more than one piece, and no multiple of 16
        nn.Linear(1031, 1033),
        nn.Linear(1023, 1030, dtype=torch.float64),
        nn.Embedding(10501, 101, dtype=torch.bfloat16),
    ),
    "converted": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16).to("cpu"),
    "normed": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
    "initialised": initialised,
    "written": Written,
    "tied": tied,
    "student_and_teacher": student_and_teacher,
    "reads_values": reads_values,
}


def check_parts_equal_plain(build, parts=3):
    """Every parameter and buffer of a part is bit for bit that of a plain build."""
    torch.manual_seed(7)
    plain = as_model(build())
    after = torch.get_rng_state()
    torch.manual_seed(7)
    recipe, outline = DeferredModel.record(build)
    assert torch.equal(after, torch.get_rng_state()), "the caller's random numbers go on as after a plain build"
    expected = {name: tensor for name, tensor, _ in named_state(plain)}
    assert [name for name, _, _ in named_state(outline)] == list(expected)

    torch.manual_seed(99)
    elsewhere = torch.get_rng_state()
    for part in range(parts):
        keep = set(list(expected)[part::parts])
        model = recipe.materialise(keep)
        assert torch.equal(elsewhere, torch.get_rng_state())
        for name, tensor, kind in named_state(model):
            if name in keep:
                assert tensor.requires_grad == expected[name].requires_grad
                assert tensor.dtype == expected[name].dtype
                assert torch.equal(tensor, expected[name]), name
            elif kind == "parameter" and not any(tensor is t for n, t, _ in named_state(model) if n in keep):
                assert tensor.is_meta, name


@pytest.mark.parametrize("name", BUILDERS)
def test_each_part_has_the_numbers_of_a_plain_build(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_parts_equal_plain(BUILDERS[name])


SIZES = {"vocab_size": 400, "hidden_size": WIDTH, "intermediate_size": 200, "num_attention_heads": 4}


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **SIZES))


def bert():
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, **SIZES))


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=400, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("build", [llama, bert, gpt2])
def test_models_of_transformers_too(build):
    check_parts_equal_plain(build)


def test_a_stored_model_may_be_loaded_by_the_function(tmp_path):
    transformers = pytest.importorskip("transformers")
    llama().save_pretrained(tmp_path)
    check_parts_equal_plain(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_function_is_split_and_trained_like_its_model(stages):
    def build():
        return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])

    torch.manual_seed(3)
    model = build()
    torch.manual_seed(3)
    x = (torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).sin(),)
    split = split_model(build, x, stages=stages, split="sequence")
    check_equals_whole(split, model, [(x, {})])


def test_tied_weights_of_a_function():
    torch.manual_seed(3)
    model = tied()
    torch.manual_seed(3)
    split = split_model(tied, stages=3, split="sequence")
    assert split.mirrors == {"0.weight": (2,)}
    check_equals_whole(split, model, [((torch.arange(12).reshape(3, 4),), {})])


def test_the_default_dtype_travels():
    torch.set_default_dtype(torch.float64)
    try:
        recipe, _ = DeferredModel.record(BUILDERS["linear"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert recipe.materialise({"0.weight"}).get_parameter("0.weight").dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("sharded", [False, True])
def test_stored_weights_are_loaded_stage_by_stage(tmp_path, sharded):
    model = as_model(tied())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "4.weight"}
    if sharded:
        names = sorted(state)
        save_file({name: state[name] for name in names[:2]}, tmp_path / "a.safetensors")
        save_file({name: state[name] for name in names[2:]}, tmp_path / "b.safetensors")
        path = tmp_path
    else:
        path = tmp_path / "model.safetensors"
        save_file(state, path)
    split = split_model(tied, stages=3, split="sequence", weights=path)
    for program in build_programs(split):
        for name, parameter in program.parameters.items():
            assert torch.equal(parameter, state[name])
    check_equals_whole(split, model, [((torch.arange(12).reshape(3, 4),), {})], steps=1)


def test_missing_and_misshapen_weights_are_named(tmp_path):
    state = {name: tensor.clone() for name, tensor in as_model(tied()).state_dict().items() if name != "4.weight"}
    missing = {name: tensor for name, tensor in state.items() if name != "1.bias"}
    save_file(missing, tmp_path / "missing.safetensors")
    save_file({**state, "1.bias": torch.zeros(3)}, tmp_path / "misshapen.safetensors")
    for name, words in (
        ("missing.safetensors", r"1 tensors of the model are not stored .* 1\.bias"),
        ("misshapen.safetensors", r"'1\.bias' in .* has shape \[3\], not \[96\]"),
        ("nowhere", "no safetensors file"),
    ):
        with pytest.raises(SplitError, match=words):
            split_model(tied, stages=1, weights=tmp_path / name, split="sequence")


def test_weights_that_changed_since_the_split_are_named_by_the_worker(tmp_path):
    state = {name: tensor.clone() for name, tensor in as_model(tied()).state_dict().items() if name != "4.weight"}
    save_file(state, tmp_path / "model.safetensors")
    split = split_model(tied, stages=1, weights=tmp_path, split="sequence")
    save_file({**state, "1.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(SplitError, match=r"'1\.bias' in .* has shape \[3\], not \[96\]"):
        build_programs(split)


def test_a_function_that_builds_something_else_each_time_is_caught():
    sizes = iter((96, 96, 97))

    def build():
        return nn.Sequential(nn.Linear(WIDTH, next(sizes)))

    recipe, _ = DeferredModel.record(build)
    recipe.materialise({"0.weight"})
    with pytest.raises(SplitError, match=r"another model here: '0.bias' has shape \(97,\), it had \(96,\)"):
        recipe.materialise({"0.weight"})


def test_a_function_must_give_modules():
    with pytest.raises(SplitError, match="expected an nn.Module, a list of modules or a function .* got int"):
        split_model(lambda: 3, stages=1)
    with pytest.raises(InputError, match="weights= is for a model given as a function"):
        split_model(tied(), stages=1, weights="somewhere")


SPLIT = """
    import sys, cloudpickle
    from torch import nn
    from stageflow.split import split_model

    def build():
        return nn.Sequential(*[nn.TransformerEncoderLayer(768, 8, 3072, batch_first=True) for _ in range(8)])

    split = split_model(build, stages=4, split="sequence")
    open(sys.argv[1], "wb").write(cloudpickle.dumps(split.specs[2]))
"""
BUILD = """
    import pickle, resource, sys, torch
    import stageflow.split

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    before = peak()
    program = pickle.load(open(sys.argv[1], "rb")).build(torch.device("cpu"))
    own = sum(p.nbytes for p in program.parameters.values())
    assert 50e6 < own < 70e6, own
    assert all(p.any() for p in program.parameters.values() if p.dim() > 1)
    assert "torch._dynamo" not in sys.modules, "seconds of import and 150 MB that no worker needs"
    print((peak() - before) / own)
"""


def test_no_worker_holds_much_more_than_its_own_share(tmp_path):
    for text in (SPLIT, BUILD):
        command = [sys.executable, "-c", textwrap.dedent(text), str(tmp_path / "spec")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.3

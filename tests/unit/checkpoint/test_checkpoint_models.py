"""What a pipeline saved opens as the plain model, and as a transformers model."""

import json
import warnings

import pytest
import torch
from torch import nn

from stageflow.checkpoint import Progress, Saving, load_weights, open_checkpoint, write_config, write_shard
from stageflow.errors import CheckpointError
from stageflow.split.state import named_state, take_census


class Tied(nn.Module):
    """One weight under three names, one buffer under two, and one buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("positions", torch.arange(3).clone())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.inner = nn.Linear(4, 7, bias=False)
        self.head = nn.Linear(4, 7)
        self.inner.weight = self.head.weight = self.embedding.weight
        self.inner.register_buffer("places", self.positions)


def save(model: nn.Module, directory, shards: int = 2) -> None:
    """As a pipeline does: owned tensors only, spread over shards."""
    census = take_census(model)
    tensors = {name: tensor for name, tensor, _ in named_state(model)}
    names = [name for name, info in census.tensors.items() if info.persistent]
    with Saving(directory) as saving:
        entries = [
            write_shard(saving.path, "model", index, shards, {name: tensors[name] for name in names[index::shards]})
            for index in range(shards)
        ]
        write_config(model, saving.path)
        saving.finish(entries, Progress(1, 0, census.aliases))


def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype))
            else:
                tensor.add_(1)


def assert_equal_states(first: nn.Module, second: nn.Module) -> None:
    expected, found = first.state_dict(), second.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_a_plain_model_with_tied_weights_and_buffers_takes_all_strictly(tmp_path):
    model = Tied()
    disturb(model)
    save(model, tmp_path / "run")
    fresh = Tied()
    fresh.load_state_dict(load_weights(tmp_path / "run"), strict=True)
    assert_equal_states(model, fresh)
    assert fresh.head.weight is fresh.embedding.weight


def test_tied_weights_are_stored_once(tmp_path):
    save(Tied(), tmp_path / "run")
    stored = open_checkpoint(tmp_path / "run").names
    assert set(stored) == {
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "positions",
        "head.bias",
    }


def test_a_model_without_a_config_gets_no_config_file(tmp_path):
    assert not write_config(Tied(), tmp_path)
    model = Tied()
    model.config = {"a": "dictionary of my own"}  # type: ignore[assignment]
    assert not write_config(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_can_not_be_saved(tmp_path):
    class Config:
        def save_pretrained(self, directory):
            raise ValueError("temperature must be positive")

    model = Tied()
    model.config = Config()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="config of Tied could not be saved: temperature must be positive"):
        write_config(model, tmp_path)


transformers = pytest.importorskip("transformers")


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30, n_positions=16)
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=30)
    )


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=30,
            num_local_experts=3,
        )
    )


def resnet():
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    )


@pytest.mark.parametrize("build", [gpt2, t5, mixtral, resnet])
def test_from_pretrained_finds_every_weight(tmp_path, build):
    model = build()
    disturb(model)
    save(model, tmp_path / "run", shards=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own
        again, report = type(model).from_pretrained(tmp_path / "run", output_loading_info=True)
    assert {kind: names for kind, names in report.items() if names} == {}
    assert_equal_states(model, again)
    plain = build()
    plain.load_state_dict(load_weights(tmp_path / "run"), strict=True)
    assert_equal_states(model, plain)


def test_auto_classes_and_the_saved_dtype(tmp_path):
    model = gpt2().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 17
    save(model, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == "bfloat16"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert again.generation_config.max_new_tokens == 17
    assert_equal_states(model, again)
    # the user's own model is not changed by being saved
    assert model.config.architectures is None


def test_what_transformers_saved_opens_here(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "hub")
    checkpoint = open_checkpoint(tmp_path / "hub")
    census = take_census(model)
    shapes = {name: info.shape for name, info in census.tensors.items() if info.persistent}
    checkpoint.check_fits(shapes, census.aliases)
    for name, tensor in checkpoint.weights(shapes, census.aliases).items():
        assert torch.equal(tensor, model.state_dict()[name])

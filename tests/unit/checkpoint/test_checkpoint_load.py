"""Opening: damage is named before anything is read, and only what is asked for is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from stageflow.checkpoint import Checkpoint, load, load_weights, open_checkpoint
from stageflow.errors import CheckpointError

FILES = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "stageflow.json",
]


@pytest.fixture
def run(tmp_path, save, weights):
    save(tmp_path / "run", weights, aliases={"head.weight": "layer0.weight"})
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_any_number_of_writers_any_number_of_readers(tmp_path, save, weights, shards):
    save(tmp_path / "run", weights, shards=shards)
    names = list(weights)
    for readers in (1, 2, 5):
        found = {}
        for reader in range(readers):
            found.update(open_checkpoint(tmp_path / "run").weights(names[reader::readers]))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in names)


def test_all_weights_come_under_each_of_their_names(run, weights):
    found = load_weights(run)
    assert found.keys() == {*weights, "head.weight"}
    assert torch.equal(found["head.weight"], weights["layer0.weight"])
    assert open_checkpoint(run).names == (*list(weights)[::2], *list(weights)[1::2])


def test_only_the_shards_that_are_needed_are_opened(run, monkeypatch):
    checkpoint = open_checkpoint(run)
    opened = []
    original = load.safe_open
    monkeypatch.setattr(load, "safe_open", lambda path, **k: opened.append(path.name) or original(path, **k))
    assert checkpoint.weights(["layer1.weight"]).keys() == {"layer1.weight"}
    assert opened == ["model-00002-of-00002.safetensors"]


def test_a_tied_weight_is_found_under_whatever_name_the_model_prefers(run, weights):
    checkpoint = open_checkpoint(run)
    first = weights["layer0.weight"]
    # as the saver's alias
    assert torch.equal(checkpoint.weights(["head.weight"])["head.weight"], first)
    # as a name of the reader's own that is tied to one that is stored
    own = {"layer0.weight": "embedding.weight"}
    assert torch.equal(checkpoint.weights(["embedding.weight"], own)["embedding.weight"], first)
    assert checkpoint.find("embedding.weight") is None


def test_a_name_that_is_not_there(run):
    with pytest.raises(CheckpointError, match=r"run has no weights named 'layer9\.weight'; it has 'layer0\.weight'"):
        open_checkpoint(run).weights(["layer0.weight", "layer9.weight"])


def test_whether_it_fits_is_known_before_reading(run, weights, monkeypatch):
    checkpoint = open_checkpoint(run)
    monkeypatch.setattr(Checkpoint, "_read", None)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    checkpoint.check_fits(shapes)
    checkpoint.check_fits({**shapes, "head.weight": (3, 4)})
    del shapes["layer4.weight"]
    shapes |= {"layer3.weight": torch.Size([9]), "layer5.weight": torch.Size([1])}
    with pytest.raises(CheckpointError) as info:
        checkpoint.check_fits(shapes)
    assert str(info.value).endswith(
        "run does not fit the model; missing: 'layer5.weight'; not in the model: 'layer4.weight'; "
        "'layer3.weight' has shape (3, 4), the model's has (9,)"
    )


# -------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(run, name):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[:-1])
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_checkpoint(run, verify=verify)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_and_named(run, name):
    content = (run / name).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 23)):
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << position % 8
        (run / name).write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_checkpoint(run)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            open_checkpoint(run, verify=verify)


def test_all_that_is_wrong_is_said_at_once(run):
    for name in FILES[:2]:
        (run / name).unlink()
    with pytest.raises(CheckpointError, match="00001-of-00002.safetensors is missing; .*00002-of-00002.safetensors is"):
        open_checkpoint(run)


def test_a_file_of_another_save_is_found(run, tmp_path, save, weights):
    save(tmp_path / "other", {name: tensor + 1 for name, tensor in weights.items()})
    shutil.copy(tmp_path / "other" / FILES[0], run / FILES[0])
    with pytest.raises(CheckpointError, match=f"{FILES[0]} is not what was saved: its checksum differs"):
        open_checkpoint(run)


def test_a_checkpoint_that_lost_its_manifest(tmp_path, save, weights):
    save(tmp_path / "run", weights)
    (tmp_path / "run" / "stageflow.json").unlink()
    # its weights still have names and a valid form, like any directory of safetensors files
    assert open_checkpoint(tmp_path / "run").manifest is None
    (tmp_path / "run" / "optimizer-00001-of-00001.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"stageflow\.json is missing"):
        open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"sha256": "x", "files": 3}', "\ud800"])
def test_a_manifest_that_is_none(run, text):
    (run / "stageflow.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"stageflow\.json is damaged"):
        open_checkpoint(run)


def test_a_manifest_of_the_future(run):
    body = json.loads((run / "stageflow.json").read_text())
    body |= {"format": 2, "versions": {"stageflow": "9.0"}, "unknown": True}
    (run / "stageflow.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"format 2, this .* reads up to 1: it was saved by stageflow 9\.0"):
        open_checkpoint(run)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*run1"):
        open_checkpoint(tmp_path / "run1")
    (tmp_path / "run2").mkdir()
    with pytest.raises(CheckpointError, match="run2 is no checkpoint: no safetensors file"):
        open_checkpoint(tmp_path / "run2")


def test_a_save_while_reading_is_noticed(run, save, weights):
    checkpoint = open_checkpoint(run)
    save(run, {name: tensor + 1 for name, tensor in weights.items()})
    with pytest.raises(CheckpointError, match="was replaced by another save while it was read"):
        checkpoint.weights(["layer0.weight"])


def test_workers_can_insist_on_one_save(run, save, weights):
    first = open_checkpoint(run).identity
    assert open_checkpoint(run, verify=False, identity=first).identity == first
    save(run, weights, step=8)
    with pytest.raises(CheckpointError, match="another save"):
        open_checkpoint(run, identity=first)


# -------------------------------------------------------------------------------------------- saved by others


def test_one_safetensors_file(tmp_path, weights):
    save_file(weights, tmp_path / "w.safetensors")
    checkpoint = open_checkpoint(tmp_path / "w.safetensors")
    assert checkpoint.names == tuple(weights)
    assert torch.equal(checkpoint.weights(["layer2.weight"])["layer2.weight"], weights["layer2.weight"])
    assert not checkpoint.has_optimizer
    assert checkpoint.extra == {}
    with pytest.raises(CheckpointError, match="holds weights only"):
        _ = checkpoint.step
    with pytest.raises(CheckpointError, match="holds weights only"):
        checkpoint.optimizer([])


def test_a_file_that_is_no_safetensors(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"PK\x03\x04 not this format")
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        open_checkpoint(tmp_path / "w.safetensors")


def test_a_plain_directory_with_a_missing_or_truncated_shard(tmp_path, weights):
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is missing"):
        open_checkpoint(tmp_path)
    save_file(weights, tmp_path / "a.safetensors")
    assert load_weights(tmp_path).keys() == weights.keys()
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=r"a\.safetensors can't be read"):
        open_checkpoint(tmp_path)

"""`stageflow checkpoint`: what was saved is shown, checked and converted."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from stageflow.checkpoint import Progress, Saving, Series, load_weights, write_shard
from stageflow.cli import main

TIED = torch.arange(6.0).reshape(2, 3)


def save(directory, step=7):
    with Saving(directory) as saving:
        entries = [
            write_shard(saving.path, "model", 0, 2, {"embed": TIED}),
            write_shard(saving.path, "model", 1, 2, {"head.bias": torch.tensor([float(step), 1.0])}),
        ]
        (saving.path / "config.json").write_text('{"model_type": "toy"}')
        saving.finish(entries, Progress(step, 3, {"head.weight": "embed"}, {"epoch": 2}))


def damage(directory):
    path = directory / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path):
    save(tmp_path / "run")
    return tmp_path / "run"


def test_inspect(run, capsys):
    assert main(["checkpoint", "inspect", str(run)]) == 0
    out = capsys.readouterr().out
    for part in ("step 7, seed 3", '"epoch": 2', "embed  2x3  F32", "head.weight  is embed", "2 weights, 8 numbers"):
        assert part in out


def test_inspect_as_json(run, capsys):
    assert main(["checkpoint", "inspect", str(run), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert facts["step"] == 7
    assert facts["weights"]["head.bias"] == {"shape": [2], "dtype": "F32"}
    assert facts["files"].keys() == {p.name for p in run.iterdir()} - {"stageflow.json"}


def test_inspect_and_verify_a_folder_of_several(tmp_path, capsys):
    series = Series(tmp_path / "runs")
    for step in (1, 2):
        save(series.place(step), step)
    damage(series.place(1))
    assert main(["checkpoint", "inspect", str(tmp_path / "runs"), "--json"]) == 0  # sizes are right
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [1, 2]
    assert main(["checkpoint", "verify", str(tmp_path / "runs")]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("damaged: ")
    assert "model-00001-of-00002.safetensors is not what was saved" in first
    assert second.endswith("step-00000002: good")


def test_verify(run, capsys):
    assert main(["checkpoint", "verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {str(run): {"good": True, "problem": None}}
    os.truncate(run / "config.json", 3)
    assert main(["checkpoint", "verify", str(run), "--json"]) == 1
    assert "config.json has 3 bytes" in json.loads(capsys.readouterr().out)[str(run)]["problem"]
    assert main(["checkpoint", "inspect", str(run)]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_convert_to_each_form(run, tmp_path, capsys):
    expected = load_weights(run)
    for name in ("one.safetensors", "one.pt", "plain"):
        assert main(["checkpoint", "convert", str(run), str(tmp_path / "new" / name)]) == 0
        assert "3 weights" in capsys.readouterr().out
    assert load_file(tmp_path / "new" / "one.safetensors").keys() == {"embed", "head.bias"}
    stored = torch.load(tmp_path / "new" / "one.pt", weights_only=True)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    plain = tmp_path / "new" / "plain"
    assert {path.name for path in plain.iterdir()} == {"model.safetensors", "config.json"}
    assert torch.equal(load_weights(plain)["embed"], TIED)
    assert [path.name for path in (tmp_path / "new").glob(".*")] == []


def test_convert_the_newest_good_one_to_another_dtype(tmp_path):
    series = Series(tmp_path / "runs")
    for step in (1, 2, 3):
        save(series.place(step), step)
    damage(series.place(3))
    command = ["checkpoint", "convert", str(tmp_path / "runs"), str(tmp_path / "w.safetensors"), "--dtype", "bfloat16"]
    assert main(command) == 0
    weights = load_file(tmp_path / "w.safetensors")
    assert weights["head.bias"].tolist() == [2.0, 1.0]
    assert weights["head.bias"].dtype == torch.bfloat16


def test_what_can_not_be_is_refused(run, tmp_path, capsys):
    assert main(["checkpoint", "convert", str(run), str(run)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path / "nowhere")]) == 1
    assert "there is no checkpoint at" in capsys.readouterr().err
    damage(run)
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "out.pt")]) == 1
    assert not (tmp_path / "out.pt").exists()
    (tmp_path / "file").write_text("x")
    save(tmp_path / "good")
    assert main(["checkpoint", "convert", str(tmp_path / "good"), str(tmp_path / "file" / "out.pt")]) == 1
    assert "could not be written" in capsys.readouterr().err

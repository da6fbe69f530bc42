"""``stageflow plan`` for bare numbers, profiles, functions and directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stageflow.cli import main
from stageflow.cli.plan import devices_of
from stageflow.plan import Block, Plan
from stageflow.plan.profile import Profile

QUICK = ["--seconds", "0.1"]

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(8, 8)

def alone():
    return nn.Linear(8, 8)

number = 3
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, *QUICK, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words, *QUICK]) == 2
    return capsys.readouterr().err


def profile(path: Path) -> Path:
    blocks = tuple(
        Block(f"layers.{i}", 1e-3, 2e-3, 1e-3, 1e-3, activation=1e6, parameters=1e6, output=1e3) for i in range(4)
    )
    made = Profile("Model", "sequence", blocks, (), "a device", True, 4, 3, 1)
    made.to_json(path)
    return path


def test_bare_numbers(capsys) -> None:
    found = plan(capsys, "--stages", "4", "--microbatches", "8", "--f", "1", "--b", "2", "--memory", "4")
    assert found["step"] == 4 * 1 - 1 + 8 * 3  # no schedule starts the last stage earlier, and it has 8 times 3 to do
    assert found["gap"] == 0
    assert found["microbatches"] == 8
    assert max(found["memory"]) <= 4


def test_bare_numbers_per_stage_and_a_hop(capsys) -> None:
    even = plan(capsys, "--stages", "2", "--microbatches", "4")
    assert plan(capsys, "--stages", "2", "--microbatches", "4", "--hop", "1")["step"] > even["step"]
    slow = plan(capsys, "--stages", "2", "--microbatches", "4", "--f", "1,3", "--w", "2,1")
    assert [stage["time"] for stage in slow["stages"]] == [4, 5]
    assert [s["time"] for s in plan(capsys, "--devices", "2", "--b", "3", "--i", "1")["stages"]] == [4, 4]


def test_two_stages_per_device_and_a_name(capsys) -> None:
    found = plan(capsys, "--stages", "4", "--devices", "2", "--microbatches", "4", "--schedule", "zb_v")
    assert [stage["device"] for stage in found["stages"]] == [0, 1, 1, 0]
    assert found["schedule"] == "zb_v"


def test_the_table_and_the_files(capsys, tmp_path: Path) -> None:
    files = ["--save", str(tmp_path / "plan.json"), "--page", str(tmp_path / "plan.html")]
    assert main(["plan", "--stages", "2", "--microbatches", "4", *files, *QUICK]) == 0
    out = capsys.readouterr().out
    assert str(Plan.from_json(tmp_path / "plan.json")) + "\n" == out
    assert "bare numbers: 2 stages on 2 devices" in out
    assert "<svg" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_a_profile(capsys, tmp_path: Path) -> None:
    found = plan(capsys, str(profile(tmp_path / "profile.json")), "--devices", "2", "--memory", "20MB", "--stages", "2")
    assert found["model"] == "profile"
    assert found["microbatches"] == 8
    assert [stage["blocks"] for stage in found["stages"]] == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


def test_the_link_of_a_profile(capsys, tmp_path: Path) -> None:
    words = [str(profile(tmp_path / "profile.json")), "--devices", "2", "--stages", "2"]
    fast = plan(capsys, *words)["step"]
    assert plan(capsys, *words, "--latency", "0.001", "--bandwidth", "10MB")["step"] > fast


def test_a_function(capsys, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    found = plan(
        capsys, f"{tmp_path / 'model.py'}:build", "--devices", "2", "--microbatches", "4", "--recompute", "yes"
    )
    assert found["model"] == "Sequential"
    assert all(stage["recompute"] for stage in found["stages"])
    assert found["step"] > 0


def test_a_file_that_imports_its_neighbour(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_the_model.py").write_text(MODEL)
    (tmp_path / "uses_its_neighbour.py").write_text("from neighbour_of_the_model import build\n")
    (tmp_path / "fails.py").write_text("import no_such_module_anywhere\n")
    assert plan(capsys, f"{tmp_path / 'uses_its_neighbour.py'}:build", "--devices", "2")["model"] == "Sequential"
    assert "can't be imported: ModuleNotFoundError" in refused(
        capsys, f"{tmp_path / 'fails.py'}:build", "--devices", "2"
    )


def test_a_function_for_a_named_accelerator(capsys, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    found = plan(capsys, f"{tmp_path / 'model.py'}:build", "--devices", "2xh100", "--microbatches", "4")
    assert found["step"] < 1e-3


def test_a_directory(capsys, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--devices", "2xh100", "--batch", "8", "--sequence-length", "16", "--microbatches", "4"]
    found = plan(capsys, str(tmp_path), *words)
    assert found["model"] == tmp_path.name
    blocks = [name for stage in found["stages"] for name in stage["blocks"]]
    assert [name for name in blocks if name.startswith("model.layers")] == [f"model.layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a MODEL to plan, or bare numbers"),
        (["--stages", "2", "--batch", "3"], "--batch is for a model"),
        (["--stages", "2", "--devices", "h100"], "take a number of devices"),
        (["--stages", "2", "--memory", "4GiB"], "take a number here"),
        (["--stages", "3", "--f", "1,2"], "--f has 2 times for 3 stages"),
        (["--stages", "2", "--microbatches", "0"], "microbatches must be"),
        (["nowhere", "--devices", "2"], "nowhere: no such directory or file"),
        (["nowhere"], "--devices is missing"),
        (["nowhere.py:build", "--devices", "2"], "there is no file nowhere.py"),
        (["nowhere", "--devices", "2", "--f", "1"], "--f is for bare numbers"),
        (["nowhere", "--devices", "2", "--batch", "1"], "--batch is for a directory"),
        (["nowhere.json", "--devices", "2x"], "is none of"),
    ],
)
def test_what_makes_no_sense(capsys, monkeypatch, tmp_path: Path, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere.json").write_text("{}")
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(
    ("function", "said"),
    [("missing", "defines no function 'missing'"), ("number", "no function"), ("alone", "expected a pair")],
)
def test_functions_that_give_no_model(capsys, tmp_path: Path, function: str, said: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert said in refused(capsys, f"{tmp_path / 'model.py'}:{function}", "--devices", "2")


@pytest.mark.parametrize(
    ("config", "devices", "said"),
    [
        (None, "2xh100", "holds no config.json"),
        ("{}", "2xh100", "describes no causal language model"),
        ('{"model_type": "vit"}', "2xh100", "describes no causal language model"),
        ("{", "2xh100", "describes no causal language model"),
        ("{}", "2", "a directory is counted, not run"),
    ],
)
def test_directories_that_hold_no_model(capsys, tmp_path: Path, config: str | None, devices: str, said: str) -> None:
    if config is not None:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(config)
    assert said in refused(capsys, str(tmp_path), "--devices", devices)


def test_devices_in_words() -> None:
    assert devices_of("8") == 8
    assert devices_of("2xh100, a100-sxm4-80gb") == ["h100", "h100", "a100-sxm4-80gb"]
    assert devices_of("l40s") == ["l40s"]

"""`stageflow train` from flags to files, small."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stageflow.cli import main
from stageflow.cli.demo.gpt import GPTConfig, build_gpt

TINY = [
    "--layers",
    "2",
    "--width",
    "32",
    "--sequence-length",
    "16",
    "--batch-size",
    "8",
    "--lr",
    "1e-2",
    "--steps",
    "12",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def train(capsys, text: Path, output: Path, *words: str) -> dict:
    assert main(["train", "--data", str(text), "--output", str(output), "--json", *TINY, *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["--stages", "2", "--microbatches", "4"],
        ["--stages", "3", "--microbatches", "3", "--schedule", "1f1b", "--launch", "threads"],
    ],
    ids=["processes", "threads"],
)
def test_it_learns_what_one_process_learns(words: list[str], text: Path, tmp_path: Path, capsys):
    result = train(capsys, text, tmp_path, *words)
    assert result["held_out_loss_after"] < result["held_out_loss_before"] - 1
    assert result["parity"]["steps"] == 3
    assert result["parity"]["worst_relative_difference"] < 1e-4
    assert all(single["speed_up"] > 0 for single in result["one_process"])
    assert len(result["losses"]) == 12
    assert len(result["busy_share"]) == result["stages"]
    assert 0 <= result["bubble_measured"] < 1
    assert 0 <= result["bubble_predicted"] < 1


def test_files_are_written(text: Path, tmp_path: Path, capsys):
    result = train(capsys, text, tmp_path, "--no-compare")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "predicted" in (tmp_path / "timeline.html").read_text()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {entry["name"] for entry in trace} >= {"0F0", "1F7", "0I0", "1W7"}
    model = build_gpt(GPTConfig(length=16, layers=2, width=32))
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))


def test_words_for_people(text: Path, tmp_path: Path, capsys):
    assert main(["train", "--data", str(text), "--output", str(tmp_path), *TINY, "--launch", "threads"]) == 0
    printed = capsys.readouterr()
    for word in ("held-out loss", "bubble", "parity", "speed-up", "timeline.html"):
        assert word in printed.out
    assert "step 12/12" in printed.err


def test_a_run_that_can_not_be_is_refused_before_it_starts(text: Path, capsys):
    for flags, words in (
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--stages 0", "--stages must be at least 1, got 0"),
        ("--microbatches 9 --batch-size 8", "--microbatches 9 of a batch of 8 sequences would be empty"),
        ("--width 65", "--width must be a multiple of 4"),
        ("--schedule nope", "unknown schedule 'nope'"),
    ):
        assert main(["train", "--data", "/no/such/text", *flags.split()]) == 2  # before the text is looked for
        assert words in capsys.readouterr().err
    assert main(["train", "--data", "/no/such/text"]) == 2
    assert "no such file or folder" in capsys.readouterr().err

"""The frame: verbs are listed, found, and fail in words."""

import subprocess
import sys

import pytest

from stageflow import cli
from stageflow.errors import InputError, SplitError


def test_without_a_verb_every_verb_is_listed(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb: str, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([verb, "--help"])
    assert exit_.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_help_and_schedules_need_no_torch():
    words = ["--help"], ["simulate", "--help"], ["simulate"], ["train", "--help"], ["doctor", "--help"]
    script = f"""
import sys
from stageflow.cli import main
for words in {words!r}:
    try:
        main(words)
    except SystemExit as exit_:
        assert exit_.code == 0, words
    assert "torch" not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError("seven is no number"), 2), (SplitError("no way in"), 1), (FileNotFoundError(2, "gone", "x.txt"), 1)],
)
def test_an_error_is_told_in_one_line(error: Exception, status: int, capsys, monkeypatch):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli.load("doctor"), "run", fail)
    assert cli.main(["doctor"]) == status
    told = capsys.readouterr().err
    assert told.startswith("stageflow doctor: error: ")
    assert told.count("\n") == 1


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch):
    def fail(_: object) -> int:
        raise OSError("no file is to blame")

    monkeypatch.setattr(cli.load("doctor"), "run", fail)
    with pytest.raises(OSError, match="no file"):
        cli.main(["doctor"])


def test_a_reader_that_leaves_is_no_error():
    script = (
        "import sys; from stageflow.cli import main; sys.exit(main(['simulate', '--microbatches', '2000', '--text']))"
    )
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    with writer:
        writer.stdout.read(1)
        writer.stdout.close()
        told = writer.stderr.read()
        writer.wait(timeout=60)
    assert told == b""


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("stageflow 0.")


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--output", "{file}"], "{file}: File exists"), (["--lr", "nan"], "--lr must be a finite number >= 0, got nan")],
)
def test_train_refuses_before_it_trains(words: list[str], told: str, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("stageflow.train.pipeline.Pipeline.train_step", None)
    (file := tmp_path / "file").write_text("words " * 1000)
    given = [word.format(file=file) for word in words]
    assert cli.main(["train", "--steps", "1", "--data", str(file), "--output", str(tmp_path / "out"), *given]) in (1, 2)
    assert told.format(file=file) in capsys.readouterr().err

"""`stageflow simulate`: figures known on paper."""

import json

import pytest

from stageflow.cli import main


def simulate(capsys, *words: str) -> dict:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gpipe_and_1f1b_have_the_textbook_bubble(capsys):
    for schedule in ("gpipe", "1f1b"):
        figures = simulate(capsys, "--schedule", schedule, "--stages", "4", "--microbatches", "8")
        assert figures["makespan"] == pytest.approx(11 * 3)
        assert figures["bubble"] == pytest.approx(3 / 11)


def test_peak_activations(capsys):
    assert simulate(capsys, "--schedule", "gpipe")["peak_activations"] == [8, 8, 8, 8]
    assert simulate(capsys, "--schedule", "1f1b")["peak_activations"] == [4, 3, 2, 1]


def test_times_per_stage_and_hop(capsys):
    figures = simulate(
        capsys, "--stages", "2", "--microbatches", "1", "--f", "1,2", "--i", "1", "--w", "0", "--hop", "0.5"
    )
    assert figures["makespan"] == pytest.approx(1 + 0.5 + 2 + 1 + 0.5 + 1)


def test_files_are_written(tmp_path, capsys):
    page, trace, table = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.csv"
    written = simulate(capsys, "--timeline", str(page), "--trace", str(trace), "--csv", str(table))
    assert page.read_text().startswith("<!doctype html>")
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == written["actions"]
    assert simulate(capsys, "--file", str(table))["makespan"] == written["makespan"]


def test_a_printed_schedule_is_read_back(tmp_path, capsys):
    assert main(["simulate", "--schedule", "zb_h1", "--text"]) == 0
    path = tmp_path / "mine.txt"
    path.write_text(capsys.readouterr().out)
    again = simulate(capsys, "--file", str(path))
    assert again == simulate(capsys, "--schedule", "zb_h1")


def test_picture_in_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", "--stages", "2", "--microbatches", "2"]) == 0
    printed = capsys.readouterr().out
    assert "worker 1 " in printed
    assert "bubble 33.3%" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schedule", "nonsense"], "known: "),
        (["--stages", "0"], "stages >= 1"),
        (["--f", "1,2,3"], "3 times for 4 stages"),
        (["--file", "/no/such/file"], "no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str, capsys):
    assert main(["simulate", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_time_that_is_no_number(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--f", "soon"])
    assert "'soon' is no time" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["schedule.txt", "schedule.csv"])
def test_a_file_that_is_no_text(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(bytes(range(128, 256)))
    assert main(["simulate", "--file", str(path)]) == 2
    assert f"{path}: this is no text" in capsys.readouterr().err

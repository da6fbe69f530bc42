"""`stageflow simulate`: figures known on paper."""

import json

import pytest

from stageflow.cli import main
from stageflow.schedule import SCHEDULES, SIMULATED, Costs, Footprint


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


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ("", (1, 1, 2)),
        ("--b 3", (1.5, 1.5, 3)),
        ("--b 1 --w 2", (1, 2, 3)),
        ("--b 5 --i 2", (2, 3, 5)),
        ("--b 5 --i 2 --w 2", (2, 2, 5)),
        ("--i 3", (3, 1, 4)),
        ("--w 3", (1, 3, 4)),
        ("--b 3,4,3,4 --i 1", ([1] * 4, [2, 3, 2, 3], [3, 4, 3, 4])),
    ],
)
def test_parts_of_a_backward(words: str, times: tuple, capsys):
    """I, W and B, whichever are given; B with W and without I is the gradient of the inputs, as in papers."""
    i, w, b = (time if isinstance(time, list) else [time] * 4 for time in times)
    split = simulate(capsys, "--schedule", "zb_h1", *words.split())
    assert split["busy"] == pytest.approx([8 * (1 + i[s] + w[s]) for s in range(4)])
    whole = simulate(capsys, "--schedule", "1f1b", *words.split())
    assert whole["busy"] == pytest.approx([8 * (1 + b[s]) for s in range(4)])


def test_recomputation_links_and_reduction(capsys):
    words = ["--stages", "2", "--microbatches", "1", "--schedule", "gpipe", "--f", "1", "--b", "2"]
    figures = simulate(capsys, *words, "--recompute", "1", "--hop", "0.5", "--transfer", "3", "--reduction", "9")
    assert figures["makespan"] == pytest.approx(1 + 3.5 + 1 + 3 + 3.5 + 3 + 9)
    assert figures["idle"][0] == pytest.approx({"warm_up": 0, "waiting": 7.5, "transfer": 3.5, "drain": 9})
    assert main(["simulate", *words, "--recompute", "1", "--hop", "0.5"]) == 0
    assert "times: F 1, I 1, W 1, B 2, recompute 1, hop 0.5" in capsys.readouterr().out


def test_memory_in_bytes(capsys):
    words = ["--stages", "2", "--activation", "1GiB,2GiB", "--deferred", "0.5GiB", "--static", "3GiB"]
    figures = simulate(capsys, "--schedule", "1f1b", *words)
    assert figures["peak_memory"] == [5 * 2**30, 5 * 2**30]
    assert simulate(capsys, *words, "--memory", "4.9GiB")["fits"] is False
    assert main(["simulate", *words, "--memory", "4.9GiB"]) == 0
    assert "5 GiB over" in capsys.readouterr().out


def test_builders_keep_within_the_memory(capsys):
    for schedule in ("zb_h1", "greedy"):
        figures = simulate(capsys, "--schedule", schedule, "--memory", "7", "--static", "4")
        assert figures["peak_activations"] == [3, 3, 3, 3]
        assert figures["fits"] is True


def test_the_bound_is_that_of_any_schedule(capsys):
    figures = simulate(capsys, "--schedule", "1f1b", "--stages", "4", "--microbatches", "8")
    assert figures["bound"] == pytest.approx(8 * 3 + 3), "the last worker starts after 3 F and may end with a W"
    assert simulate(capsys, "--schedule", "forward_only")["bound"] is None
    assert main(["simulate"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "any schedule on this placement takes at least 27, this one is 22.2% above: worker 3 is busy" in told


def compare(capsys, *words: str) -> dict:
    figures = simulate(capsys, "--schedule", "all", *words)
    return {**figures, "schedules": {row["schedule"]: row for row in figures["schedules"]}}


def test_all_schedules_side_by_side(capsys):
    found = compare(capsys, "--stages", "8", "--microbatches", "32", "--f", "1", "--b", "1", "--w", "1")
    rows = found["schedules"]
    assert set(rows) == {*SCHEDULES, *SIMULATED} - {"forward_only"}
    assert found["refused"] == {}
    work = 32 * 3
    assert rows["gpipe"]["makespan"] == rows["1f1b"]["makespan"] == work + 7 * 3
    assert rows["zb_h1"]["makespan"] == work + 7 * (1 + 1 - 1)
    assert rows["interleaved_1f1b"]["makespan"] == work + 7 * 3 / 2
    assert rows["interleaved_1f1b"]["stages"] == 16, "eight stages cut in two each"
    assert [rows[name]["peak_memory"] for name in ("gpipe", "1f1b", "zb_h2", "zb_v")] == [32, 8, 15, 8]
    for name, row in rows.items():
        assert row["runs"] is (name in SCHEDULES)
        assert row["bound"] is None or row["bound"] <= row["makespan"] * (1 + 1e-9), name
    spans = [row["makespan"] for row in found["schedules"].values()]
    assert spans == sorted(spans)


def test_all_do_the_work_of_the_same_model(capsys):
    """Stages that differ, four on two workers, in whatever way a schedule cuts and places them."""
    from stageflow.cli.compare import compare
    from stageflow.cli.costs import Sizes

    costs, sizes = Costs([1, 2, 3, 4], 2, [1, 1, 2, 2]), Sizes(Footprint(static=[1, 2, 3, 4]), None, plain=True)
    for workers in (2, 4):
        comparison = compare(4, 8, workers, costs, sizes)
        assert len(comparison.rows) >= 12
        for row in comparison.rows:
            assert sum(row.simulation.busy) == pytest.approx(8 * (10 + 8 + 6)), row.schedule.name
            assert min(row.peaks) > 0


def test_the_best_within_the_memory(capsys):
    assert compare(capsys, "--memory", "4")["best"] in ("zb_v", "interleaved_zb")
    tight = compare(capsys, "--memory", "2")
    fitting = {name for name, row in tight["schedules"].items() if row["fits"]}
    assert {"greedy", "zb_h1"} <= fitting
    assert "1f1b" not in fitting
    assert tight["best"] in fitting
    assert main(["simulate", "--schedule", "all", "--memory", "0.25"]) == 0
    assert "none fits within 0.25" in capsys.readouterr().out


def test_counts_that_a_schedule_does_not_take_are_told(capsys):
    words = ["--schedule", "all", "--stages", "3", "--microbatches", "3"]
    refused = simulate(capsys, *words)["refused"]
    assert set(refused) == {"dualpipe", "dualpipe_v", "chimera"}
    assert main(["simulate", *words]) == 0
    assert f"dualpipe: {refused['dualpipe']}" in capsys.readouterr().out


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
        (["--stages", "0"], "--stages 0: at least 1 is needed"),
        (["--schedule", "all", "--workers", "-2"], "--workers -2: at least 1 is needed"),
        (["--schedule", "all", "--f", "1,2,3"], "3 times for 4 stages"),
        (["--schedule", "all", "--text"], "--text is for one schedule"),
        (["--schedule", "all", "--timeline", "a.html"], "--timeline is for one schedule"),
        (["--b", "2", "--i", "3"], "--i is longer than --b"),
        (["--b", "2,2", "--i", "1,1,1"], "times for 2 and for 3 stages"),
        (["--memory", "much"], "--memory='much' is no size"),
        (["--memory", "1,2"], "--memory 1,2: give one size"),
        (["--activation", "1,2"], "footprint.activation has 2 sizes for 4 stages"),
        (["--schedule", "greedy", "--memory", "0.5"], "memory=0 is too small"),
        (["--file", "{folder}"], "is a folder: give the file of a schedule"),
        (["--file", "x.txt", "--stages", "3"], "--stages is for a schedule by its name"),
        (["--f", "1,2,3"], "3 times for 4 stages"),
        (["--file", "/no/such/file"], "no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str, tmp_path, capsys):
    assert main(["simulate", *[word.format(folder=tmp_path) for word in words]]) == 2
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

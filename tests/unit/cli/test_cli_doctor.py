"""`stageflow doctor`: tells the facts of this machine, and judges those of any."""

import copy
import json
import os

import pytest

from stageflow.cli import doctor, machine, main

HEALTHY = {
    "software": {"torch": "2.13.0+cpu"},
    "torch": {"threads": 8, "cuda": None, "devices": [], "backends": ["gloo"]},
    "cores": {"present": 8, "usable": 8, "quota": None, "variables": {}},
    "memory": {"total": 64 << 30, "available": 60 << 30},
    "shared_memory": {"memfd": True, "total": 32 << 30, "free": 32 << 30},
    "limits": {"open_files": 4096, "open_files_hard": None, "processes": None},
    "launchers": {"threads": "yes", "processes": "yes", "torchrun": "yes"},
    "extras": {"hf": True, "smollm2": False},
    "links": {"measured": [{"bytes": 64, "seconds": 4e-5, "bytes_per_second": 1.6e6}]},
}


def judged(**changes) -> list[doctor.Finding]:
    report = copy.deepcopy(HEALTHY)
    for section, values in changes.items():
        report[section].update(values)
    return list(doctor.judge(report))


def test_a_healthy_machine_has_no_findings():
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"torch": {"error": "ImportError: no"}}, "torch can't be imported: ImportError: no"),
        ({"software": {"torch": "2.9.1"}}, "older than 2.13"),
        ({"cores": {"variables": {"OMP_NUM_THREADS": "64"}}}, "OMP_NUM_THREADS is 64, but there are 8 cores"),
        ({"shared_memory": {"memfd": False, "free": 64 << 20}}, "/dev/shm has 64 MiB free"),
        ({"links": {"error": "LaunchError: no"}}, "worker processes don't work here: LaunchError: no"),
        ({"memory": {"available": 1 << 30}}, "only 1.0 GiB of memory"),
        ({"limits": {"open_files": 256}}, "only 256 files"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(changes: dict, what: str):
    (finding,) = judged(**changes)
    assert finding.wrong
    assert what in finding.what
    assert finding.do


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cores": {"usable": 1}}, "workers share 1 core"),
        ({"cores": {"quota": 3.5}}, "grants 3.5 cores of 8"),
        ({"shared_memory": {"free": 0}}, "/dev/shm has 0 B free"),
        ({"launchers": {"torchrun": None}}, "no gloo and no NCCL"),
    ],
)
def test_what_is_worth_a_note(changes: dict, what: str):
    (finding,) = judged(**changes)
    assert not finding.wrong
    assert what in finding.what


def test_cpu_quota_of_a_control_group(tmp_path):
    path = tmp_path / "cpu.max"
    assert machine.cpu_quota(path) is None
    path.write_text("max 100000\n")
    assert machine.cpu_quota(path) is None
    path.write_text("150000 100000\n")
    assert machine.cpu_quota(path) == 1.5


def test_facts_of_this_machine(capsys):
    status = main(["doctor", "--json", "--no-links"])
    report = json.loads(capsys.readouterr().out)
    assert status == (1 if any(finding["wrong"] for finding in report["findings"]) else 0)
    assert report["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert report["software"]["torch"].startswith("2.")
    assert report["torch"]["threads"] >= 1
    assert 0 < report["memory"]["available"] <= report["memory"]["total"]


def test_text_ends_with_the_findings(capsys, monkeypatch):
    sick = copy.deepcopy(HEALTHY) | {"limits": {"open_files": 64, "open_files_hard": 64, "processes": None}}
    monkeypatch.setattr(doctor, "examine", lambda links: sick)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("1 wrong\n  a process may open only 64 files\n    -> ulimit -n 4096\n")

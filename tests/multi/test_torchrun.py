"""The same façade under torchrun, where every rank runs the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("torchrun_training.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("train", "trained"),
        ("predict", "predicted"),
        ("fail", "failed well"),
        ("differ", "refused"),
        ("wait", "waited"),
        ("stop", "found"),
    ],
)
def test_under_torchrun(job: str, words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), job, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(words) == 2

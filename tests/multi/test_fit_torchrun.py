"""Under torchrun a failure ends the ranks; its agent starts them again, and the run goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_fit import batch, pipeline
from torchrun_fit import STEPS

from stageflow.checkpoint import load_weights


@pytest.mark.timeout(400)
def test_a_killed_rank_is_replaced_by_torchrun_and_the_run_goes_on(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("torchrun_fit.py")
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "report0").exists()
    assert re.match(r"12 steps, resumed from step [48],", (tmp_path / "report1").read_text())
    with pipeline(launch="threads") as pipe:
        pipe.fit(batch, STEPS)
        expected = pipe.state_dict()
    found = load_weights(tmp_path / "run")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []

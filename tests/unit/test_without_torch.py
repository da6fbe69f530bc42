"""Planning, simulating and supervising start fast because they don't load torch."""

import subprocess
import sys

import pytest

FREE_OF_TORCH = [
    "stageflow",
    "stageflow.errors",
    "stageflow.graph",
    "stageflow.observe",
    "stageflow.schedule",
    "stageflow.plan",
    "stageflow.plan.bounds",
    "stageflow.plan.make",
    "stageflow.plan.page",
    "stageflow.plan.partition",
    "stageflow.plan.search",
    "stageflow.launch.supervisor",
    "stageflow.cli",
]


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_importing_it_does_not_load_torch(module: str):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0

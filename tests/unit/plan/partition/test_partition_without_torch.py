import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["stageflow.plan.partition", "stageflow.plan.devices", "stageflow.plan.profile", "stageflow.plan"]
)
def test_planning_does_not_load_torch(module: str):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0

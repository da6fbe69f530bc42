"""Planning and simulating run where torch isn't wanted."""

import subprocess
import sys


def test_schedules_do_not_import_torch() -> None:
    code = (
        "import sys, stageflow.schedule as s;"
        "s.build_schedule('zb_v', stages=4, microbatches=3).validate();"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

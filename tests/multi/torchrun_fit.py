"""Under torchrun: a run whose second rank is killed in its first life."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from test_fit import batch, pipeline

STEPS, EVERY = 12, 4


def main() -> None:
    root = Path(sys.argv[1])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def at_step(run: Any) -> None:
        if run.step == 10 and life == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with pipeline(launch="torchrun", timeout=60.0) as pipe:
        report = pipe.fit(batch, STEPS, checkpoint=root / "run", checkpoint_every=EVERY, callbacks=[at_step])
    if os.environ["RANK"] == "0":
        (root / f"report{life}").write_text(str(report))


if __name__ == "__main__":
    main()

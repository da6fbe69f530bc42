"""``python -m stageflow.cli`` is ``stageflow``."""

import sys

from stageflow.cli import main

sys.exit(main())

"""How many processes can really run side by side here."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use, which may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

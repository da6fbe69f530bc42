"""How fast two worker processes of this machine exchange messages, measured over the transport that training uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageflow.launch.base import WorkerContext

SIZES = {64: 400, 256 << 10: 200, 1 << 20: 100, 16 << 20: 10}
"""Bytes of a message, and how many times to bounce it; less than a second in all."""

WAIT = 20.0


class Prober:
    """The service of each of the two workers."""

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank
        self._endpoint = context.endpoint()

    def bounce(self, number: int, size: int, rounds: int) -> float | None:
        """Worker 0 measures messages of so many bytes, worker 1 answers; the median seconds of one way."""
        from stageflow.transport.probe import answer, measure_link

        if self._rank == 0:
            return measure_link(self._endpoint, 1, [size], rounds, step=number)[0].seconds
        answer(self._endpoint, 0, step=number)
        return None


def measure_links() -> list[dict[str, Any]]:
    """Start two worker processes and bounce messages of several sizes.

    Returns for each size ``{"bytes", "seconds", "bytes_per_second"}``, one way. Raises LaunchError or PipelineError
    where worker processes don't work.
    """
    from stageflow.launch.processes import start_processes
    from stageflow.train.wiring import ProcessWiring

    wiring = ProcessWiring(3)  # two workers and the driver
    found: list[dict[str, Any]] = []
    try:
        with start_processes(Prober, 2, wiring=wiring, timeout=WAIT) as group:
            for number, (size, rounds) in enumerate(SIZES.items(), start=1):
                seconds, _ = group.call("bounce", timeout=2 * WAIT, common=(number, size, rounds))
                found.append({"bytes": size, "seconds": seconds, "bytes_per_second": size / seconds})
    finally:
        wiring.close()
    return found

"""Steps that are known to be the best possible, from the project's ground truth for schedules.

Proven with a constraint solver (OR-Tools CP-SAT) for four devices and eight micro-batches; makespan from time 0; an
activation counts from the start of its F to the end of its W, or of its B where the backward is whole.
"""

from typing import NamedTuple

MICROBATCHES = 8


class Optimum(NamedTuple):
    """Times F, B (I where split), W and of a hop; activations that a worker may keep; the proven optimum."""

    times: tuple[int, int, int, int]
    cap: int
    seconds: int


SPLIT = [
    Optimum((10, 14, 8, 1), 4, 316),
    Optimum((10, 14, 8, 1), 5, 302),
    Optimum((10, 14, 8, 1), 6, 294),
    Optimum((10, 14, 8, 1), 7, 289),
    Optimum((10, 12, 12, 1), 4, 314),
    Optimum((10, 12, 12, 1), 5, 305),
    Optimum((10, 12, 12, 1), 6, 305),
    Optimum((10, 12, 12, 1), 7, 305),
    Optimum((10, 10, 10, 0), 4, 270),
]
UNSPLIT = [Optimum((10, 22, 0, 1), 4, 368), Optimum((10, 22, 0, 1), 7, 358)]

# Two stages a device in a loop, whole backwards; times of a stage. The usual interleaved 1F1B takes 318.
TWO_STAGES = Optimum((5, 11, 0, 1), 11, 310)

# Two stages a device in a V, times 5, 7, 4 of a stage, hop 1; span; caps in stages' activations; of a heuristic from
# literature: (cap, its span). 374, 314 and 284 are the best that is known, without a proof.
V_HEURISTIC = [(4, 434), (6, 328), (8, 288)]
V_BEST_KNOWN = {4: 374, 6: 314, 8: 284}

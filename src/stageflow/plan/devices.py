"""Accelerators that may not be at hand: what they do at most, by their makers' data sheets. Torch-free.

Rates are those of dense matrix products, without sparsity, which some data sheets print first (twice as much). A link's
rate is that of one direction; data sheets give the sum of both. None of this was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageflow.errors import InputError
from stageflow.plan.partition import Device

PCIE_LATENCY = 10e-6  # seconds; an assumption for any link in one machine, measure your own with `stageflow doctor`


@dataclass(frozen=True)
class Accelerator:
    """One device's limits.

    name: as people write it. source: where the figures are from.
    half, single: floating-point operations per second in bfloat16 (float16 on devices before Ampere) and in float32.
    memory: bytes, as the data sheet's GB. bandwidth: bytes per second between it and the cores.
    link: bytes per second to another such device in the same machine, in one direction.
    """

    name: str
    source: str
    half: float
    single: float
    memory: float
    bandwidth: float
    link: float

    def rate(self, itemsize: int) -> float:
        """Operations per second on numbers of so many bytes."""
        return self.half if itemsize <= 2 else self.single

    def as_device(self) -> Device:
        """A device for partitions of a profile that was counted for this accelerator."""
        return Device(memory=self.memory, latency=PCIE_LATENCY, bandwidth=self.link)


TERA, GIGA = 1e12, 1e9

ACCELERATORS = (
    Accelerator(
        "V100-SXM2-32GB",
        "NVIDIA V100 Tensor Core GPU data sheet",
        125 * TERA, 15.7 * TERA, 32 * GIGA, 900 * GIGA, 150 * GIGA,
    ),
    Accelerator(
        "T4",
        "NVIDIA T4 Tensor Core GPU data sheet",
        65 * TERA, 8.1 * TERA, 16 * GIGA, 320 * GIGA, 16 * GIGA,
    ),
    Accelerator(
        "A100-SXM4-40GB",
        "NVIDIA A100 Tensor Core GPU data sheet",
        312 * TERA, 19.5 * TERA, 40 * GIGA, 1555 * GIGA, 300 * GIGA,
    ),
    Accelerator(
        "A100-SXM4-80GB",
        "NVIDIA A100 Tensor Core GPU data sheet",
        312 * TERA, 19.5 * TERA, 80 * GIGA, 2039 * GIGA, 300 * GIGA,
    ),
    Accelerator(
        "L4",
        "NVIDIA L4 Tensor Core GPU data sheet",
        121 * TERA, 30.3 * TERA, 24 * GIGA, 300 * GIGA, 32 * GIGA,
    ),
    Accelerator(
        "L40S",
        "NVIDIA L40S GPU data sheet",
        362 * TERA, 91.6 * TERA, 48 * GIGA, 864 * GIGA, 32 * GIGA,
    ),
    Accelerator(
        "H100-SXM5-80GB",
        "NVIDIA H100 Tensor Core GPU data sheet",
        989 * TERA, 67 * TERA, 80 * GIGA, 3350 * GIGA, 450 * GIGA,
    ),
    Accelerator(
        "H200-SXM-141GB",
        "NVIDIA H200 Tensor Core GPU data sheet",
        989 * TERA, 67 * TERA, 141 * GIGA, 4800 * GIGA, 450 * GIGA,
    ),
    Accelerator(
        "MI300X",
        "AMD Instinct MI300X accelerator data sheet; the link is one of its seven",
        1307 * TERA, 163.4 * TERA, 192 * GIGA, 5300 * GIGA, 64 * GIGA,
    ),
)  # fmt: skip


def accelerator(name: str | Accelerator) -> Accelerator:
    """Look one up: by its name, or the beginning of one if that is enough (``"h100"``), in any case.

    Raises InputError with the names there are.
    """
    if isinstance(name, Accelerator):
        return name
    wanted = _letters(name)
    found = [each for each in ACCELERATORS if _letters(each.name) == wanted]
    found = found or [each for each in ACCELERATORS if wanted and _letters(each.name).startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(each.name for each in found or ACCELERATORS)
        problem = f"{name!r} may be any of" if found else f"{name!r} is none of"
        raise InputError(f"{problem} {names}; for another device make an Accelerator of your own")
    return found[0]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

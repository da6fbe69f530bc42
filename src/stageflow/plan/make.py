"""From a model, or from numbers, to a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from stageflow.errors import InputError
from stageflow.plan.choose import choose, judge
from stageflow.plan.devices import Accelerator, accelerator
from stageflow.plan.partition import Block, Device
from stageflow.plan.profile import Profile
from stageflow.plan.progress import Progress
from stageflow.plan.shapes import AUTO, PER_DEVICE, Wish, Work
from stageflow.plan.sizes import Sizes
from stageflow.plan.words import bytes_of
from stageflow.whole import as_whole

if TYPE_CHECKING:
    from stageflow.plan.plan import Plan

Link = tuple[float, float | str]
Place = Device | Accelerator | str


def make_plan(
    model: Any = None,
    example: Any = None,
    *,
    devices: int | Sequence[Place],
    memory: str | float | None = None,
    link: Link | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: str = AUTO,
    recompute: bool | Literal["auto"] = "auto",
    profile: Profile | str | Path | Sequence[Block] | None = None,
    name: str | None = None,
    unit: str | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    progress: bool | None = None,
    **measuring: Any,
) -> Plan:
    """Measure a model, cut it into stages, choose a schedule, and say what a step will take and what bounds it.

    model, example: as for `Pipeline`: any module, a list of modules, or a function that builds one; inputs in a
        batch's size. Not needed where there is a ``profile``.
    devices: how many equal ones, or a list with one per worker: of `Device`, or of names of accelerators (see
        docs/measuring.md). With names nothing is run: times are counted for these accelerators.
    memory: of every device, in bytes or words ("40GiB"); None: what the devices say, else no limit.
    link: between neighbouring devices: (seconds of latency, bytes per second), the latter also in words ("25GB");
        None: what the devices say, else none of either.
    microbatches: into how many equal parts the batch is cut; None: chosen among about one, two, four and eight per
        device. Of a ``profile``, which is of one size of micro-batch, four per device.
    stages: how many; None: one or two per device, whichever is better.
    schedule: a name of `SCHEDULES`, or "auto": searched for.
    recompute: whether stages drop activations and compute them again: True, False, or "auto": those that have to.
    profile: what the blocks take, for one micro-batch: as `profile_model` gives it, or its file, or a list of `Block`.
    name: of the plan; default the model's class. unit: of the times, where they are no seconds.
    seconds: of searching, about, on top of trying every named schedule, which takes long by itself for very many
        devices and micro-batches. The same profile, arguments and seed give the same plan whatever else the machine
        does meanwhile.
    progress: show it on standard error; None: on a terminal.
    measuring: further arguments of `profile_model`, such as target, loss, optimizer, threads.

    Raises InputError for arguments that make no sense; SplitError where the model can't be cut, or does not fit into
    memory, with the numbers.
    """
    _check(microbatches, stages, schedule, recompute, seconds)
    microbatches, stages = as_whole(microbatches), as_whole(stages)
    given, accelerators = _devices(devices, memory, link)
    wish = Wish(given, schedule, recompute, stages, seconds, seed)
    names = {"model": name or "a profile", "samples": 0, "unit": unit}
    with Progress(progress) as say:
        if profile is not None:
            if model is not None or example is not None or measuring:
                extra = ", ".join(["model and example", *measuring])
                raise InputError(f"profile= says what the model takes: leave {extra} out, or profile=")
            if len(set(accelerators)) > 1:
                raise InputError("a profile is of one device: give others as Device(speed=...), or a model to count")
            works = [_given(profile, microbatches, len(given))]
            return judge(choose(works, wish, names, say), wish, say)
        if model is None or example is None:
            raise InputError("make_plan needs a model and an example batch, or profile=")
        sizes = Sizes(model, example, stages or len(given), measuring, accelerators, say)
        wish = dataclasses.replace(wish, devices=sizes.with_speeds(given, microbatches or sizes.samples))
        works = sizes.works(microbatches, len(given))
        names |= {"model": name or sizes.model, "samples": sizes.samples}
        plan = choose(works, wish, names, say)
        if not sizes.measured(plan.microbatches):  # so far worked out from smaller and larger ones
            plan = choose([sizes.work(plan.microbatches)], wish, names, say)
        return judge(plan, wish, say)


def _check(microbatches: Any, stages: Any, schedule: Any, recompute: Any, seconds: Any) -> None:
    for what, count in (("microbatches", microbatches), ("stages", stages)):
        if count is not None and as_whole(count, 1) is None:
            raise InputError(f"{what} must be a whole number >= 1, or None to choose, got {count!r}")
    if recompute not in (True, False, "auto"):
        raise InputError(f"recompute must be True, False or 'auto', got {recompute!r}")
    if not isinstance(schedule, str):
        raise InputError(f"schedule must be a name or 'auto', got a {type(schedule).__name__}")
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise InputError(f"seconds must be a number > 0, got {seconds!r}")


def _devices(
    devices: int | Sequence[Place], memory: str | float | None, link: Link | None
) -> tuple[tuple[Device, ...], tuple[Accelerator, ...]]:
    """One `Device` per worker, and the accelerators that they are where these were named.

    What is given for all wins over what a device says itself.
    """
    accelerators: tuple[Accelerator, ...] = ()
    count = as_whole(devices, 1)
    if count is not None:
        chosen = [Device() for _ in range(count)]
    elif not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise InputError(f"devices must be a whole number >= 1, or a list of one per worker, got {devices!r}")
    elif all(isinstance(each, Device) for each in devices):
        chosen = list(cast("Sequence[Device]", devices))
    elif all(isinstance(each, (str, Accelerator)) for each in devices):
        accelerators = tuple(accelerator(each) for each in cast("Sequence[Accelerator | str]", devices))
        chosen = [each.as_device() for each in accelerators]
    else:
        raise InputError(f"a list of devices must hold only Devices, or only accelerators or their names: {devices!r}")
    changes: dict[str, float] = {}
    if memory is not None:
        changes["memory"] = bytes_of(memory)
    if link is not None:
        changes["latency"], changes["bandwidth"] = _link(link)
    return tuple(dataclasses.replace(device, **changes) for device in chosen), accelerators


def _link(link: Link) -> tuple[float, float]:
    if not (isinstance(link, Sequence) and not isinstance(link, str) and len(link) == 2):
        raise InputError(f"link must be (seconds of latency, bytes per second), got {link!r}")
    latency, bandwidth = link
    if not (isinstance(latency, (int, float)) and 0 <= latency < math.inf):
        raise InputError(f"the latency of a link must be seconds >= 0, got {latency!r}")
    return latency, bytes_of(
        bandwidth.removesuffix("/s") if isinstance(bandwidth, str) else bandwidth, "link's bandwidth"
    )


def _given(profile: Profile | str | Path | Sequence[Block], microbatches: int | None, devices: int) -> Work:
    """The work that a profile, its file, or bare blocks describe."""
    count = microbatches or PER_DEVICE * devices
    if isinstance(profile, (str, Path)):
        profile = Profile.from_json(profile)
    if isinstance(profile, Profile):
        return Work(count, profile.blocks, profile.ties)
    if not (isinstance(profile, Sequence) and profile and all(isinstance(block, Block) for block in profile)):
        raise InputError(f"profile= must be a Profile, its file, or a list of Block, got {type(profile).__name__}")
    return Work(count, tuple(profile))

"""One model at several sizes of micro-batch: measured at the smallest and the largest, worked out between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stageflow.errors import InputError, SplitError
from stageflow.plan.devices import Accelerator
from stageflow.plan.partition import Block, Device
from stageflow.plan.profile import Profile, profile_model
from stageflow.plan.shapes import Work

_PER_SAMPLE = (
    *("forward", "backward", "backward_input", "backward_weight"),
    *("activation", "entry", "exit", "deferred", "boundary", "output"),
)


class Sizes:
    """Profiles of a model, each size measured once.

    samples: of the whole batch.
    """

    def __init__(
        self,
        model: Any,
        example: Any,
        at_least: int,
        options: Mapping[str, Any],
        accelerators: Sequence[Accelerator],
        tell: Callable[[str], None],
    ) -> None:
        """at_least: blocks. options: of `profile_model`. accelerators: of the workers; none: measure on what is here.

        Raises InputError for an example without a batch.
        """
        if "microbatch" in options:
            raise InputError("microbatch= follows from the example and microbatches=: leave it out")
        self._model, self._example = model, example
        self._options: dict[str, Any] = {"at_least": at_least, **options}
        self._accelerators = accelerators
        if accelerators:
            self._options["on"] = accelerators[0]
        self._tell = tell
        self._profiles: dict[int, Profile] = {}
        self.samples = batch_size(model, example, options.get("target"), options.get("batch_dims") or {})

    @property
    def model(self) -> str:
        """The class of the model; known once something was measured."""
        return next(iter(self._profiles.values())).model

    def with_speeds(self, devices: Sequence[Device], microbatches: int) -> tuple[Device, ...]:
        """The devices, each as fast as the whole model is on it beside the first."""
        if len(set(self._accelerators)) < 2:
            return tuple(devices)
        times = {each: self._count(each, microbatches) for each in set(self._accelerators)}
        first = times[self._accelerators[0]]
        return tuple(
            dataclasses.replace(device, speed=first / times[each])
            for device, each in zip(devices, self._accelerators, strict=True)
        )

    def _count(self, on: Accelerator, microbatches: int) -> float:
        """Seconds of the model's forward and backward for one micro-batch on an accelerator."""
        size = self.samples // microbatches
        profile = profile_model(self._model, self._example, microbatch=size, **{**self._options, "on": on})
        return profile.forward + profile.backward

    def works(self, microbatches: int | None, devices: int) -> list[Work]:
        """What there is to choose from. microbatches: as given by the user; None leaves it open."""
        if microbatches is not None:
            return [self.work(microbatches)]
        counts = counts_to_try(self.samples, devices)
        few, many = self.work(counts[0]), self.work(counts[-1])
        small, large = self.samples // counts[-1], self.samples // counts[0]
        inner = [
            Work(count, between(many.blocks, few.blocks, (self.samples // count - small) / (large - small)), few.ties)
            for count in counts[1:-1]
        ]
        return [few, *inner, *[many] * (len(counts) > 1)]

    def work(self, microbatches: int) -> Work:
        """Measured, for so many micro-batches."""
        profile = self._profile(microbatches)
        return Work(microbatches, profile.blocks, profile.ties)

    def measured(self, microbatches: int) -> bool:
        """Whether this size was."""
        return microbatches in self._profiles

    def _profile(self, microbatches: int) -> Profile:
        if microbatches not in self._profiles:
            if self.samples % microbatches:
                fitting = [count for count in range(1, self.samples + 1) if self.samples % count == 0]
                raise InputError(
                    f"microbatches={microbatches} does not cut {self.samples} samples into equal parts: choose from "
                    f"{', '.join(map(str, fitting))}, or give another batch"
                )
            size = self.samples // microbatches
            self._tell(f"measuring micro-batches of {size}")
            self._profiles[microbatches] = profile_model(self._model, self._example, microbatch=size, **self._options)
        return self._profiles[microbatches]


def batch_size(model: Any, example: Any, target: Any, dims: Mapping[str, int | None]) -> int:
    """Samples of an example batch. Raises InputError where sizes or names disagree."""
    from stageflow.runtime.batch import cut_batch
    from stageflow.split.request import as_call
    from stageflow.split.signature import positional_names

    args, kwargs = as_call(example)
    return sum(cut_batch(args, kwargs, target, 1, dims, positional_names(model)).layout.sizes)


def counts_to_try(samples: int, devices: int) -> list[int]:
    """Numbers of micro-batches for a batch of so many samples: about one, two, four and eight per device.

    Of those that cut the batch into equal parts; one per sample where there are fewer samples than devices.
    """
    divisors = [count for count in range(1, samples + 1) if samples % count == 0]
    enough = [count for count in divisors if count >= devices] or [samples]
    return sorted({min(enough, key=lambda count: abs(count - times * devices)) for times in (1, 2, 4, 8)})


def between(small: Sequence[Block], large: Sequence[Block], share: float) -> tuple[Block, ...]:
    """Blocks of a size between two: times and activations grow in a straight line, from what a call costs anyway.

    share: 0 for the small size, 1 for the large one. Raises SplitError where the two are not the same blocks.
    """
    if [block.name for block in small] != [block.name for block in large]:
        raise SplitError("the model has other blocks for small micro-batches than for large ones: give microbatches=")
    return tuple(_mix(a, b, share) for a, b in zip(small, large, strict=True))


def _mix(small: Block, large: Block, share: float) -> Block:
    def at(low: float, high: float) -> float:
        return max(0.0, low + share * (high - low))

    again = None
    if small.recompute is not None and large.recompute is not None:
        again = at(small.recompute, large.recompute)
    changed = {name: at(getattr(small, name), getattr(large, name)) for name in _PER_SAMPLE}
    return dataclasses.replace(small, recompute=again, **changed)

"""The batches of a run, by their place, so that any of them can be had again.

What a loader draws at random depends on (seed, epoch) and nothing else: an epoch that is started again shuffles as it
did, whoever asks and whatever was drawn in between.
"""

from __future__ import annotations

import dataclasses
import logging
import random as python_random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stageflow.errors import InputError
from stageflow.runtime.random import mix

log = logging.getLogger("stageflow")

Source = Iterable[Any] | Callable[[int], Any]
_SAMPLE = 1 << 14  # elements at each end of a tensor that its fingerprint looks at


class Place(NamedTuple):
    """Which batch: the epoch, and its number in it, from 0."""

    epoch: int = 0
    batch: int = 0


class Feed:
    """Batches of a loader, in order, from any place on.

    source: something that can be iterated again and again (a DataLoader, a list), an iterator (which can't: batches
        that may be asked for again are kept), or a function from a batch's number to the batch.
    seed: of all that the source draws from the random generators of torch, numpy and Python. The generators that a
        DataLoader or its sampler bears are set from their own first seed; samplers are told the epoch.

    source: as given. place: of the batch that comes next. Raises InputError for what is no source.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        self._random: _Random | None = None
        self._drawn = Place()  # of the batch that the iterator gives next
        self._kept: deque[tuple[Place, Any]] = deque()
        self._marks: dict[Place, int] = {}
        self.place = Place()
        self._is_function = not isinstance(source, Iterable) and callable(source)
        if not self._is_function and not isinstance(source, Iterable):
            raise InputError(
                f"loader is a {type(source).__name__}; expected something that can be iterated, such as a DataLoader, "
                "or a function from a batch's number to the batch"
            )
        if isinstance(source, (str, bytes, Mapping, Tensor)):
            raise InputError(f"loader is a {type(source).__name__}, which is no sequence of batches; put it in a list")
        self.once = not self._is_function and iter(source) is source  # type: ignore[arg-type]
        self._generators = [(generator, generator.initial_seed()) for generator in _generators_of(source)]

    @property
    def endless(self) -> bool:
        """Whether there are no epochs: a function gives batches for ever."""
        return self._is_function

    def next(self) -> Any:
        """The batch at `place`, which moves on. Raises StopIteration at the end of an epoch, and moves to the next.

        Raises InputError where the source gives another batch than before for the same place.
        """
        if self._kept and self.place < self._drawn:
            batch = self._find_kept()
        else:
            try:
                batch = self._draw()
            except StopIteration:
                self.place = Place(self.place.epoch + 1)
                raise
            if self.once:
                self._kept.append((self.place, batch))
        self._compare(batch)
        self.place = Place(self.place.epoch, self.place.batch + 1)
        return batch

    def skip(self, count: int) -> None:
        """Go on by so many batches, over the ends of epochs. Raises InputError where an epoch has none."""
        if self.once or self._is_function:
            self.place = Place(self.place.epoch, self.place.batch + count)
            return
        while count > 0:
            epoch, batch = self.place
            try:
                self._draw()
            except StopIteration:
                if batch == 0:
                    raise InputError(f"the loader gave no batch in epoch {epoch}") from None
                self.place = Place(epoch + 1)
                continue
            self.place = Place(epoch, batch + 1)
            count -= 1

    def follow(self, last: Feed) -> None:
        """Go on after another feed: a function from its number, what has epochs with the next one begun."""
        if self._is_function and last._is_function:
            self.place = last.place
        elif not self.once and not self._is_function and not last._is_function:
            self.place = Place(last.place.epoch + (last.place.batch > 0))

    def seek(self, place: Place) -> None:
        """Go to a place, forwards or backwards. Raises InputError where its batch can't be had any more."""
        if self.once and place < self._drawn and (not self._kept or place < self._kept[0][0]):
            raise InputError(
                f"batch {place.batch} can't be had again: the loader is an iterator, which can't be started again, and "
                "that batch is no longer kept. Give something that can be iterated again, or a function from a batch's "
                "number to the batch"
            )
        self.place = place

    def forget(self, place: Place) -> None:
        """Nobody will seek a place before this one."""
        while self._kept and self._kept[0][0] < place:
            self._kept.popleft()
        self._marks = {at: mark for at, mark in self._marks.items() if at >= place}

    def _find_kept(self) -> Any:
        return next(batch for place, batch in self._kept if place == self.place)

    def _draw(self) -> Any:
        """The batch at `place` from the source itself."""
        if self._is_function:
            with _Random(mix(self._seed, self.place.batch)).used():
                return self.source(self.place.batch)  # type: ignore[operator]
        if self._iterator is None or self._drawn.epoch != self.place.epoch or self._drawn > self.place:
            self._open(self.place.epoch)
        while True:
            reached = self._drawn == self.place
            batch = self._advance()
            if reached:
                return batch

    def _open(self, epoch: int) -> None:
        if self.once:
            if epoch > 0:
                raise StopIteration
            self._iterator = iter(self.source)  # type: ignore[arg-type]
            self._random = _Random(mix(self._seed, epoch))
            return
        self._iterator = None  # the workers of a DataLoader end before new ones start
        for generator, first_seed in self._generators:
            generator.manual_seed(mix(first_seed, epoch))
        for teller in _tellers_of(self.source):
            teller.set_epoch(epoch)
        self._random = _Random(mix(self._seed, epoch))
        with self._random.used():
            self._iterator = iter(self.source)  # type: ignore[arg-type]
        self._drawn = Place(epoch)

    def _advance(self) -> Any:
        assert self._iterator is not None
        assert self._random is not None
        try:
            with self._random.used():
                batch = next(self._iterator)
        except BaseException as error:
            if not self.once:
                self._iterator = None  # a generator that raised gives nothing any more, as if its epoch had ended
            if not isinstance(error, StopIteration):
                raise
            if self._drawn < self.place:
                raise InputError(
                    f"the loader ended after {self._drawn.batch} batches of epoch {self._drawn.epoch}; the run is at "
                    f"batch {self.place.batch} of it: is it the loader that the run was started with?"
                ) from None
            raise
        self._drawn = Place(self._drawn.epoch, self._drawn.batch + 1)
        return batch

    def _compare(self, batch: Any) -> None:
        mark = fingerprint(batch)
        if self._marks.setdefault(self.place, mark) != mark:
            raise InputError(
                f"the loader gave another batch {self.place.batch} of epoch {self.place.epoch} when it was started "
                "again, so a run that goes on after a failure would not be the run without it. Let it draw from the "
                "generators of torch, numpy or Python that every process has, and give batches that nobody writes "
                "into; or give a function from a batch's number to the batch"
            )


def fingerprint(value: Any) -> int:
    """A number that tells two batches apart; of large tensors it looks at both ends."""
    if isinstance(value, Tensor):
        mark = zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode())
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
            for end in (flat[:_SAMPLE], flat[-_SAMPLE:]):
                mark = zlib.crc32(end.contiguous().view(torch.uint8).numpy().tobytes(), mark)
        return mark
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        ends = flat[:_SAMPLE].tobytes() + flat[-_SAMPLE:].tobytes() if value.dtype != object else b""
        return zlib.crc32(f"{value.shape} {value.dtype}".encode() + ends)
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(key), fingerprint(item)) for key, item in value.items()]).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([fingerprint(item) for item in value]).encode())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fingerprint({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, (str, bytes, int, float, type(None))):
        return zlib.crc32(repr(value).encode())
    return zlib.crc32(type(value).__qualname__.encode())


class _Random:
    """A random stream of its own in the generators of this process: torch's on the CPU, Python's, numpy's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, Any, Any] | None = None
        self._outside: tuple[Any, Any, Any] | None = None

    def used(self) -> _Random:
        return self

    def __enter__(self) -> None:
        self._outside = _take_random()
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)
            python_random.seed(self._seed)
            np.random.seed(self._seed & 0xFFFFFFFF)
        else:
            _give_random(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = _take_random()
        assert self._outside is not None
        _give_random(self._outside)


def _take_random() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), python_random.getstate(), np.random.get_state()


def _give_random(state: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(state[0])
    python_random.setstate(state[1])
    np.random.set_state(state[2])


def _generators_of(source: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers bear."""
    found: list[torch.Generator] = []
    for owner in _parts_of(source):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def _tellers_of(source: Any) -> list[Any]:
    """What wants to be told the epoch: distributed samplers, data sets that shuffle themselves."""
    found: list[Any] = []
    for owner in _parts_of(source):
        if callable(getattr(owner, "set_epoch", None)) and all(owner is not known for known in found):
            found.append(owner)
    return found


def _parts_of(source: Any) -> Sequence[Any]:
    batch_sampler = getattr(source, "batch_sampler", None)
    parts = (source, getattr(source, "dataset", None), getattr(source, "sampler", None), batch_sampler)
    return [part for part in (*parts, getattr(batch_sampler, "sampler", None)) if part is not None]

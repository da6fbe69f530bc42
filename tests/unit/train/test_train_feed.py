"""Any batch of a run can be had again, or it is said why not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from stageflow.errors import InputError
from stageflow.train.feed import Feed, Place, fingerprint

DATA = TensorDataset(torch.arange(12.0))


class Noisy:
    """Draws from every generator that a process has."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def shuffled(**options: object) -> DataLoader:
    return DataLoader(DATA, batch_size=3, shuffle=True, **options)


def with_generator() -> DataLoader:
    return shuffled(generator=torch.Generator().manual_seed(5))


def with_sampler() -> DataLoader:
    return DataLoader(DATA, batch_size=3, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(5)))


def by_number(number: int) -> torch.Tensor:
    return torch.rand(3) + number


def take(feed: Feed, count: int) -> list[int]:
    """Fingerprints of the next batches, over the ends of epochs."""
    found = []
    while len(found) < count:
        try:
            found.append(fingerprint(feed.next()))
        except StopIteration:
            continue
    return found


@pytest.mark.parametrize("make", [Noisy, shuffled, with_generator, with_sampler, lambda: by_number])
def test_from_any_place_the_same_batches_come_again(make):
    straight = take(Feed(make(), 3), 11)
    assert len(set(straight)) == 11
    feed = Feed(make(), 3)
    places = []
    for _ in range(11):
        places.append(feed.place)
        take(feed, 1)
    for start in (9, 2, 5, 0):
        random.seed(start)
        torch.manual_seed(start)  # what others draw changes nothing
        feed.seek(places[start])
        assert take(feed, 11 - start) == straight[start:]
    fresh = Feed(make(), 3)
    fresh.seek(places[6])
    assert take(fresh, 5) == straight[6:]


def test_epochs_and_seeds_differ():
    feed = Feed(shuffled(), 3)
    first, second = take(feed, 4), take(feed, 4)
    assert first != second
    assert take(Feed(shuffled(), 4), 4) != first


def test_the_callers_generators_are_left_alone():
    feed = Feed(Noisy(), 3)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(()).item(), random.random(), np.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    take(feed, 6)
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


def test_places_tell_epoch_and_batch():
    feed = Feed([1, 2], 0)
    assert feed.place == Place(0, 0)
    feed.next()
    feed.next()
    with pytest.raises(StopIteration):
        feed.next()
    assert feed.place == Place(1, 0)
    assert feed.next() == 1
    assert not feed.once
    assert not feed.endless
    assert Feed(by_number, 0).endless


def test_samplers_are_told_the_epoch():
    class Sampler:
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(12))

        def __len__(self) -> int:
            return 12

    sampler = Sampler()
    feed = Feed(DataLoader(DATA, batch_size=6, sampler=sampler), 0)
    take(feed, 5)
    feed.seek(Place(1, 1))
    take(feed, 1)
    assert sampler.told == [0, 1, 2, 1]


def test_an_iterator_is_kept_as_long_as_it_may_be_asked_for():
    feed = Feed(iter(range(100, 110)), 0)
    assert feed.once
    assert [feed.next() for _ in range(6)] == [100, 101, 102, 103, 104, 105]
    feed.seek(Place(0, 2))
    assert [feed.next() for _ in range(5)] == [102, 103, 104, 105, 106]
    feed.forget(Place(0, 4))
    feed.seek(Place(0, 4))
    assert feed.next() == 104
    with pytest.raises(InputError, match="batch 3 can't be had again: the loader is an iterator"):
        feed.seek(Place(0, 3))


def test_a_fresh_iterator_can_be_moved_forward_and_ends_once():
    feed = Feed(iter(range(5)), 0)
    feed.seek(Place(0, 3))
    assert [feed.next(), feed.next()] == [3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            feed.next()


def test_a_loader_that_gives_other_batches_again_is_found_out():
    class Odd:
        rounds = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.rounds += 1
            yield torch.ones(2)
            yield torch.full((2,), float(self.rounds))

    feed = Feed(Odd(), 0)
    feed.next(), feed.next()
    feed.seek(Place(0, 0))
    feed.next()
    with pytest.raises(InputError, match="gave another batch 1 of epoch 0"):
        feed.next()


def test_a_kept_batch_that_somebody_wrote_into_is_found_out():
    batch = torch.zeros(3)
    feed = Feed(iter([batch]), 0)
    feed.next().add_(1)
    feed.seek(Place())
    with pytest.raises(InputError, match="another batch 0"):
        feed.next()


def test_another_loader_than_the_run_had():
    feed = Feed([1, 2], 0)
    feed.seek(Place(0, 7))
    with pytest.raises(InputError, match="ended after 2 batches of epoch 0; the run is at batch 7"):
        feed.next()


@pytest.mark.parametrize("source", [5, "text", {"x": 1}, torch.ones(3), None])
def test_what_is_no_loader(source):
    with pytest.raises(InputError, match="loader is a"):
        Feed(source, 0)


@dataclass
class Pair:
    x: torch.Tensor
    y: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(10), torch.cat([torch.zeros(9), torch.ones(1)])),
        (np.zeros(3), np.ones(3)),
        ({"a": 1}, {"b": 1}),
        ((1, 2), (2, 1)),
        (Pair(torch.zeros(1), 1), Pair(torch.zeros(1), 2)),
        ("a", "b"),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    ],
)
def test_fingerprints_tell_apart(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)

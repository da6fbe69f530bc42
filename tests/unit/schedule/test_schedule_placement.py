import pytest

from stageflow.errors import InputError
from stageflow.schedule.placement import contiguous, fold, local_stages, loop, place


def test_loop_goes_round() -> None:
    assert loop(8, 4) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert loop(3, 2) == (0, 1, 0)


def test_fold_goes_there_and_back() -> None:
    assert fold(8, 4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert fold(3, 2) == (0, 1, 1)
    assert fold(10, 2) == (0, 1, 1, 0, 0, 1, 1, 0, 0, 1)


def test_contiguous_gives_first_workers_more() -> None:
    assert contiguous(8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert contiguous(7, 3) == (0, 0, 0, 1, 1, 2, 2)


def test_place_takes_a_free_placement() -> None:
    assert place([1, 0, 1], 3, 2) == (1, 0, 1)


def test_local_stages() -> None:
    assert local_stages((1, 0, 1)) == ((1,), (0, 2))


@pytest.mark.parametrize(
    ("placement", "stages", "workers", "says"),
    [
        ("loop", 2, 3, "3 workers for 2 stages.*choose from 1 to 2 workers"),
        ("loop", 2, 0, "0 workers"),
        ("ring", 2, 2, "unknown placement 'ring'; known: loop, fold, contiguous"),
        ([0, 1], 3, 2, "2 stages, but there are 3"),
        ([0, 2, 0], 3, 2, "every worker from 0 to 1"),
        ([0, 0, 0], 3, 2, "every worker from 0 to 1"),
    ],
)
def test_place_refuses(placement: object, stages: int, workers: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        place(placement, stages, workers)  # type: ignore[arg-type]

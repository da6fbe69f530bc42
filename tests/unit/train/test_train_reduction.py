"""How the losses of micro-batches make the loss of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageflow.errors import InputError
from stageflow.runtime.batch import cut_batch
from stageflow.train.reduction import check_reduction, loss_weights


def batch(rows: int, microbatches: int, target: torch.Tensor | None = None):
    return cut_batch((torch.zeros(rows, 2),), {}, torch.zeros(rows) if target is None else target, microbatches, {})


@given(rows=st.integers(1, 40), microbatches=st.integers(1, 12))
def test_the_mean_of_means_weighted_by_samples_is_the_mean_of_all(rows, microbatches):
    made = batch(rows, microbatches)
    weights = loss_weights("mean", made)
    values = torch.arange(float(rows), dtype=torch.float64).square()
    means = [part.mean() for part in values.split(made.layout.sizes)]
    assert float(sum(w * m for w, m in zip(weights, means, strict=True))) == pytest.approx(float(values.mean()))
    assert sum(weights) == pytest.approx(1.0)


def test_a_sum_counts_every_micro_batch_whole():
    assert loss_weights("sum", batch(10, 4)) == (1.0,) * 4


def test_a_function_weighs_by_what_it_finds_in_the_target():
    """Token-mean losses: a micro-batch counts by its words, not its rows."""
    target = torch.tensor([[1, 2, 3], [1, -100, -100], [-100, -100, -100], [5, 6, -100]])
    made = cut_batch((torch.zeros(4, 3),), {}, target, 2, {})
    assert loss_weights(lambda target: (target != -100).sum(), made) == (4 / 6, 2 / 6)


def test_without_a_target_it_is_given_the_models_own_arguments():
    labels = torch.tensor([[1], [1], [1], [0]])
    made = cut_batch((), {"x": torch.zeros(4, 2), "labels": labels}, None, 2, {})
    assert loss_weights(lambda kwargs: kwargs["labels"].sum(), made) == (2 / 3, 1 / 3)


def test_a_micro_batch_without_weight_is_none_of_the_batch():
    target = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert loss_weights(torch.sum, batch(4, 2, target)) == (1.0, 0.0)


@pytest.mark.parametrize("amounts", [[0, 0], [-1, 2], [float("inf"), 1], [float("nan"), 1]], ids=str)
def test_weights_that_make_no_mean_are_refused(amounts):
    given_out = iter(amounts)
    with pytest.raises(InputError, match="must be finite and >= 0, not all 0"):
        loss_weights(lambda target: next(given_out), batch(4, 2))


@pytest.mark.parametrize("amount", [None, "3 words", torch.ones(2)], ids=["none", "word", "vector"])
def test_what_is_no_number_is_refused(amount):
    with pytest.raises(InputError, match="the reduction gave .* expected its weight, a number"):
        loss_weights(lambda target: amount, batch(4, 2))


@pytest.mark.parametrize("reduction", ["average", None, 2.0])
def test_what_is_no_reduction_is_refused(reduction):
    with pytest.raises(InputError, match="expected 'mean', 'sum', or a function"):
        check_reduction(reduction)

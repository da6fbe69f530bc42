"""Cutting a batch into micro-batches and putting outputs together again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageflow.errors import InputError
from stageflow.runtime.batch import Batch, check_values, cut_batch, split_sizes
from stageflow.runtime.outputs import merge_outputs


@dataclass
class Pair:
    left: Tensor
    right: str


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_differ_by_at_most_one(size: int, parts: int) -> None:
    sizes = split_sizes(size, parts)
    assert sum(sizes) == size
    assert len(sizes) == min(size, parts)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_ten_samples_in_four_micro_batches() -> None:
    x, mask, y = torch.arange(10.0), torch.arange(20).view(10, 2), torch.arange(10)
    batch = cut_batch((x, "mode"), {"mask": mask, "scale": 0.5, "none": None}, {"label": y}, 4, {})
    assert batch.layout.sizes == (3, 3, 2, 2)
    second = batch.microbatch(1)
    assert torch.equal(second.args[0], x[3:6])
    assert second.args[1] == "mode"
    assert torch.equal(second.kwargs["mask"], mask[3:6])
    assert second.kwargs["scale"] == 0.5
    assert second.kwargs["none"] is None
    assert torch.equal(second.target["label"], y[3:6])


def test_three_samples_in_four_micro_batches_give_three() -> None:
    assert cut_batch((torch.zeros(3, 2),), {}, None, 4, {}).layout.sizes == (1, 1, 1)


def test_what_has_another_first_dimension_stays_whole() -> None:
    table = torch.zeros(5, 5)
    batch = cut_batch((torch.zeros(8, 2), table), {"scalar": torch.tensor(2.0)}, None, 4, {})
    part = batch.microbatch(2)
    assert part.args[1].shape == (5, 5)
    assert part.kwargs["scalar"] == 2.0


def test_batch_dims_by_name_and_position() -> None:
    x, square = torch.zeros(3, 8), torch.zeros(8, 8)
    batch = cut_batch((x, square), {}, None, 4, {"x": 1, "1": None}, ("x", "square"))
    part = batch.microbatch(0)
    assert part.args[0].shape == (3, 2)
    assert part.args[1].shape == (8, 8)


def test_nested_inputs_and_classes() -> None:
    batch = cut_batch((Pair(torch.arange(4), "a"), [torch.arange(4), {"deep": torch.arange(4)}]), {}, None, 2, {})
    pair, items = batch.microbatch(1).args
    assert isinstance(pair, Pair)
    assert pair.right == "a"
    assert pair.left.tolist() == [2, 3]
    assert items[1]["deep"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("args", "target", "dims", "words"),
    [
        ((torch.zeros(8, 2),), torch.zeros(7), {}, ["8 samples", "target", "(7,)"]),
        ((torch.zeros(0, 2),), None, {}, ["empty", "(0, 2)"]),
        ((torch.zeros(8, 2),), None, {"nothing": 0}, ["nothing", "batch_dims"]),
        ((torch.zeros(8, 2), torch.zeros(3, 4)), None, {"a": 0, "b": 1}, ["'b'", "(3, 4)", "size 8"]),
    ],
)
def test_bad_batches_are_refused(args, target, dims, words) -> None:
    with pytest.raises(InputError) as caught:
        cut_batch(args, {}, target, 4, dims, ("a", "b"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_batch_travels_without_what_nobody_reads() -> None:
    batch = cut_batch((torch.randn(4, 3),), {"mask": torch.ones(4, 5, dtype=torch.bool)}, torch.arange(4), 2, {})
    bundle = batch.bundle(lambda name: name.startswith("=mask"))
    assert list(bundle.tensors) == ["=mask/0"]
    back = Batch.from_bundle(bundle, torch.device("cpu"), {})
    part = back.microbatch(1)
    assert part.args[0].shape == (2, 3)
    assert part.args[0].dtype == torch.float32
    assert part.args[0].is_meta, "a stage could take the stand-in's zeros for true values"
    assert part.kwargs["mask"].all()
    assert part.target.shape == (2,)


def test_outputs_are_joined() -> None:
    parts = [
        {"logits": torch.full((n, 2), float(n)), "loss": torch.tensor(float(n)), "name": "x", "table": torch.eye(5)}
        for n in (3, 1)
    ]
    whole = merge_outputs(parts, (3, 1))
    assert whole["logits"].shape == (4, 2)
    assert whole["loss"] == pytest.approx((3 * 3 + 1) / 4)
    assert whole["name"] == "x"
    assert torch.equal(whole["table"], torch.eye(5))


def test_outputs_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InputError, match="microbatches=1"):
        merge_outputs([torch.zeros(5, 2), torch.zeros(7, 2)], (3, 1))
    with pytest.raises(InputError, match="microbatches=1"):  # padded to different lengths
        merge_outputs([torch.zeros(2, 5), torch.zeros(2, 7)], (2, 2))
    with pytest.raises(InputError, match="differ"):
        merge_outputs([{"a": 1}, {"a": 2}], (2, 2))


def test_outputs_are_joined_along_the_dimension_that_the_inputs_are_cut_along() -> None:
    x = torch.arange(48.0).reshape(8, 2, 3)
    assert torch.equal(merge_outputs([x[:, :1], x[:, 1:]], (1, 1), {1}), x)
    assert torch.equal(merge_outputs(list(x.split([3, 3, 2])), (3, 3, 2), {1}), x), "the first dimension is the batch"
    with pytest.raises(InputError, match=r"dimensions 0 and 1.*micro-batches of another size"):
        merge_outputs(list(torch.zeros(2, 4, 3).split(2, 1)), (2, 2), {1})
    with pytest.raises(InputError, match=r"cut along dimension 1: nothing to join along"):
        merge_outputs([torch.zeros(8, 3), torch.ones(8, 3)], (2, 2), {1})


def test_a_constant_output_is_not_repeated() -> None:
    table = torch.arange(16.0).reshape(8, 2)
    for dims in ({0}, {1}):
        assert torch.equal(merge_outputs([table, table.clone()], (4, 4), dims), table)
    assert torch.equal(merge_outputs([table, table + 1], (4, 4)), torch.cat([table, table + 1])), "rows of samples"


def test_what_can_not_go_to_a_worker_is_told_by_the_argument_that_holds_it() -> None:
    x = torch.ones(4, 2)
    with pytest.raises(InputError, match=r"the batch's 'names'\['a'\]\[0\] is a builtins.object"):
        cut_batch((x,), {"names": {"a": [object()]}}, None, 2, {})
    with pytest.raises(InputError, match=r"'rows' of the batch holds a nested tensor"):
        cut_batch((x,), {"rows": torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)}, None, 2, {})
    for kind, tensor in (("torch.sparse_coo", x.to_sparse()), ("meta", x.to("meta"))):
        with pytest.raises(InputError, match=rf"positional argument 0 of the batch holds a {kind} tensor"):
            check_values(cut_batch((tensor,), {}, None, 2, {}).tensors)

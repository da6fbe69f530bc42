"""The zoo itself: its models build, repeat, learn; its comparison sees what it should."""

import copy

import pytest
import torch

from zoo.entry import BATCH
from zoo.harness import Record, compare, cut, one_device
from zoo.registry import FAMILIES, ZOO

pytestmark = pytest.mark.filterwarnings("default")

FIRST_OF_EACH = [family.ENTRIES[0].name for family in FAMILIES]


@pytest.fixture(scope="module")
def record() -> Record:
    return one_device(ZOO["diamond"], steps=2)


def test_breadth() -> None:
    assert len(ZOO) >= 200
    assert all(family.ENTRIES for family in FAMILIES)


@pytest.mark.parametrize("name", FIRST_OF_EACH)
def test_model_repeats_and_is_alive(name: str) -> None:
    random_state = torch.get_rng_state()
    first = ZOO[name].build()
    assert torch.equal(torch.get_rng_state(), random_state)
    second = ZOO[name].build()
    losses = []
    for built in (first, second):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loss = built.loss(built.model(**cut(built.inputs, 4)[1]))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    gradients = [p.grad for p in first.model.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)
    assert first.model.training


@pytest.mark.parametrize("name", ["gpt2", "albert", "whisper", "messages_on_graph"])
def test_training_lowers_the_loss(name: str) -> None:
    losses = one_device(ZOO[name], steps=3).losses
    assert losses[2] < losses[0]


def test_cut_leaves_what_is_no_batch() -> None:
    deep = [{"y": torch.ones(BATCH, 2)}]
    inputs = {"x": torch.arange(BATCH), "edges": torch.zeros(2, 30), "mode": "loud", "deep": deep}
    parts = cut(inputs, 4)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(part["edges"].shape == (2, 30) and part["mode"] == "loud" for part in parts)
    assert parts[0]["deep"][0]["y"].shape == (2, 2)


def test_same_run_compares_equal(record: Record) -> None:
    compare(record, one_device(ZOO["diamond"], steps=2), tolerance=0.0)


def test_compare_names_the_worst_gradient(record: Record) -> None:
    wrong = copy.deepcopy(record)
    wrong.gradients[1]["right.wide.weight"] *= 1.001
    wrong.gradients[1]["gate.bias"] *= 1.1
    with pytest.raises(AssertionError, match=r"step 1: gradient of gate\.bias .* 2 of \d+ tensors differ"):
        compare(record, wrong)


def test_compare_sees_a_missing_gradient(record: Record) -> None:
    wrong = copy.deepcopy(record)
    wrong.gradients[0]["stem.0.weight"] = None
    with pytest.raises(AssertionError, match=r"step 0: gradient of stem\.0\.weight"):
        compare(record, wrong)


def test_compare_sees_loss_and_state(record: Record) -> None:
    wrong = copy.deepcopy(record)
    wrong.losses[0] *= 1.01
    with pytest.raises(AssertionError, match="step 0: loss"):
        compare(record, wrong)
    wrong = copy.deepcopy(record)
    wrong.state["top.0.narrow.bias"] += 0.001
    with pytest.raises(AssertionError, match=r"after training of top\.0\.narrow\.bias"):
        compare(record, wrong)
    del wrong.state["top.0.narrow.bias"]
    with pytest.raises(AssertionError, match=r"the state lacks top\.0\.narrow\.bias"):
        compare(record, wrong)

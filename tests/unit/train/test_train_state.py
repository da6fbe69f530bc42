"""A model's state as the whole model names it, from and to stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stageflow.errors import InputError
from stageflow.split import Split, split_model
from stageflow.train.state import check_state, parts_for, whole_state


class Tied(nn.Module):
    """An embedding that is also the head, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


@pytest.fixture(scope="module")
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture(scope="module")
def split(model) -> Split:
    return split_model(model, (torch.arange(5),), stages=3, boundaries=["layers.1", "norm"])


def owned(model: Tied, split: Split) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensors[name].detach().clone() for name in split.owners}


def test_what_stages_own_makes_the_models_own_state_dict(model, split):
    state = whole_state(split, owned(model, split))
    assert state.keys() == model.state_dict().keys()  # tied names too, and no buffer that is not persistent
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert state["head.weight"] is state["embed.weight"]


def test_a_state_is_taken_by_first_name(model, split):
    values = check_state(split, model.state_dict(), strict=True)
    assert "head.weight" not in values
    assert values.keys() == {name for name, info in split.tensors.items() if info.persistent}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.weight": None}, "missing: norm.weight"),
        ({"other": torch.zeros(1)}, "unknown: other"),
        ({"norm.weight": torch.zeros(3)}, r"norm.weight has shape \(4,\), given \(3,\)"),
        ({"head.weight": torch.zeros(5, 4)}, "head.weight and embed.weight are one tied tensor"),
    ],
    ids=["missing", "unknown", "shape", "tied"],
)
def test_all_that_does_not_fit_is_listed(model, split, change, words):
    state = {name: value for name, value in (model.state_dict() | change).items() if value is not None}
    with pytest.raises(InputError, match=words):
        check_state(split, state, strict=True)


def test_several_faults_are_told_at_once(split):
    with pytest.raises(InputError, match=r"missing: .*embed.weight.*; unknown: a, b; .*norm.bias has shape"):
        check_state(split, {"a": torch.zeros(1), "b": torch.zeros(1), "norm.bias": torch.zeros(9)}, strict=True)


def test_part_of_a_state_is_enough_where_that_is_wanted(split):
    values = check_state(split, {"head.weight": torch.zeros(5, 4), "other": torch.zeros(1)}, strict=False)
    assert values.keys() == {"embed.weight"}


def test_each_worker_gets_what_its_stages_hold_and_every_buffer(model, split):
    assert split.mirrors == {"embed.weight": (2,)}
    values = check_state(split, model.state_dict(), strict=True)
    first, second = parts_for(split, (0, 1, 0), values)
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert first.keys() == {"embed.weight", "layers.0.weight", "layers.0.bias", "norm.weight", "norm.bias"} | buffers
    assert second.keys() == {"layers.1.weight", "layers.1.bias"} | buffers
    assert all("embed.weight" in parts_for(split, (0, 1, 2), values)[worker] for worker in (0, 2))

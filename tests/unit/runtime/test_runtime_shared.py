"""Weights that several stages use: one owner, mirrors elsewhere, equal for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stageflow.runtime.shared import SharedWeights
from stageflow.transport.inproc import Hub


class Program:
    def __init__(self, **parameters: nn.Parameter) -> None:
        self.parameters = parameters


def weight(value: float, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value), requires_grad=trained)


def shared(programs: dict[int, Any], placement: tuple[int, ...], rank: int, **names: tuple[int, ...]) -> SharedWeights:
    """names: parameter -> its stages, the owner first."""
    owners = {name: stages[0] for name, stages in names.items()}
    mirrors = {name: stages[1:] for name, stages in names.items() if stages[1:]}
    return SharedWeights(programs, owners, mirrors, placement, rank)


def on_all(*work: Callable[[], None]) -> None:
    problems: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_copies_on_one_worker_share_their_memory_and_their_gradient():
    first, second = weight(1.0), weight(2.0)
    here = shared({0: Program(w=first), 2: Program(w=second)}, (0, 0, 0), 0, w=(0, 2))
    assert here
    assert first.data_ptr() == second.data_ptr()
    first.grad, second.grad = torch.full((2,), 3.0), torch.full((2,), 4.0)
    here.collect_gradients(None, 1, 1.0)
    assert first.grad.tolist() == [7.0, 7.0]
    assert second.grad is None


def test_one_object_in_two_stages_is_counted_once():
    only = weight(1.0)
    here = shared({0: Program(w=only), 1: Program(w=only)}, (0, 0), 0, w=(0, 1))
    only.grad = torch.full((2,), 3.0)
    here.collect_gradients(None, 1, 1.0)
    assert only.grad.tolist() == [3.0, 3.0]


def test_a_worker_that_shares_nothing_has_nothing_to_do():
    assert not shared({0: Program(w=weight(1.0))}, (0, 1, 2), 0, v=(1, 2))
    assert not shared({0: Program(w=weight(1.0))}, (0,), 0, w=(0,))


def test_a_frozen_weight_is_shared_but_sends_no_messages():
    first, second = weight(1.0, trained=False), weight(2.0, trained=False)
    here = shared({0: Program(w=first), 1: Program(w=second)}, (0, 0), 0, w=(0, 1))
    assert not here
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("without", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_gradients_meet_at_the_owner_and_values_come_back(without):
    """Three workers; stages 0 and 2 are on the first, 1 on the second, 3 on the third. Some have no gradient."""
    placement = (0, 1, 0, 2)
    parts = {0: {0: weight(1.0), 2: weight(1.0)}, 1: {1: weight(1.0)}, 2: {3: weight(1.0)}}
    hub = Hub(3)
    ends = [hub.endpoint(rank) for rank in range(3)]
    groups = [
        shared({stage: Program(w=w) for stage, w in own.items()}, placement, rank, w=(1, 0, 2, 3))
        for rank, own in parts.items()
    ]
    for rank, own in parts.items():
        for w in own.values():
            if rank not in without:
                w.grad = torch.full((2,), 10.0**rank)
    expected = sum((2.0, 10.0, 100.0)[rank] for rank in range(3) if rank not in without)

    on_all(*(lambda rank=rank: groups[rank].collect_gradients(ends[rank], 1, 5.0) for rank in range(3)))
    owner = parts[1][1]
    if expected:
        assert owner.grad is not None
        assert owner.grad.tolist() == [expected] * 2
    else:
        assert owner.grad is None
    assert all(w.grad is None for rank in (0, 2) for w in parts[rank].values())

    with torch.no_grad():
        owner.fill_(5.0)
    on_all(*(lambda rank=rank: groups[rank].spread_values(ends[rank], 1, 5.0) for rank in range(3)))
    assert {tuple(w.tolist()) for own in parts.values() for w in own.values()} == {(5.0, 5.0)}


@pytest.mark.parametrize("kinds", ["ss", "sd", "ds"])
def test_sparse_gradients_are_added_up(kinds: str):
    """As an embedding gives them: on one worker and between two."""

    def gradient(kind: str) -> torch.Tensor:
        dense = torch.tensor([0.0, 2.0])
        return dense.to_sparse() if kind == "s" else dense

    first, second = weight(1.0), weight(1.0)
    here = shared({0: Program(w=first), 1: Program(w=second)}, (0, 0), 0, w=(0, 1))
    first.grad, second.grad = gradient(kinds[0]), gradient(kinds[1])
    here.collect_gradients(None, 1, 1.0)
    assert first.grad.to_dense().tolist() == [0.0, 4.0]

    owned, mirrored = weight(1.0), weight(1.0)
    hub = Hub(2)
    sides = [
        shared({stage: Program(w=parameter)}, (0, 1), stage, w=(0, 1))
        for stage, parameter in ((0, owned), (1, mirrored))
    ]
    owned.grad, mirrored.grad = gradient(kinds[0]), gradient(kinds[1])
    on_all(*(lambda rank=rank: sides[rank].collect_gradients(hub.endpoint(rank), 1, 5.0) for rank in (0, 1)))
    assert mirrored.grad is None
    assert owned.grad.to_dense().tolist() == [0.0, 4.0]
    assert owned.grad.is_sparse == (kinds == "ss")

"""The optimizers of one worker's stages, and what an update needs to know of all of them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stageflow.errors import InputError
from stageflow.runtime.optimize import OptimizerOptions, StageOptimizer, agree, clip, squared_norm
from stageflow.transport.inproc import Hub

ADAM = partial(torch.optim.Adam, lr=0.1)


def parameters(*names: str) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(3)) for name in names}


def with_gradients(named: dict[str, nn.Parameter], scale: float = 1.0) -> None:
    for number, parameter in enumerate(named.values()):
        parameter.grad = torch.arange(3.0) * scale + number


def test_without_groups_the_optimizer_gets_a_plain_list():
    got: list[Any] = []

    def factory(given: Any) -> torch.optim.Optimizer:
        got.extend(given)
        return torch.optim.SGD(given, lr=0.1)

    named = parameters("a", "b")
    StageOptimizer(named, OptimizerOptions(factory))
    assert got == list(named.values())


@pytest.mark.parametrize("option", [[0.5, 0.9], {"low": 1}, {1, 2}, (0.5, 0.9), 0.5], ids=lambda o: type(o).__name__)
def test_options_of_any_kind_make_one_group_where_they_are_equal(option):
    def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"note": type(option)(option)} if name != "b" else {}

    optimizer = StageOptimizer(parameters("a", "b", "c"), OptimizerOptions(ADAM, parameter_groups=options))
    groups = optimizer.optimizer.param_groups
    assert [len(group["params"]) for group in groups] == [2, 1]
    assert [group.get("note") for group in groups] == [option, None]
    assert optimizer.names == ["a", "c", "b"]


def test_a_tensor_among_the_options_is_compared_by_identity():
    rate = torch.tensor(0.1)
    rates = {"a": rate, "b": rate, "c": torch.tensor(0.1)}
    chosen = OptimizerOptions(ADAM, parameter_groups=lambda name, _: {"lr": rates[name]})
    optimizer = StageOptimizer(parameters(*rates), chosen)
    assert [len(group["params"]) for group in optimizer.optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize("given", [None, 0.1, ["lr"]])
def test_groups_that_are_no_options_are_refused_with_the_name(given):
    with pytest.raises(InputError, match=r"parameter_groups gave .* for 'a'; expected its options"):
        StageOptimizer(parameters("a"), OptimizerOptions(ADAM, parameter_groups=lambda *_: given))


def test_a_factory_that_makes_no_optimizer_is_refused():
    with pytest.raises(InputError, match="optimizer= gave a list"):
        StageOptimizer(parameters("a"), OptimizerOptions(list))  # type: ignore[arg-type]


def test_state_moves_to_an_optimizer_with_other_groups():
    """As when a checkpoint is loaded into other stages: state goes by the parameter's name."""
    grouped = OptimizerOptions(ADAM, parameter_groups=lambda name, _: {"lr": 0.1 if name == "b" else 0.2})
    old = parameters("a", "b", "c")
    first = StageOptimizer(old, grouped)
    with_gradients(old)
    first.step()
    tensors, rest = first.state()
    assert tensors.keys() == {f"{name}/{key}" for name in old for key in ("step", "exp_avg", "exp_avg_sq")}

    new = {name: nn.Parameter(old[name].detach().clone()) for name in ("b", "a")}
    second = StageOptimizer(new, grouped)
    options = {name: {"lr": group["lr"]} for group in rest["groups"] for name in group["names"]}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    second.load(copies, {"state": rest["state"], "options": options, "schedulers": {}})
    for named in (old, new):
        with_gradients({name: named[name] for name in ("a", "b")}, scale=2.0)
    old["c"].grad = None
    first.step()
    second.step()
    assert all(torch.equal(new[name], old[name]) for name in new)


def test_a_learning_rate_scheduler_steps_with_the_updates():
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    named = parameters("a")
    optimizer = StageOptimizer(named, OptimizerOptions(ADAM, lr_scheduler=halving))
    rates = []
    for _ in range(3):
        with_gradients(named)
        rates += optimizer.learning_rates
        optimizer.step()
    assert rates == [0.1, 0.05, 0.025]


def test_the_norm_and_the_clipping_are_those_of_torch():
    ours, theirs = parameters("a", "b", "without"), parameters("a", "b", "without")
    for named in (ours, theirs):
        with_gradients(named)
        named["without"].grad = None
    expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    norm = squared_norm(ours.values()) ** 0.5
    assert norm == pytest.approx(float(expected))
    clip(ours.values(), norm, 1.0)
    for name in ("a", "b"):
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)
    assert squared_norm([ours["without"]]) == 0.0


def test_the_norm_and_the_clipping_of_a_sparse_gradient_are_those_of_the_dense_one():
    indices, values = torch.tensor([[2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])  # an index twice, as from micro-batches
    ours = parameters("sparse", "dense")
    with_gradients(ours)
    ours["sparse"].grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    dense = ours["sparse"].grad.to_dense()
    norm = squared_norm(ours.values()) ** 0.5
    assert norm == pytest.approx(float(torch.cat([dense, ours["dense"].grad]).norm()))
    clip(ours.values(), norm, 1.0)
    torch.testing.assert_close(ours["sparse"].grad.to_dense(), dense / (norm + 1e-6))


def test_a_norm_within_the_limit_changes_nothing():
    named = parameters("a")
    with_gradients(named)
    clip(named.values(), 0.5, 1.0)
    assert torch.equal(named["a"].grad, torch.arange(3.0))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_workers_agree_on_the_same_sum(workers):
    hub = Hub(workers)
    endpoints = [hub.endpoint(rank) for rank in range(workers)]
    sums: dict[int, float] = {}

    def work(rank: int) -> None:
        sums[rank] = agree(endpoints[rank], workers, 7, 0.1 * (rank + 1), timeout=10.0)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(sums.values())) == 1
    assert sums[0] == pytest.approx(sum(0.1 * (rank + 1) for rank in range(workers)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, "optimizer= gave a LBFGS, whose step.. can't be called without arguments"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "lr_scheduler= gave a ReduceLROnPlateau, whose"),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler= gave a NoneType, which has no step"),
    ],
)
def test_what_can_not_be_stepped_is_refused_before_any_training(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        StageOptimizer(parameters("a"), OptimizerOptions(**{"optimizer": ADAM, **options}))

"""A pipeline that follows a plan, given or its own, trains with the numbers of one device; workers are threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf
from stageflow.errors import InputError
from stageflow.plan import Block
from stageflow.plan.bounds import Bound
from stageflow.schedule import build_schedule

SAMPLES, MICROBATCHES, STEPS = 12, 6, 2
sgd = partial(torch.optim.SGD, lr=0.2)


class Tied(nn.Module):
    """Six blocks with batch norm between an embedding and a head that share their weight, and a skip over them all."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def build(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Tied:
    torch.manual_seed(7)
    return Tied(norm)


TOKENS = torch.arange(SAMPLES) % 11
TARGET = (TOKENS * 3 + 1) % 11
NAMES = ["embed", *(f"blocks.{i}" for i in range(6)), "head"]


def planned(cuts: tuple[int, ...], schedule: str, recompute: tuple[bool, ...], workers: int | None = None) -> sf.Plan:
    """A plan with given cuts, as no model of this size would get."""
    stages = len(cuts) - 1
    built = build_schedule(schedule, stages=stages, microbatches=MICROBATCHES, workers=workers)
    return sf.Plan(
        model="Tied",
        blocks=tuple(Block(name, 1.0, 2.0, 1.0, 1.0, activation=1.0, deferred=1.0, output=1.0) for name in NAMES),
        devices=(sf.Device(),) * built.n_workers,
        cuts=cuts,
        recompute=recompute,
        schedule=built,
        bound=Bound(0.0, "none", {}),
    )


def train(
    x: Tensor = TOKENS, y: Tensor = TARGET, model: nn.Module | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor], sf.Pipeline]:
    settings = {"loss": F.cross_entropy, "optimizer": sgd, "launch": "threads", "timeout": 60.0} | options
    with sf.Pipeline(model or build(), **settings) as pipe:
        losses = [pipe.train_step(x, target=y).item() for _ in range(STEPS)]
        return losses, pipe.state_dict(), pipe


@pytest.fixture(autouse=True)
def _search_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageflow.train.planned.SECONDS", 0.2)


@pytest.fixture(scope="module")
def one_device() -> tuple[list[float], dict[str, Tensor]]:
    """One stage: the same draws of dropout, and micro-batches one after the other."""
    losses, state, _ = train(stages=1, microbatches=MICROBATCHES)
    return losses, state


def same(got: tuple[list[float], dict[str, Tensor], Any], want: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-4)
    for name, value in want[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("cuts", "schedule", "recompute", "workers"),
    [
        ((0, 3, 8), "1f1b", (True, False), None),
        ((0, 1, 7, 8), "zb_h1", (False, True, False), None),
        ((0, 2, 3, 6, 8), "zb_v", (True, False, False, True), 2),
    ],
)
def test_a_plan_is_followed_and_the_numbers_stay(one_device, cuts, schedule, recompute, workers) -> None:
    plan = planned(cuts, schedule, recompute, workers)
    losses, state, pipe = train(plan=plan)
    same((losses, state, pipe), one_device)
    assert pipe.plan is plan
    assert pipe.stages == len(cuts) - 1
    assert pipe.microbatches == MICROBATCHES
    assert pipe.schedule.orders == plan.schedule.orders
    split = pipe._blueprint.split
    assert split is not None
    first = [split.layer_names(stage)[0] for stage in range(1, pipe.stages)]
    assert [name == path or name.startswith(f"{path}.") for name, path in zip(first, plan.boundaries, strict=True)]
    assert "planned: step" in pipe.describe()


def test_a_plan_made_for_the_model_is_followed(one_device) -> None:
    plan = sf.make_plan(
        build(),
        TOKENS,
        target=TARGET,
        loss=F.cross_entropy,
        devices=2,
        microbatches=MICROBATCHES,
        seconds=0.2,
        rounds=2,
    )
    same(train(plan=plan), one_device)


@pytest.mark.parametrize("options", [{"workers": 2}, {"stages": 2}, {"stages": 4, "workers": 2}, {"recompute": True}])
def test_auto_measures_plans_and_trains(one_device, options: dict[str, Any]) -> None:
    got = train(schedule="auto", microbatches=MICROBATCHES, **options)
    same(got, one_device)
    pipe = got[2]
    assert pipe.plan is not None
    assert pipe.schedule.name == pipe.plan.schedule.name
    assert pipe.stages == len(pipe.plan.stages) == options.get("stages", pipe.stages)
    assert len(pipe.plan.devices) == options.get("workers", len(pipe.plan.devices))
    assert all(pipe.plan.recompute) is options.get("recompute", False)


class SequenceFirst(nn.Module):
    """Takes (length, batch, width), gives (batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(0)


@pytest.mark.parametrize("dims", [{"x": 1}, {"0": 1}, {"x": 1, "target": 0}])
def test_auto_where_the_batch_is_not_the_first_dimension(dims: dict[str, int | None]) -> None:
    torch.manual_seed(3)
    model, x, y = SequenceFirst(), torch.randn(5, 8, 3), torch.randn(8, 3)
    options: dict[str, Any] = {"loss": F.mse_loss, "batch_dims": dims, "stages": 2, "microbatches": 4}
    got = train(x, y, model, schedule="auto", **options)
    assert got[2].plan is not None
    same(got, train(x, y, model, **options)[:2])


def test_a_target_named_in_batch_dims_does_not_hinder_predict() -> None:
    model, x = SequenceFirst(), torch.randn(5, 8, 3)
    dims = {"x": 1, "target": 0}
    with sf.Pipeline(
        model, 2, 4, schedule="auto", workers=2, loss=F.mse_loss, batch_dims=dims, launch="threads"
    ) as pipe:
        torch.testing.assert_close(pipe.predict(x), model(x).detach())


@pytest.mark.parametrize(("recompute", "wanted"), [(None, "auto"), (False, False), (True, True), ("layer", True)])
def test_auto_plans_with_the_recomputation_that_was_asked_for(
    recompute: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    make_plan = sf.make_plan

    def make(**options: Any) -> sf.Plan:
        asked.append(options["recompute"])
        return make_plan(**options)

    monkeypatch.setattr("stageflow.plan.make_plan", make)
    train(schedule="auto", stages=2, microbatches=2, recompute=recompute)
    assert asked == [wanted]


def test_before_auto_has_decided() -> None:
    with sf.Pipeline(build(), schedule="auto", workers=2, loss=F.cross_entropy, launch="threads") as pipe:
        assert pipe.microbatches == 8
        for ask in (lambda: pipe.stages, lambda: pipe.schedule):
            with pytest.raises(InputError, match="first batch is run to measure"):
                ask()
        assert pipe.plan is None
        assert "2 workers, schedule 'auto'" in str(pipe)
        assert "stages='auto'" in repr(pipe)
        pipe.train_step(TOKENS.repeat(2), target=TARGET.repeat(2))
        assert pipe.stages in (2, 4)


def test_auto_also_where_the_first_call_has_no_target() -> None:
    with sf.Pipeline(
        build(), schedule="auto", stages=2, microbatches=2, loss=F.cross_entropy, launch="threads"
    ) as pipe:
        assert pipe.predict(TOKENS).shape == (SAMPLES, 11)
        assert pipe.plan is not None


def test_auto_leaves_the_model_as_it_was() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with sf.Pipeline(model, schedule="auto", stages=2, microbatches=2, loss=F.cross_entropy, launch="threads") as pipe:
        pipe.predict(TOKENS)
        torch.testing.assert_close(pipe.state_dict(), before)
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_short_batch_gets_a_schedule_of_its_own() -> None:
    plan = planned((0, 2, 3, 6, 8), "zb_v", (False,) * 4, 2)
    with pytest.warns(UserWarning, match="gives 4 micro-batches, not 6"):
        short = train(TOKENS[:4], TARGET[:4], build(nn.LayerNorm), plan=plan)
    with pytest.warns(UserWarning, match="gives 4 micro-batches"):
        want = train(TOKENS[:4], TARGET[:4], build(nn.LayerNorm), stages=1, microbatches=MICROBATCHES)
    same(short, want[:2])


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zb_v", 4), ("interleaved_1f1b", 4)])
def test_stages_auto_are_as_many_as_the_schedule_has(schedule: str, stages: int) -> None:
    with sf.Pipeline(build(), schedule=schedule, workers=2, microbatches=2, launch="threads") as pipe:
        assert pipe.stages == stages
        assert pipe.schedule.n_workers == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 3}, "the plan has 2"),
        ({"microbatches": 5}, "the plan has 6"),
        ({"workers": 1}, "the plan has 2"),
        ({"schedule": "gpipe"}, "the plan decides that"),
        ({"schedule": "auto"}, "the plan decides that"),
        ({"boundaries": ["blocks.0"]}, "the plan decides that"),
        ({"recompute": False}, "the plan decides that"),
        ({"balance": "parameters"}, "the plan decides that"),
    ],
)
def test_what_contradicts_a_plan_is_refused(options: dict[str, Any], words: str) -> None:
    plan = planned((0, 3, 8), "1f1b", (False, False))
    with pytest.raises(InputError, match=words):
        sf.Pipeline(build(), plan=plan, **options)


def test_what_repeats_a_plan_is_not() -> None:
    plan = planned((0, 3, 8), "1f1b", (False, False))
    sf.Pipeline(build(), 2, MICROBATCHES, plan=plan, workers=2).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "plan.json"}, "read it with Plan.from_json"),
        ({"plan": 3}, "make one with make_plan"),
        ({"schedule": "auto", "boundaries": ["blocks.0"]}, "beside schedule='auto'"),
        ({"schedule": "auto", "balance": "parameters"}, "beside schedule='auto'"),
        ({"schedule": "auto", "recompute": [True, False]}, "one entry per stage beside schedule='auto'"),
        ({"stages": 2, "recompute": [True]}, "1 entries for 2 stages"),
        ({"stages": 2, "recompute": ["stage", "all"]}, "recompute='all'"),
        ({"stages": 2, "schedule": "best"}, "unknown schedule 'best'"),
    ],
)
def test_what_is_no_plan_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sf.Pipeline(build(), **options)


def test_a_plan_of_another_model_is_refused_when_it_is_split() -> None:
    plan = planned((0, 3, 8), "1f1b", (False, False))
    other = dataclasses.replace(plan, blocks=tuple(dataclasses.replace(b, name=f"x.{b.name}") for b in plan.blocks))
    with (
        sf.Pipeline(build(), plan=other, loss=F.cross_entropy, launch="threads") as pipe,
        pytest.raises(sf.StageflowError, match=r"x\.blocks\.2"),
    ):
        pipe.train_step(TOKENS, target=TARGET)


def test_schedules_that_can_only_be_simulated_are_refused() -> None:
    with pytest.raises(InputError, match="can be simulated only"):
        sf.Pipeline(build(), stages=2, microbatches=4, schedule="pipedream_2bw")

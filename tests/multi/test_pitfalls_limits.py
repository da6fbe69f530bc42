"""What pipelines are known to refuse or to choke on, and need not: odd batches, odd values, odd wiring."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from one_device import (
    MICROBATCHES,
    Call,
    Plan,
    check,
    close,
    in_stages,
    on_more_plans,
    on_plans,
    pipeline,
    plainly,
    same,
    seeded,
)
from torch import Tensor, nn

import stageflow as sf

WIDTH, SAMPLES = 6, 10


def rows(*sizes: int, columns: int = WIDTH) -> list[Call]:
    generator = torch.Generator().manual_seed(1)
    return [
        Call((torch.randn(size, columns, generator=generator),), target=torch.randn(size, 3, generator=generator))
        for size in sizes or (SAMPLES, SAMPLES)
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def chain() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(5)], nn.Linear(WIDTH, 3))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


# ------------------------------------------------------------------------------------------------------ batch sizes


@on_plans
@pytest.mark.parametrize("build", [chain, Stack])
def test_fewer_samples_than_microbatches(build: Callable[[], nn.Module], plan: Plan) -> None:
    with pytest.warns(UserWarning, match="a batch of 3 samples gives 3 micro-batches, not 4"):
        check(build, rows(SAMPLES, 3, 9), plan, F.mse_loss)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_any_number_of_microbatches_for_any_schedule(schedule: str) -> None:
    """Fewer than stages, more, no multiple of them."""
    workers = 2 if schedule in ("interleaved_1f1b", "zb_v") else 4
    for microbatches in (1, 2, 3, 5, 7):
        check(chain, rows(7, 7), (schedule, 4, workers), F.mse_loss, microbatches=microbatches)


class Reads(nn.Module):
    """Mean over a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + torch.linspace(0, 1, text.shape[1]).unsqueeze(-1)
        for block in self.blocks:
            x = block(x) - x.mean(1, keepdim=True)
        return self.leave(x).mean(1)


@on_more_plans
def test_sequences_of_other_lengths_step_by_step(plan: Plan) -> None:
    calls = [
        Call((torch.randint(11, (SAMPLES, length)),), target=torch.randn(SAMPLES, 3)) for length in (5, 9, 2, 5, 1)
    ]
    check(Reads, calls, plan, F.mse_loss)


@on_plans
def test_evaluation_before_and_between_training_in_other_sizes(plan: Plan) -> None:
    def build() -> nn.Module:
        layers = [layer for _ in range(4) for layer in (Block(), nn.BatchNorm1d(WIDTH))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    calls = rows(SAMPLES, SAMPLES)
    want = plainly(build, calls, F.mse_loss)
    fresh = seeded(build).eval()
    small, large = rows(5)[0], rows(23)[0]
    with pipeline(seeded(build), plan, F.mse_loss) as pipe:
        for call in (small, large):
            got = pipe.evaluate(*call.args, target=call.target)
            assert got.item() == pytest.approx(F.mse_loss(fresh(*call.args), call.target).item(), rel=1e-4)
        losses = []
        for call in calls:
            losses.append(pipe.train_step(*call.args, target=call.target).item())
            output = pipe.predict(*large.args)
            assert output.shape == (23, 3)
            assert not output.requires_grad
            pipe.evaluate(*small.args, target=small.target)
        assert losses == pytest.approx(want.losses, rel=1e-4)
        close(pipe.state_dict(), want.state)


class Notes(nn.Module):
    """Remembers the tensors that it made, without keeping them."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []
    alive: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        gc.collect()
        Notes.alive.append(sum(ref() is not None for ref in Notes.made))
        Notes.made.append(weakref.ref(y))
        return y


@on_plans
def test_evaluation_keeps_no_graph(plan: Plan) -> None:
    model = nn.Sequential(Block(), Notes(), nn.Tanh(), Block(), Block(), nn.Linear(WIDTH, 3))
    [call] = rows(SAMPLES)
    with pipeline(model, plan, F.mse_loss, example=call.args) as pipe:
        pipe.state_dict()  # splits, which runs the model too
        Notes.made, Notes.alive = [], []
        pipe.evaluate(*call.args, target=call.target)
    gc.collect()
    assert len(Notes.made) == MICROBATCHES
    assert all(ref() is None for ref in Notes.made)


class Large(nn.Module):
    """Gives a number to train on beside something large that nobody asked for."""

    alive: ClassVar[list[int]] = []
    made: ClassVar[list[weakref.ref[Tensor]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.body = chain()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.body(x)
        large = scores.detach().repeat(1, 50)
        Large.alive.append(sum(ref() is not None for ref in Large.made))
        Large.made.append(weakref.ref(large))
        return {"loss": scores.square().mean(), "large": large}


@on_plans
def test_a_large_output_that_nobody_asked_for_is_let_go(plan: Plan) -> None:
    with pipeline(Large(), plan, None, microbatches=6, example=rows(12)[0].args) as pipe:
        pipe.state_dict()
        Large.alive, Large.made = [], []
        pipe.train_step(*rows(12)[0].args)
        assert len(Large.alive) == 6
        assert max(Large.alive) <= 1
        gc.collect()
        assert all(ref() is None for ref in Large.made)
        assert pipe.predict(*rows(12)[0].args)["large"].shape == (12, 150)


# --------------------------------------------------------------------------------------------------- what may cross


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Letter:
    body: Tensor
    sender: str
    copies: int
    enclosed: Any = None


class Wraps(nn.Module):
    """Turns a tensor into something else, and the next one back."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(self.linear(x)))


class Unwraps(nn.Module):
    def __init__(self, unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.unwrap = unwrap
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Tensor:
        return torch.tanh(self.linear(self.unwrap(value)))


Crossing = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
CROSSINGS: dict[str, Crossing] = {
    "transposed": (lambda x: x.t(), lambda v: v.t()),
    "expanded": (lambda x: x.sum(1, keepdim=True).expand(-1, WIDTH), lambda v: v),
    "strided": (lambda x: x.repeat(1, 2)[:, ::2], lambda v: v),
    "scalar": (lambda x: (x, x.mean(), 2), lambda v: v[0] * v[1] * v[2]),
    "empty": (lambda x: [x, x[:0], x[:, :0]], lambda v: v[0] + v[1].sum() + v[2].sum()),
    "bool": (lambda x: (x, x > 0), lambda v: torch.where(v[1], v[0], 0.1 * v[0])),
    "int64": (lambda x: (x, x.argsort(1)), lambda v: v[0].gather(1, v[1])),
    "uint8": (lambda x: (x, (x > 0).to(torch.uint8)), lambda v: v[0] * v[1]),
    "bfloat16": (lambda x: x.bfloat16(), lambda v: v.float()),
    "float16": (lambda x: x.half(), lambda v: v.float()),
    "float64": (lambda x: x.double(), lambda v: v.float()),
    "complex": (lambda x: torch.complex(x, x.square()), lambda v: torch.tanh((v * v.conj() + v).real)),
    "dict": (lambda x: {"x": x, "none": None, "name": "y", "flags": {1: True}}, lambda v: v["x"] * len(v["name"])),
    "named tuple": (lambda x: Pair(x, (1.5, None)), lambda v: v.first * v.second[0]),
    "dataclass": (lambda x: Letter(x, "stage", 2, [x * 0.5]), lambda v: v.body * v.copies + v.enclosed[0]),
    "same twice": (lambda x: (x, x), lambda v: torch.sin(v[0]) + v[1].square() / 4),
    "views of one": (lambda x: x.chunk(2, 1), lambda v: torch.cat([v[1], v[0]], 1)),
}


@pytest.mark.parametrize("name", CROSSINGS)
@pytest.mark.parametrize("way", ["sequence", "blocks"])
def test_values_of_any_kind_cross(name: str, way: str) -> None:
    wrap, unwrap = CROSSINGS[name]

    class InGlue(nn.Module):
        """The values are made by the glue between blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.leave = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = unwrap(wrap(block(x)))
            return self.leave(x)

    def build() -> nn.Module:
        if way == "blocks":
            return InGlue()
        layers = [layer for _ in range(3) for layer in (Wraps(wrap), Unwraps(unwrap))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    boundaries = {"sequence": ["1", "3", "5"], "blocks": ["blocks.1", "blocks.2", "blocks.3"]}[way]
    for plan in (("1f1b", 4, 4), ("zb_h1", 4, 2)):
        check(build, rows(), plan, F.mse_loss, boundaries=boundaries)


def test_values_of_any_kind_cross_between_processes() -> None:
    """All kinds in one model."""

    def build() -> nn.Module:
        layers = [layer for wrap, unwrap in CROSSINGS.values() for layer in (Wraps(wrap), Unwraps(unwrap))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    boundaries = [str(2 * index + 1) for index in range(len(CROSSINGS))]
    plan = ("1f1b", len(CROSSINGS) + 1, 2)
    check(build, rows(), plan, F.mse_loss, boundaries=boundaries, launch="processes")


class Outputs(Stack):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {
            "dict": {"scores": y, "name": "n", "none": None, "deep": [1, {"z": y * 2}]},
            "tuple": (y, None, 3),
            "dataclass": Letter(y, "last", 1),
            "bool": (y, y > 0),
        }[self.kind]


READ: dict[str, Callable[[Any], Tensor]] = {
    "dict": lambda v: v["scores"],
    "tuple": lambda v: v[0],
    "dataclass": lambda v: v.body,
    "bool": lambda v: v[0],
}


@on_plans
@pytest.mark.parametrize("kind", READ)
def test_outputs_and_targets_of_any_kind(kind: str, plan: Plan) -> None:
    read = READ[kind]
    [call] = rows(SAMPLES)

    def loss(output: Any, target: dict[str, Any]) -> Tensor:
        assert target["kind"] == kind
        return F.mse_loss(read(output), target["rows"][0]) + (0 if target["none"] is None else 1)

    call.target = {"rows": (call.target,), "kind": kind, "none": None}
    check(lambda: Outputs(kind), [call, call], plan, loss)
    with pipeline(seeded(lambda: Outputs(kind)), plan, loss) as pipe:
        got = pipe.predict(*call.args)
    want = seeded(lambda: Outputs(kind))(*call.args)
    assert type(got) is type(want)
    torch.testing.assert_close(read(got), read(want).detach(), rtol=1e-4, atol=1e-5)
    if kind == "dict":
        assert (got["name"], got["none"], got["deep"][0]) == ("n", None, 1)


# ----------------------------------------------------------------------------------------------------------- wiring


class Skips(nn.Module):
    """A value used by two later stages, a skip over all of them, a diamond."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = a = b = torch.tanh(self.enter(x))
        for left in self.left:
            a = left(a)
        for right in self.right:
            b = right(b + first)
        return self.leave(a * b + first)


class Awkward(nn.Module):
    """A no_grad block, a module listed twice, one called repeatedly, a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.blocks = nn.ModuleList([shared, Block(), shared, Block(), Block()])
        self.again = Block()
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                scale = self.again(x).abs().amax()
            x = self.again(x) / scale
            if x.sum() > 0:
                x = x * 1.5
        return self.leave(x)


class Pairs(nn.Module):
    """An encoder read by every layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, source: Tensor, *, start: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.encoder:
            source = block(source)
        x = start
        for block in self.decoder:
            x = torch.tanh(block(x, source))
        scores = self.leave(x)
        return {"scores": scores, **({} if labels is None else {"loss": F.mse_loss(scores, labels)})}


@on_more_plans
@pytest.mark.parametrize("build", [Skips, Awkward])
def test_wiring(build: Callable[[], nn.Module], plan: Plan) -> None:
    check(build, rows(), plan, F.mse_loss)


@on_more_plans
def test_inputs_and_labels_that_only_later_stages_read(plan: Plan) -> None:
    [call] = rows(SAMPLES)
    call.kwargs = {"start": torch.randn(SAMPLES, WIDTH), "labels": call.target}
    call.target = None
    check(Pairs, [call] * 2, plan, None)


def test_inputs_that_only_later_stages_read_in_processes() -> None:
    [call] = rows(SAMPLES)
    call.kwargs = {"start": torch.randn(SAMPLES, WIDTH), "labels": call.target}
    call.target = None
    check(Pairs, [call] * 2, ("zb_h1", 3, 2), None, launch="processes")


@pytest.mark.parametrize(("stages", "workers"), [(3, 2), (5, 2), (5, 3)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_stages_that_do_not_divide_among_the_workers(schedule: str, stages: int, workers: int) -> None:
    check(chain, rows(), (schedule, stages, workers), F.mse_loss)
    check(Stack, rows(), (schedule, stages, workers), F.mse_loss)


# ------------------------------------------------------------------------------------------ buffers of unusual kinds


class Replaces(nn.Module):
    """Assigns its buffer anew instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return torch.tanh(self.linear(x - self.centre))


class HandsOut(nn.Module):
    """Gives its buffer itself to the next layer, and changes it for the next micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.centre.mul_(0.5).add_(x.mean(0))
        return torch.tanh(self.linear(x)), self.centre


class TakesIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0]) * value[1]


@on_more_plans
@pytest.mark.parametrize("recompute", [None, "stage"])
def test_buffers_that_are_assigned_anew(plan: Plan, recompute: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[Replaces() for _ in range(5)], nn.Linear(WIDTH, 3))

    check(build, rows(), plan, F.mse_loss, **({} if recompute is None else {"recompute": recompute}))


@on_more_plans
def test_a_buffer_that_is_itself_handed_on(plan: Plan) -> None:
    def build() -> nn.Module:
        return nn.Sequential(HandsOut(), TakesIn(), HandsOut(), TakesIn(), HandsOut(), TakesIn(), nn.Linear(WIDTH, 3))

    boundaries = {1: [], 2: ["3"], 3: ["1", "3"], 4: ["1", "3", "5"]}[plan[1]]
    check(build, rows(), plan, F.mse_loss, boundaries=boundaries)


def test_the_loss_and_the_whole_output_come_back() -> None:
    [call] = rows(SAMPLES)
    with pipeline(seeded(Stack), ("1f1b", 4, 4), F.mse_loss) as pipe:
        loss = pipe.train_step(*call.args, target=call.target)
        assert isinstance(pipe, sf.Pipeline)
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        output = pipe(*call.args)
        assert output.shape == (SAMPLES, 3)
    same(in_stages(Stack, [call], ("1f1b", 4, 4), F.mse_loss), plainly(Stack, [call], F.mse_loss))

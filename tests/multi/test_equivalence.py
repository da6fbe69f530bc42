"""The specification: whatever the split, schedule and launcher, the numbers are those of one device.

Each case trains a small model for three optimizer steps on the same micro-batches, once plainly and once in stages,
and compares every loss, gradient, parameter and buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf

STEPS, SAMPLES, MICROBATCHES = 3, 10, 4
SIZES = (3, 3, 2, 2)


class Tied(nn.Module):
    """Embedding and head share their weight; a mask is made in between; labels are optional."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(6))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 23, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Skips(nn.Module):
    """Values used by several later stages, a diamond, buffers that forward updates, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Tanh()) for _ in range(4))
        self.leave = nn.Linear(8, 3)
        self.down[1].requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = first = self.enter(x)
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1))
        return {"scores": self.leave(x + first) * scale, "scale": scale, "nothing": None}


def _chain() -> nn.Module:
    return nn.Sequential(
        *[layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))],
        nn.Linear(6, 3),
    )


def _cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def _mean_square(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(output["scores"], target)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor]]
CASES: dict[str, Case] = {
    "chain": (_chain, lambda: (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)), F.mse_loss),
    "tied": (Tied, lambda: (torch.randint(23, (SAMPLES, 5)), torch.randint(23, (SAMPLES, 5))), _cross_entropy),
    "skips": (Skips, lambda: (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)), _mean_square),
}
# (schedule, stages, workers)
PLANS = [
    ("gpipe", 1, 1),
    ("gpipe", 2, 2),
    ("gpipe", 4, 4),
    ("1f1b", 1, 1),
    ("1f1b", 2, 2),
    ("1f1b", 4, 4),
    ("1f1b", 3, 2),
    ("interleaved_1f1b", 4, 2),
    ("interleaved_1f1b", 6, 2),
    ("zb_h1", 1, 1),
    ("zb_h1", 2, 2),
    ("zb_h1", 4, 4),
    ("zb_h1", 3, 2),
    ("zb_h2", 2, 2),
    ("zb_v", 2, 1),
    ("zb_v", 4, 2),
]
# Further orders for the same executor, in threads only.
MORE_PLANS = [
    ("eager_1f1b", 4, 4),
    ("looped_bfs", 4, 2),
    ("interleaved_zb", 4, 2),
    ("v_half", 4, 2),
    ("v_min", 4, 2),
    ("dualpipe_v", 4, 2),
]

Numbers = dict[str, Tensor]


def _build(case: str) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    build, data, loss = CASES[case]
    torch.manual_seed(7)
    model = build()
    return model, *data(), loss


def _one_device(case: str, sizes: tuple[int, ...] = SIZES) -> tuple[list[float], Numbers, Numbers]:
    model, x, y, loss = _build(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
            part = loss(model(xs), ys) * (len(xs) / len(x))
            part.backward()
            total += part.item()
        optimizer.step()
        losses.append(total)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, {name: value.clone() for name, value in model.state_dict().items()}


def _close(want: Numbers, got: dict[str, Any]) -> None:
    assert want.keys() <= {name for name, value in got.items() if value is not None}
    largest = max(float(value.abs().max()) for value in want.values())
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=2e-5 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


def _check(case: str, launch: str, schedule: Any, stages: int, workers: int | None, **options: Any) -> None:
    losses, gradients, state = _one_device(case)
    model, x, y, loss = _build(case)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with sf.Pipeline(
        model,
        stages=stages,
        workers=workers,
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.2),
        launch=launch,
        timeout=60.0,
        **options,
    ) as pipe:
        got = [pipe.train_step(x, target=y).item() for _ in range(STEPS)]
        assert got == pytest.approx(losses, rel=1e-4)
        _close(gradients, pipe.gradients())
        _close(state, pipe.state_dict())
        assert pipe.state_dict().keys() == state.keys()
        extra = {name for name, value in pipe.gradients().items() if value is not None} - gradients.keys()
        assert not extra
    for name, value in model.state_dict().items():  # the user's model is not touched
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("launch", ["threads", "processes"])
@pytest.mark.parametrize(("schedule", "stages", "workers"), PLANS, ids=lambda value: str(value))
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_device(case: str, schedule: str, stages: int, workers: int, launch: str) -> None:
    _check(case, launch, schedule, stages, workers)


@pytest.mark.parametrize(("schedule", "stages", "workers"), MORE_PLANS, ids=lambda value: str(value))
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_device_in_every_order(case: str, schedule: str, stages: int, workers: int) -> None:
    _check(case, "threads", schedule, stages, workers)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_with_recomputation(case: str, recompute: str, schedule: str) -> None:
    _check(case, "threads", schedule, 2, 2, recompute=recompute)


def test_a_schedule_of_the_user() -> None:
    wanted = sf.Schedule.from_orders(
        [
            "0F0 0F1 2F0 0F2 2F1 2I0 0F3 2F2 2F3 2B1 0B0 0B1 2W0 2B2 2B3 0I2 0B3 0W2",
            "1F0 1F1 1F2 1F3 1B0 1B1 1I2 1W2 1B3",
        ],
        graph=sf.StageGraph(3, frozenset({(0, 1), (1, 2)})),
    )
    _check("chain", "threads", wanted, 3, None)


@pytest.mark.parametrize("launch", ["threads", "processes"])
def test_accumulation_is_the_sum_each_scaled_once(launch: str) -> None:
    model, x, y, loss = _build("chain")
    reference, *_ = _build("chain")
    for _ in range(2):
        for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
            (loss(reference(xs), ys) * (len(xs) / len(x))).backward()
    with sf.Pipeline(model, stages=2, microbatches=MICROBATCHES, loss=loss, launch=launch) as pipe:
        pipe.train_step(x, target=y, update=False)
        pipe.train_step(x, target=y, update=False)
        _close({name: p.grad for name, p in reference.named_parameters()}, pipe.gradients())
        pipe.zero_grad()
        assert all(value is None for value in pipe.gradients().values())


@pytest.mark.parametrize("case", CASES)
def test_clipping_uses_the_norm_over_all_stages(case: str) -> None:
    model, x, y, loss = _build(case)
    reference, *_ = _build(case)
    for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
        (loss(reference(xs), ys) * (len(xs) / len(x))).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    with sf.Pipeline(
        model,
        stages=4,
        microbatches=MICROBATCHES,
        loss=loss,
        launch="threads",
        optimizer=partial(torch.optim.SGD, lr=0.0),
        max_grad_norm=0.05,
    ) as pipe:
        pipe.train_step(x, target=y)
        assert pipe.last_step.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        _close({name: p.grad for name, p in reference.named_parameters() if p.grad is not None}, pipe.gradients())


def test_token_mean_over_unequal_padding() -> None:
    """The loss of the whole batch, although micro-batches hold different numbers of tokens."""

    def masked(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100)

    model, x, y, _ = _build("tied")
    reference, *_ = _build("tied")
    for row in range(SAMPLES):
        y[row, : row % 5] = -100
    want = masked(reference(x), y)
    want.backward()
    with sf.Pipeline(
        model,
        stages=2,
        microbatches=MICROBATCHES,
        loss=masked,
        launch="threads",
        reduction=lambda target: (target != -100).sum(),
    ) as pipe:
        assert pipe.train_step(x, target=y).item() == pytest.approx(want.item(), rel=1e-5)
        _close({name: p.grad for name, p in reference.named_parameters()}, pipe.gradients())


@pytest.mark.parametrize("case", CASES)
def test_evaluation_and_prediction_between_steps(case: str) -> None:
    model, x, y, loss = _build(case)
    reference, *_ = _build(case)
    reference.eval()
    with torch.no_grad():
        want = reference(x)
        number = sum(
            loss(reference(xs), ys).item() * len(xs) / len(x)
            for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True)
        )
    still = partial(torch.optim.SGD, lr=0.0)
    with sf.Pipeline(model, stages=4, microbatches=MICROBATCHES, loss=loss, launch="threads", optimizer=still) as pipe:
        assert pipe.evaluate(x, target=y).item() == pytest.approx(number, rel=1e-4)
        first = pipe.train_step(x, target=y)
        got = pipe.predict(x)
        if case == "skips":
            assert got["scale"] == 1.0
            assert got["nothing"] is None
            got, expected = got["scores"], want["scores"]
        else:
            expected = want
        # BatchNorm statistics moved by one step
        assert got.shape == expected.shape
        if case == "tied":
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        with pytest.warns(UserWarning, match="3 micro-batches, not 4"):
            assert pipe.evaluate(x[:3], target=y[:3]).isfinite()
        assert pipe.train_step(x, target=y).item() == pytest.approx(first.item(), rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_dropout_does_not_depend_on_the_number_of_stages(schedule: str) -> None:
    def run(stages: int, recompute: Any = False) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(3)
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Dropout(0.4))])
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        with sf.Pipeline(
            model,
            stages=stages,
            microbatches=4,
            schedule=schedule,
            loss=F.mse_loss,
            launch="threads",
            optimizer=partial(torch.optim.SGD, lr=0.1),
            recompute=recompute,
            seed=5,
        ) as pipe:
            losses = [pipe.train_step(x, target=y).item() for _ in range(3)]
            return losses, pipe.gradients()

    losses, gradients = run(1)
    assert len(set(losses)) == 3
    for stages, recompute in ((2, False), (4, False), (3, "stage"), (2, "layer")):
        got, other = run(stages, recompute)
        assert got == pytest.approx(losses, rel=1e-5)
        _close(gradients, other)


class OwnTarget(nn.Module):
    """Has an argument that is called target, and computes its loss from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, *, target: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if target is None else F.mse_loss(x, target)


@pytest.mark.parametrize("loss", [None, lambda output: output * 1.0])
def test_a_model_with_an_argument_called_target_gets_it(loss: Any) -> None:
    torch.manual_seed(0)
    model, x, y = OwnTarget(), torch.randn(8, 6), torch.randn(8, 6)
    want = model(x, target=y).item()
    with sf.Pipeline(model, stages=2, microbatches=4, loss=loss, launch="threads") as pipe:
        assert pipe.train_step(x, target=y).item() == pytest.approx(want, rel=1e-5)
        assert pipe.predict(x).shape == (8, 6)

"""Run by test_torchrun.py on every rank: trains in stages and compares with one device, or fails on purpose."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageflow as sf
from stageflow.errors import InputError, LaunchError, StageFailed, WorkerHung

SIZES = (3, 3, 2, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target)


def build() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(7)
    return Tied(), torch.randint(23, (10,)), torch.randint(23, (10,))


def train(folder: str) -> None:
    torch.set_num_threads(1)
    model, x, y = build()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [loss_of(reference(a), b) * (len(a) / 10) for a, b in zip(x.split(SIZES), y.split(SIZES), strict=True)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        with sf.Pipeline(
            model,
            stages=2,
            microbatches=4,
            schedule=schedule,
            loss=loss_of,
            optimizer=partial(torch.optim.SGD, lr=0.2),
            timeout=60.0,
            device=os.environ.get("STAGEFLOW_TEST_DEVICE", "cpu"),
        ) as pipe:
            assert pipe.launch == "torchrun"
            for want in losses:
                assert abs(pipe.train_step(x, target=y).item() - want) < 1e-4
            state = pipe.state_dict()
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(pipe.gradients()[name], parameter.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(pipe.predict(x), reference(x), rtol=1e-4, atol=1e-5)
            assert abs(pipe.evaluate(x, target=y).item() - loss_of(reference(x), y).item()) < 1e-4
            pipe.save(Path(folder) / schedule)
            pipe.train_step(x, target=y)
            pipe.load(Path(folder) / schedule)
            torch.testing.assert_close(pipe.state_dict()["embed.weight"], state["embed.weight"])
            assert len({event.worker for event in pipe.last_step.events}) == 2
    print("trained")


class Pair:
    """A plain object at the top of the script."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def predict(_: str) -> None:
    """Outputs of plain classes, also of one made inside a function, come to every rank."""

    @dataclasses.dataclass
    class Local:
        pair: Pair

    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Local:
            return Local(Pair(x))

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    layers = [nn.Linear(4, 4), nn.Tanh(), Wraps()]
    with sf.Pipeline(layers, stages=2, microbatches=4, timeout=30.0, boundaries=["1"]) as pipe:
        output = pipe.predict(x)
    assert type(output).__name__ == "Local"
    assert isinstance(output.pair, Pair)
    torch.testing.assert_close(output.pair.x, layers[1](layers[0](x)))
    print("predicted")


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x


def fail(_: str) -> None:
    """A forward that raises on one rank is reported on both, by name and soon; then the pipeline goes on."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Fails()]
    x = torch.randn(8, 4)
    with sf.Pipeline(layers, stages=2, microbatches=4, loss=F.mse_loss, timeout=30.0, boundaries=["2"]) as pipe:
        first = pipe.train_step(x, target=x)
        bad = x.clone()
        bad[4:] = torch.nan
        started = time.monotonic()
        with pytest.raises(StageFailed, match="not a number") as caught:
            pipe.train_step(bad, target=x)
        error = caught.value
        assert (error.worker, error.stage, error.microbatch, error.action) == (1, 1, 2, "1F2"), str(error)
        assert time.monotonic() - started < 2.0
        assert pipe.train_step(x, target=x) == first
    print("failed well")


def differ(_: str) -> None:
    """Ranks that do not run the same thing, and too many ranks, are refused on all ranks before any work."""
    width = 4 + int(os.environ["RANK"])
    for layers, stages, words in (
        ([nn.Linear(width, 4), nn.Linear(4, 4)], 2, "shapes"),
        ([nn.Linear(4, 4), nn.Linear(4, 4)], 1, "2 ranks"),
    ):
        pipe = sf.Pipeline(layers, stages=stages, loss=F.mse_loss)
        with pytest.raises(LaunchError, match=words):
            pipe.train_step(torch.randn(4, layers[0].in_features), target=torch.randn(4, 4))
        pipe.close()
    with pytest.raises(InputError, match="stages"):
        sf.Pipeline([nn.Linear(4, 4)], stages=0)
    print("refused")


class OddWithThree(nn.Module):
    """Does what it is told to on rank 0 for a batch of three, which only the example gives."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3 and os.environ["RANK"] == "0":
            self.do()
        for layer in self.layers:
            x = layer(x)
        return x


def wait(_: str) -> None:
    """Splitting may take longer than any message."""
    x = torch.randn(8, 4)
    model = OddWithThree(partial(time.sleep, 4.0))
    with sf.Pipeline(model, 2, 2, loss=F.mse_loss, timeout=6.0, example=(torch.randn(6, 4),)) as pipe:
        assert pipe.train_step(x, target=x).isfinite()
    print("waited")


def stop(folder: str) -> None:
    """A rank 0 that is stopped while it splits is found by its silence."""
    note = Path(folder) / "pid"

    def stop_here() -> None:
        if not note.exists():  # splitting runs the model more than once
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    with sf.Pipeline(OddWithThree(stop_here), 2, 2, loss=F.mse_loss, timeout=2.0, example=(torch.randn(6, 4),)) as pipe:
        started = time.monotonic()
        with pytest.raises(WorkerHung, match="no sign of life"):
            pipe.train_step(torch.randn(8, 4), target=torch.randn(8, 4))
        if os.environ["RANK"] == "1":
            assert time.monotonic() - started < 30.0
            os.kill(int(note.read_text()), signal.SIGCONT)
    print("found")


if __name__ == "__main__":
    {"train": train, "predict": predict, "fail": fail, "differ": differ, "wait": wait, "stop": stop}[sys.argv[1]](
        sys.argv[2]
    )

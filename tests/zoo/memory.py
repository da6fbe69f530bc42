"""Hand-written models that remember: buffers, attributes set in forward, lists, hooks, statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zoo.bricks import Mix, Sorter, labelled_rows, mixes
from zoo.entry import CLASSES, WIDTH, Entry, Made, classes, is_loss, pixels


class BatchStatistics(nn.Module):
    """Convolutions with BatchNorm; a dropout that the user put in eval mode inside a model in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if index == 0 else 8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8, momentum=0.3),
                nn.SiLU(),
                nn.Dropout2d(0.4),
            )
            for index in range(5)
        )
        self.outlet = nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> BatchStatistics:
        super().train(mode)
        for block in self.body:
            block[3].eval()
        return self

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for block in self.body:
            x = block(x)
        return F.cross_entropy(self.outlet(x.mean((2, 3))), labels)


class FrozenStatistics(BatchStatistics):
    """The first two BatchNorms are in eval mode: their buffers must stay as they are."""

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        for block in self.body[:2]:
            block[1].eval()
        return self


class Calm(nn.Module):
    """Divides by a slowly moving average of its input's size; counts its calls; a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()
        self.register_buffer("size", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0.7, 1.3, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.size.lerp_(x.abs().mean(0), 0.2)
            self.calls += 1
        return self.mix(x * self.table / self.size)


class MovingAverage(Sorter):
    """Blocks with buffers that forward updates and reads; a buffer of the whole model read after the last block."""

    def __init__(self) -> None:
        super().__init__([Calm() for _ in range(5)])
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        for block in self.blocks:
            x = block(x)
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return F.cross_entropy(self.outlet(x - self.centre), labels)


class Noting(Mix):
    """Keeps what it read on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.noted = torch.tanh(x)
        return super().forward(x)


class ReadsNotes(Sorter):
    """The glue reads, after the last block, tensors that blocks stored on themselves."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        for block in self.blocks:
            x = block(x)
        notes = sum(block.noted for block in self.blocks[::2])
        return F.cross_entropy(self.outlet(x + notes), labels) + 0.1 * self.blocks[1].noted.square().mean()


class Adds(Mix):
    """Appends its input to the list that it is given."""

    def forward(self, x: Tensor, trail: list[Tensor]) -> Tensor:
        trail.append(x)
        return super().forward(x)


class SharedTrail(Sorter):
    """One list goes to every block; they append to it and the glue reads it at the end."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x, trail = self.inlet(rows), []
        for block in self.blocks:
            x = block(x, trail)
        return F.cross_entropy(self.outlet(x + torch.stack(trail).mean(0)), labels)


class Keeps(Mix):
    """Writes the mean of its input into the dict that it is given and reads the entries of the blocks before."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, shelf: dict[str, Tensor]) -> Tensor:
        before = sum(shelf.values()) if shelf else 0.0
        shelf[f"from {self.number}"] = x.mean(0)
        return super().forward(x + 0.1 * before)


class SharedShelf(Sorter):
    """One dict goes to every block; each reads what the earlier ones wrote."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x, shelf = self.inlet(rows), {}
        for block in self.blocks:
            x = block(x, shelf)
        return F.cross_entropy(self.outlet(x), labels) + torch.stack(list(shelf.values())).square().mean()


class InPlace(nn.Module):
    """Residuals are added into the value itself, activations overwrite their input."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.steps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(6)
        )
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        x[:, 0].zero_()
        for step in self.steps:
            x += step(x.clone())
            x.mul_(0.9)
        return F.cross_entropy(self.outlet(x), labels)


def double(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * 1.5


def soften(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(args[0]), *args[1:])


def with_hooks() -> Made:
    """Hooks that the user registered change inputs and outputs of blocks."""
    net = Plain(mixes(6))
    net.blocks[1].register_forward_hook(double)
    net.blocks[4].register_forward_pre_hook(soften)
    net.outlet.register_forward_hook(double)
    return net, labelled_rows()


class Plain(Sorter):
    """A classifier with nothing odd about it but what is done to its modules."""


def with_parametrisations() -> Made:
    """Weights computed from other parameters before every use; spectral norm also keeps buffers."""
    net = Plain(mixes(6))
    for index, block in enumerate(net.blocks):
        norm = parametrizations.weight_norm if index % 2 else parametrizations.spectral_norm
        norm(block.wide, "weight")
    return net, labelled_rows()


class VisibleLoss(Sorter):
    """Blocks leave side losses on themselves; the model adds them up, as some routers do."""

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.inlet(rows)
        for block in self.blocks:
            x = block(x)
            block.side_loss = x.abs().mean()
        side = torch.stack([block.side_loss for block in self.blocks]).sum()
        return {"loss": F.cross_entropy(self.outlet(x), labels) + 0.02 * side, "side": side}


def images() -> dict[str, Any]:
    return {"images": pixels(12), "labels": classes()}


ENTRIES = [
    Entry("batch_statistics", "memory", lambda: (BatchStatistics(), images()), is_loss),
    Entry("frozen_statistics", "memory", lambda: (FrozenStatistics(), images()), is_loss),
    Entry("moving_average", "memory", lambda: (MovingAverage(), labelled_rows()), is_loss),
    Entry("reads_notes", "memory", lambda: (ReadsNotes([Noting() for _ in range(6)]), labelled_rows()), is_loss),
    Entry("shared_trail", "memory", lambda: (SharedTrail([Adds() for _ in range(6)]), labelled_rows()), is_loss),
    Entry("shared_shelf", "memory", lambda: (SharedShelf([Keeps(n) for n in range(6)]), labelled_rows()), is_loss),
    Entry("in_place", "memory", lambda: (InPlace(), labelled_rows()), is_loss),
    Entry("with_hooks", "memory", with_hooks, is_loss),
    Entry("with_parametrisations", "memory", with_parametrisations, is_loss),
    Entry("side_losses", "memory", lambda: (VisibleLoss(mixes(5)), labelled_rows())),
]

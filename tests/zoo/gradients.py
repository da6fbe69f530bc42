"""Hand-written models whose difficulty is the way back: frozen parts, checkpoints, functions with own backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.bricks import Mix, Reader, Sorter, attends, labelled_rows, mixes, next_token_loss, text_only
from zoo.entry import CLASSES, WIDTH, Entry, Made, is_loss


def early_half_frozen() -> Made:
    """A language model whose embedding and early blocks are frozen."""
    net = Reader(attends(6))
    for part in [net.words, *net.blocks[:3]]:
        part.requires_grad_(False)
    return net, text_only()


def late_half_frozen() -> Made:
    """Only the early half learns: gradients pass through frozen blocks."""
    net = Reader(attends(6))
    for part in [*net.blocks[3:], net.head]:
        part.requires_grad_(False)
    return net, text_only()


def only_head_trains() -> Made:
    """Everything is frozen but the last layer: early stages own nothing trainable."""
    net = Reader(attends(6))
    for part in [net.words, net.blocks]:
        part.requires_grad_(False)
    return net, text_only()


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank detour."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def low_rank_adapters() -> Made:
    """Frozen bases with adapters in the blocks; embedding, norms and head are frozen too."""
    net = Reader(attends(4))
    net.requires_grad_(False)
    for block in net.blocks:
        block.mixed = LowRank(block.mixed)
        block.feed.wide = LowRank(block.feed.wide)
    return net, text_only()


class Checkpointed(Reader):
    """Each block is recomputed in backward."""

    reentrant = False

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return next_token_loss(self.head(x), text)


class ReentrantCheckpointed(Checkpointed):
    """The older kind of checkpoint, which runs a backward inside the backward."""

    reentrant = True


class CheckpointedPairs(Sorter):
    """Checkpoints around two blocks at a time, with a value from outside among their arguments."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = start = self.inlet(rows)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):

            def both(value: Tensor, skip: Tensor, first: nn.Module = first, second: nn.Module = second) -> Tensor:
                return second(first(value) + 0.3 * skip)

            x = checkpoint(both, x, start, use_reentrant=False)
        return F.cross_entropy(self.outlet(x), labels)


class RoundThrough(torch.autograd.Function):
    """Rounds to quarters; the gradient passes as if it had not, cut off outside [-2, 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 2)


class Turned(torch.autograd.Function):
    """Passes the value and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class Quantised(Sorter):
    """Rounded activations between blocks; the last rounding must not see noise, so it only scales the loss's input."""

    def between(self, index: int, x: Tensor) -> Tensor:
        return x + 0.2 * RoundThrough.apply(x)


class Adversary(Sorter):
    """Blocks learn from a second head through a turned gradient."""

    def __init__(self) -> None:
        super().__init__(mixes(6))
        self.domain = nn.Sequential(Mix(), nn.Linear(WIDTH, 2))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x, halfway = self.inlet(rows), None
        for index, block in enumerate(self.blocks):
            x = block(x)
            halfway = x if index == 2 else halfway
        guess = self.domain(Turned.apply(halfway, 0.4))
        return F.cross_entropy(self.outlet(x), labels) + F.cross_entropy(guess, labels % 2)


class TeacherInside(nn.Module):
    """A teacher runs under no_grad inside forward; the student learns from it and from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.teacher = nn.Sequential(*mixes(3))
        self.student = nn.Sequential(*mixes(4))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        with torch.no_grad():
            wanted = self.teacher(x)
        x = self.student(x)
        return F.cross_entropy(self.outlet(x), labels) + (x - wanted).pow(2).mean()


class Detached(Sorter):
    """Some paths are cut by detach, one in the middle of the stack."""

    def between(self, index: int, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(x.detach()) if index % 2 else x


class LocalLosses(Sorter):
    """Every block is trained by its own loss alone: nothing flows back from one block to the one before."""

    def __init__(self) -> None:
        super().__init__(mixes(5))
        self.locals = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(5))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x, total = self.inlet(rows), 0.0
        for block, head in zip(self.blocks, self.locals, strict=True):
            x = block(x)
            total = total + F.cross_entropy(head(x), labels)
            x = x.detach()
        return total + F.cross_entropy(self.outlet(x), labels)


class GradientInForward(Sorter):
    """Forward itself asks for a gradient: it moves down an energy of its own, as energy models do."""

    def __init__(self) -> None:
        super().__init__(mixes(5))
        self.energy = nn.Linear(WIDTH, 1)

    def between(self, index: int, x: Tensor) -> Tensor:
        if index != 2:
            return x
        energy = torch.nn.functional.softplus(self.energy(x)).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.3 * slope


class UnusedParts(Sorter):
    """Some modules are never called, and one output is never used: their gradients stay None."""

    def __init__(self) -> None:
        super().__init__(mixes(5))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.ignored = Mix()

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.inlet(rows)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.outlet(x), labels), "ignored": self.ignored(x)}


ENTRIES = [
    *(Entry(make.__name__, "gradients", make, is_loss)
      for make in [early_half_frozen, late_half_frozen, only_head_trains, low_rank_adapters]),
    Entry("checkpointed", "gradients", lambda: (Checkpointed(attends(4)), text_only()), is_loss),
    Entry("checkpointed_reentrant", "gradients", lambda: (ReentrantCheckpointed(attends(4)), text_only()), is_loss),
    Entry("checkpointed_pairs", "gradients", lambda: (CheckpointedPairs(mixes(6)), labelled_rows()), is_loss),
    Entry("straight_through", "gradients", lambda: (Quantised(mixes(6)), labelled_rows()), is_loss),
    Entry("turned_gradient", "gradients", lambda: (Adversary(), labelled_rows()), is_loss),
    Entry("teacher_inside", "gradients", lambda: (TeacherInside(), labelled_rows()), is_loss),
    Entry("detached_paths", "gradients", lambda: (Detached(mixes(6)), labelled_rows()), is_loss),
    Entry("local_losses", "gradients", lambda: (LocalLosses(), labelled_rows()), is_loss),
    Entry("gradient_in_forward", "gradients", lambda: (GradientInForward(), labelled_rows()), is_loss),
    Entry("unused_parts", "gradients", lambda: (UnusedParts(), labelled_rows())),
]

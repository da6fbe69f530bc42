"""Ways in which values get from one part of a model to another."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replay_harness import Line, assert_same_training, cut
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stageflow.errors import SplitError

WIDTH = 8


def batches(count: int = 3, rows: int = 4) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    return [{"x": torch.randn(rows, WIDTH)} for _ in range(count)]


def square(output: Any) -> Tensor:
    return output.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(Stack):
    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return self.head(x + 0.5 * kept[0] - kept[1] * kept[2].mean())


class Reentrant(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class PairsCheckpointed(Stack):
    """Each checkpoint runs two blocks, so no cut may be between them."""

    def forward(self, x: Tensor) -> Tensor:
        def two(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return second(first(x) * 2)

        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(two, first, second, x, use_reentrant=False)
        return self.head(x)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class ReversedGradient(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _Reversed.apply(block(x))
        return self.head(x)


class Attribute(nn.Module):
    """A module that leaves a tensor lying in an attribute, which others read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(self.a(x))
        return x + self.b(self.seen)


class ReadsAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Attribute() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(block.seen.mean() for block in self.blocks)


class AppendsToList(Stack):
    class Appending(Block):
        def forward(self, x: Tensor, log: list[Tensor]) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            log.append(x.mean())
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Appending() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        log: list[Tensor] = []
        for block in self.blocks:
            x = block(x, log)
        return self.head(x) + torch.stack(log).sum()


class InPlace(Stack):
    """In-place arithmetic in glue, also through a view, and on a tensor made before the cut."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x)
            total += x
            total[:, 0].mul_(0.5)
            x = x.clone()
            x[:, :2] = 0.1
        return self.head(x + total)


class Raw(Stack):
    """Parameters used by glue, one of them at two places, and numbers taken out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.tied = self.blocks[0].inner

    def forward(self, x: Tensor) -> Tensor:
        half = self.scale[: WIDTH // 2].sum()
        for block in self.blocks:
            x = block(x) * self.scale
        x = F.linear(x, self.tied.weight) + half
        peak = x.detach().abs().max().item()
        weights = torch.tensor(x.detach().mean(0).softmax(0).tolist()) + torch.from_numpy(x.detach()[0].numpy() * 0)
        return self.head(x / peak * weights)


class Catches(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            try:
                x = x.view(3, -1, 5)
            except RuntimeError:
                x = x * 0.9
        return self.head(x)


class NoGradParts(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
            mean = self.blocks[1](x).mean()
        x = self.blocks[2](x) - mean
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[3](x)
            x = x @ x.t() @ x
        return self.head(x.float())


@dataclass
class Result:
    value: Tensor
    first: Tensor
    note: str
    more: dict[str, Any]


class Structured(Stack):
    def forward(self, x: Tensor) -> Result:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return Result(self.head(x), first, "fine", {"x": x, "list": [first.mean(), None, 3]})


class Hooked(Stack):
    """Hooks on blocks, one of which changes the block's input, one its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.blocks[2].register_forward_hook(lambda module, args, output: output - args[0].mean())


class Recurrent(nn.Module):
    """One cell, called over and over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(5):
            state = self.cell(x, state)
        return self.head(state)


class Statistics(Stack):
    """Buffers that forward replaces and changes in place; one is read by a later part."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks[0](x))
        self.count = self.count + 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + self.mean / self.count)


class Collects(Stack):
    """Hooks that gather what the blocks give, as recorders of hidden states do."""

    def forward(self, x: Tensor) -> Tensor:
        gathered: dict[int, Tensor] = {}
        hooks = [
            block.inner.register_forward_hook(lambda module, args, output, i=i: gathered.__setitem__(i, output))
            for i, block in enumerate(self.blocks)
        ]
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            for hook in hooks:
                hook.remove()
        return self.head(x) + sum(gathered.values())


class Generates(Stack):
    def forward(self, x: Tensor) -> Tensor:
        def states(x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
                yield x

        return self.head(sum(states(x)))


class Transforms(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = torch.func.vmap(lambda row: row * row.mean())(x)
        return torch.func.functional_call(self.head, dict(self.head.named_parameters()), (x,))


class Compiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)


MODELS = [
    Stack, Skips, Reentrant, PairsCheckpointed, ReversedGradient, ReadsAttributes, AppendsToList, InPlace, Raw,
    Catches, NoGradParts, Hooked, Recurrent, Statistics, Collects, Generates, Transforms,
]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_trains_as_one_device_would(kind: type[nn.Module], stages: int) -> None:
    model, data = kind(), batches()
    if kind is PairsCheckpointed and stages > 2:
        data = data[:2]
    split = cut(model, stages=stages, **data[0])
    assert_same_training(copy.deepcopy(model), split, data, square)


@pytest.mark.filterwarnings("default")  # of torch.compile's own code
def test_compiled_blocks_stay_whole() -> None:
    split = cut(Compiled(), stages=2, **batches()[0])
    assert split.layer_names(0)[0] == "blocks.0"
    assert_same_training(Compiled(), split, batches(), square)


def test_what_hides_its_code_is_refused() -> None:
    with pytest.raises(SplitError, match=r"torch\.compile"):
        cut(torch.compile(Stack(), backend="eager"), stages=2, **batches()[0])


def test_output_objects_are_the_models_own() -> None:
    model, data = Structured(), batches(1)
    split = cut(model, stages=3, **data[0])
    got, expected = Line(split).forward(**data[0]).output, model(**data[0])
    assert type(got) is Result
    assert got.note == "fine"
    assert got.more["list"][1:] == [None, 3]
    torch.testing.assert_close(got.value, expected.value)
    torch.testing.assert_close(got.first, expected.first)
    torch.testing.assert_close(got.more["list"][0], expected.first.mean())

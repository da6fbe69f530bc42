"""The split backward: I and W together give what B gives, and nothing runs twice."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stageflow.runtime.put_off import Pending, PutOff, run_pending

Build = Callable[[], tuple[nn.Module, Tensor]]


class Projected(nn.Module):
    """Its linear weight is used by hand as well, so it is complete only in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.inner(x)))


class Round(torch.autograd.Function):
    """Rounding with a straight-through gradient; counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        Round.calls += 1
        return gradient * 0.5


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Round.apply(self.inp(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return self.block(x)

        return checkpoint(run, x, use_reentrant=self.reentrant)


class Attention(nn.Module):
    def __init__(self, masked: bool, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        if not self.masked:
            return self.layer(x)
        padding = torch.zeros(x.shape[:2])
        padding[:, -1] = float("-inf")
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)


class Magnitude(nn.Module):
    """A real output of complex weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).abs()


class Mapped(nn.Module):
    """Uses its layer under torch.vmap, which takes no autograd function of the old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.layer)(x)


CASES: dict[str, Build] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 6)), torch.randn(4, 6)),
    "no bias": lambda: (nn.Linear(6, 5, bias=False), torch.randn(2, 3, 6)),
    "one row": lambda: (nn.Linear(6, 5), torch.randn(6)),
    "frozen weight": lambda: (_freeze(nn.Linear(6, 5), "weight"), torch.randn(4, 6)),
    "frozen bias": lambda: (_freeze(nn.Linear(6, 5), "bias"), torch.randn(4, 6)),
    "conv1d": lambda: (nn.Conv1d(3, 4, 3, padding=1), torch.randn(2, 3, 9)),
    "conv2d": lambda: (nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), torch.randn(2, 4, 9, 9)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, dilation=2), torch.randn(1, 2, 5, 5, 5)),
    "conv same": lambda: (nn.Conv2d(3, 3, 3, padding="same", padding_mode="reflect"), torch.randn(2, 3, 6, 6)),
    "attention": lambda: (Attention(masked=False), torch.randn(3, 5, 8)),
    "masked attention": lambda: (Attention(masked=True), torch.randn(3, 5, 8)),
    "attention, length first": lambda: (Attention(masked=False, batch_first=False), torch.randn(5, 3, 8)),
    "shared module": lambda: (Projected(), torch.randn(4, 6)),
    "custom function": lambda: (Rounded(), torch.randn(4, 6)),
    "checkpointed": lambda: (Checkpointed(reentrant=False), torch.randn(4, 6)),
    "reentrant": lambda: (Checkpointed(reentrant=True), torch.randn(4, 6)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), torch.randn(4, 6)),
    "complex": lambda: (Magnitude(nn.Linear(6, 5, dtype=torch.complex64)), torch.randn(4, 6, dtype=torch.complex64)),
    "complex conv": lambda: (
        Magnitude(nn.Conv1d(2, 3, 2, dtype=torch.complex64)),
        torch.randn(4, 2, 6, dtype=torch.complex64),
    ),
    "changed in place": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)), torch.randn(4, 3, 6)),
    "mapped": lambda: (Mapped(), torch.randn(4, 6)),
}


def _freeze(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).requires_grad_(False)
    return module


def _whole(module: nn.Module, x: Tensor, rounds: int) -> list[Tensor | None]:
    for _ in range(rounds):
        x = x.detach().requires_grad_()
        module(x).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def _split(module: nn.Module, x: Tensor, rounds: int) -> list[Tensor | None]:
    put_off = PutOff()
    put_off.install(module)
    put_off.splitting = True
    for _ in range(rounds):
        x = x.detach().requires_grad_()
        loss = module(x).square().sum()
        pending: Pending = []
        put_off.pending = pending
        loss.backward()
        put_off.pending = None
        with torch.no_grad():
            run_pending(pending)
        assert not pending
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_i_and_w_give_what_b_gives(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    other = copy.deepcopy(module)
    for want, got in zip(_whole(module, x, 2), _split(other, x, 2), strict=True):
        assert (want is None) == (got is None)
        if want is not None and got is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_linear_weights_wait_for_w() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    put_off = PutOff()
    assert put_off.install(module) == 1
    put_off.splitting = True
    loss = module(torch.randn(4, 6)).square().sum()
    put_off.pending = pending = []
    loss.backward()
    assert module[0].weight.grad is None
    assert module[0].bias.grad is None
    assert module[1].weight.grad is not None  # not splittable: whole in I
    assert len(pending) == 1


def test_whole_backward_of_a_prepared_layer() -> None:
    """A schedule may mix B with I and W; outside I the gradient is whole at once."""
    module = nn.Linear(6, 6)
    put_off = PutOff()
    put_off.install(module)
    for put_off.splitting in (False, True):
        module.weight.grad = None
        module(torch.randn(4, 6)).sum().backward()
        assert module.weight.grad is not None


def test_gradients_asked_for_inside_the_forward_are_whole() -> None:
    """A gradient penalty differentiates in the forward and again in the backward."""

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return slope.square().sum() + module(x).sum()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    other, x = copy.deepcopy(module), torch.randn(3, 4)
    penalty(module, x).backward()
    put_off = PutOff()
    put_off.install(other)
    put_off.splitting = True
    loss = penalty(other, x)
    put_off.pending = pending = []
    loss.backward()
    put_off.pending = None
    with torch.no_grad():
        run_pending(pending)
    for want, got in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("name", ["custom function", "checkpointed", "reentrant"])
def test_nothing_runs_twice(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    Round.calls = 0
    _split(module, x, 1)
    if isinstance(module, Checkpointed):
        assert module.calls == 2  # once forward, once again in I
    else:
        assert Round.calls == 1


def test_post_accumulate_hooks_fire_once_with_the_whole_gradient() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6)
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    _split(module, x, 1)
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in module.named_parameters())
    named = dict(module.named_parameters())
    for name, gradient in seen:
        torch.testing.assert_close(gradient, named[name].grad)


def test_autocast_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6)
    other = copy.deepcopy(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(x).float().square().sum()
    loss.backward()
    put_off = PutOff()
    put_off.install(other)
    put_off.splitting = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = other(x).float().square().sum()
    put_off.pending = pending = []
    loss.backward()
    put_off.pending = None
    assert pending
    with torch.no_grad():
        run_pending(pending)
    for want, got in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=2e-2, atol=1e-2)


def test_gpt2_projections_of_transformers_are_split() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    module, x = nn.Sequential(utils.Conv1D(5, 6), nn.Tanh()), torch.randn(2, 3, 6)
    other = copy.deepcopy(module)
    assert PutOff().install(copy.deepcopy(module)) == 1
    for want, got in zip(_whole(module, x, 2), _split(other, x, 2), strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_leaves_float64_alone() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(6, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    put_off = PutOff()
    put_off.install(module)
    put_off.splitting = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))


@pytest.mark.parametrize(
    "layer",
    [
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(8, 2), "in_proj_weight"),
    ],
)
def test_a_weight_made_anew_in_each_forward_is_not_put_off(layer: nn.Module) -> None:
    kind = type(layer)
    assert PutOff().install(nn.Sequential(layer)) == (1 if isinstance(layer, nn.MultiheadAttention) else 0)
    assert type(layer) is kind

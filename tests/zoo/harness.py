"""Train a zoo model on one device, and say where another run differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from zoo.entry import BATCH, Entry

# A few true gradients are 0 (a key's bias under softmax, a bias ahead of a batch norm): what is left there is rounding
# noise, so errors are relative to at least this part of the largest gradient in the model.
FLOOR = 3e-3


@dataclass
class Record:
    """What a run of some training steps left behind.

    losses: one number a step. gradients: one dict a step, by parameter name; None or absent means no gradient.
    state: the state_dict after the last step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def cut(inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Cut every tensor of batch size along dim 0 into ``count`` equal parts; all else goes to each part whole."""
    leaves, layout = tree_flatten(inputs)
    parts = [
        leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == BATCH else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten([part[index] for part in parts], layout) for index in range(count)]


def one_device(entry: Entry, steps: int = 3, microbatches: int = 4, lr: float | None = None) -> Record:
    """Plain PyTorch: gradients of the mean over micro-batches, then one step of SGD; ``steps`` times."""
    model, inputs, loss_of = entry.build()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=entry.lr if lr is None else lr)
    record = Record()
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in cut(inputs, microbatches):
            loss = loss_of(model(**part)) / microbatches
            loss.backward()
            total += loss.item()
        record.losses.append(total)
        record.gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
    record.state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return record


def compare(expected: Record, got: Record, tolerance: float = 1e-4, floor: float = FLOOR) -> None:
    """Raise AssertionError naming the first step that differs by more than ``tolerance`` and its worst tensor."""
    assert len(got.losses) == len(expected.losses), f"{len(got.losses)} steps, expected {len(expected.losses)}"
    for step, (want, have) in enumerate(zip(expected.losses, got.losses, strict=True)):
        error = abs(have - want) / max(abs(want), 1e-6)
        assert error <= tolerance, f"step {step}: loss {have!r}, expected {want!r} ({error:.1e} relative)"
        gradients = expected.gradients[step], got.gradients[step]
        _worst(f"step {step}: gradient", *gradients, tolerance=tolerance, floor=floor)
    missing = sorted(expected.state.keys() - got.state.keys())
    assert not missing, f"the state lacks {', '.join(missing[:8])}"
    _worst("after training", expected.state, got.state, tolerance=tolerance, floor=0.0)


def _worst(
    what: str,
    expected: Mapping[str, Tensor | None],
    got: Mapping[str, Tensor | None],
    *,
    tolerance: float,
    floor: float,
) -> None:
    """Compare by name; None, absent and zero are the same gradient."""
    least = floor * max((_norm(value) for value in expected.values()), default=0.0)
    names = {**expected, **got} if floor else expected
    errors = {name: _error(expected.get(name), got.get(name), least) for name in names}
    bad = sorted((name for name, error in errors.items() if not error <= tolerance), key=errors.get, reverse=True)
    if bad:
        name = bad[0]
        raise AssertionError(
            f"{what} of {name} is off by {errors[name]:.1e} relative (allowed {tolerance:.0e}); its norm is "
            f"{_norm(got.get(name)):.4g}, expected {_norm(expected.get(name)):.4g}. "
            f"{len(bad)} of {len(errors)} tensors differ: {', '.join(bad[:6])}"
        )


def _error(expected: Tensor | None, got: Tensor | None, least: float) -> float:
    if expected is None or got is None:
        there = _norm(got if expected is None else expected)
        return there and there / max(least, 1e-12)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    distance = _norm(expected.to(torch.complex128) - got.to(torch.complex128))
    error = distance / max(_norm(expected), least, 1e-12)
    return error if error == error else float("inf")


def _norm(value: Tensor | None) -> float:
    return 0.0 if value is None else torch.linalg.vector_norm(value.to(torch.complex128)).item()


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()

"""Trains a model plainly and in stages, for tests that compare the two."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import stageflow as sf

MICROBATCHES = 4
# schedule, stages, workers
PLANS = [("1f1b", 1, 1), ("1f1b", 4, 4), ("zb_h1", 2, 2), ("zb_h1", 4, 4)]
MORE_PLANS = [*PLANS, ("zb_v", 4, 2), ("1f1b", 3, 2)]  # several stages on one worker, evenly and not

sgd = partial(torch.optim.SGD, lr=0.1)

Plan = tuple[str, int, int]


def _over(plans: Sequence[Plan]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test that takes a ``plan`` with each of them, as one test: looking for leaks takes longer than a case."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for plan in plans:
                try:
                    test(plan=plan, **arguments)
                except BaseException as error:
                    error.add_note("with schedule, stages, workers = {}, {}, {}".format(*plan))
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "plan"]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


on_plans = _over(PLANS)
on_more_plans = _over(MORE_PLANS)


@dataclass
class Call:
    """What one train_step is given."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    update: bool = True

    def cut(self, parts: int) -> list[tuple[int, Call]]:
        """(samples, share) of each micro-batch: sizes differ by at most one, larger ones first."""
        leaves = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        size = len(leaves[0])
        sizes = [size // parts + (i < size % parts) for i in range(parts) if size // parts + (i < size % parts)]

        def share(start: int, length: int) -> Call:
            def of(leaf: Any) -> Any:
                cuttable = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size
                return leaf[start : start + length] if cuttable else leaf

            return Call(tree_map(of, self.args), tree_map(of, self.kwargs), tree_map(of, self.target))

        return [(length, share(sum(sizes[:i]), length)) for i, length in enumerate(sizes)]


@dataclass
class Numbers:
    """Losses of all steps, gradients of the last one, and the state afterwards."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def seeded(build: Callable[[], Any], seed: int = 7) -> Any:
    """What ``build`` makes from a fixed state of the random generator."""
    torch.manual_seed(seed)
    return build()


def plainly(
    build: Callable[[], nn.Module],
    calls: Sequence[Call],
    loss: Callable[..., Tensor] | None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    microbatches: int = MICROBATCHES,
    max_grad_norm: float | None = None,
) -> Numbers:
    """One device, the same micro-batches; the loss is their mean, weighted by samples."""
    model = seeded(build)
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    fresh = True
    for call in calls:
        if fresh:
            stepper.zero_grad()
        shares = call.cut(microbatches)
        samples = sum(size for size, _ in shares)
        total = 0.0
        for size, share in shares:
            output = model(*share.args, **share.kwargs)
            part = (output["loss"] if loss is None else loss(output, share.target)) * (size / samples)
            part.backward()
            total += part.item()
        losses.append(total)
        if call.update:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            stepper.step()
        fresh = call.update
    return Numbers(losses, {name: p.grad for name, p in model.named_parameters()}, dict(model.state_dict()))


def pipeline(model: Any, plan: Plan, loss: Callable[..., Tensor] | None, **options: Any) -> sf.Pipeline:
    """A pipeline of threads."""
    schedule, stages, workers = plan
    settings = {"microbatches": MICROBATCHES, "optimizer": sgd, "launch": "threads", "timeout": 30.0} | options
    return sf.Pipeline(model, stages=stages, workers=workers, schedule=schedule, loss=loss, **settings)


def in_stages(
    build: Callable[[], nn.Module],
    calls: Sequence[Call],
    plan: Plan,
    loss: Callable[..., Tensor] | None,
    **options: Any,
) -> Numbers:
    """The same in a pipeline."""
    with pipeline(seeded(build), plan, loss, **options) as pipe:
        losses = [
            pipe.train_step(*call.args, target=call.target, update=call.update, **call.kwargs).item() for call in calls
        ]
        return Numbers(losses, pipe.gradients(), pipe.state_dict())


def close(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The same names, the same ones absent, the same values to 1e-4 (absolute: of the largest value)."""
    assert got.keys() == want.keys()
    assert {name for name, value in got.items() if value is None} == {n for n, value in want.items() if value is None}
    largest = max((float(v.abs().max()) for v in want.values() if v is not None and v.numel()), default=0.0)
    for name, value in want.items():
        if value is not None:
            assert got[name].dtype == value.dtype, name
            torch.testing.assert_close(
                got[name], value, rtol=1e-4, atol=2e-5 * largest, msg=lambda text, name=name: f"{name}: {text}"
            )


def same(got: Numbers, want: Numbers) -> None:
    assert got.losses == pytest.approx(want.losses, rel=1e-4)
    close(got.gradients, want.gradients)
    close(got.state, want.state)


def check(
    build: Callable[[], nn.Module],
    calls: Sequence[Call],
    plan: Plan,
    loss: Callable[..., Tensor] | None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    microbatches: int = MICROBATCHES,
    max_grad_norm: float | None = None,
    **options: Any,
) -> None:
    """Train both ways and compare everything."""
    shared: dict[str, Any] = {"optimizer": optimizer, "microbatches": microbatches, "max_grad_norm": max_grad_norm}
    same(in_stages(build, calls, plan, loss, **shared, **options), plainly(build, calls, loss, **shared))

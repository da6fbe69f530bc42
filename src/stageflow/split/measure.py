"""How long layers take, measured without leaving a trace in the model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import FrameError
from stageflow.transport.structure import flatten, unflatten

ROUNDS = 5
SLOW_ROUND = 2.0  # seconds; a model that takes longer is measured fewer times
SAME_KIND_TOLERANCE = 0.25


@contextmanager
def undisturbed(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Put buffers, random state and train/eval flags back as they were.

    training: the mode to be in meanwhile; None leaves it.
    """
    buffers = [(m, name, b, _copy(b)) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    flags = [(module, module.training) for module in model.modules()]
    devices = sorted({b.device.index or 0 for b in (*model.parameters(), *model.buffers()) if b.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            if training is not None:
                model.train(training)
            yield
    finally:
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            if values is not None:
                buffer.detach().copy_(values)
        for module, flag in flags:
            module.training = flag


def _copy(buffer: Tensor) -> Tensor | None:
    return None if buffer.is_meta else buffer.detach().clone()


def timed(
    call: Callable[[Any], Any], value: Any, parameters: Iterable[Tensor], needs_input_grad: bool
) -> tuple[float, Any]:
    """Seconds of one forward and backward of ``call(value)``, and the detached result.

    Gradients are asked for, not accumulated, so that no ``.grad`` changes and no hook on a parameter runs. A value
    that has no plain form is handed on as it is, and its gradients are left out of the time.
    """
    tensors, rebuild = _take_apart(value)
    leaves = {name: _leaf(t, needs_input_grad) for name, t in tensors.items()}
    # Copies, because a layer may change its input in place, which a leaf does not allow.
    entry = rebuild({name: t.clone() if t.requires_grad else t for name, t in leaves.items()})
    wanted = [t for t in (*leaves.values(), *parameters) if t.requires_grad]
    start = _now(wanted)
    outputs, rebuild = _take_apart(call(entry))
    roots = [t for t in outputs.values() if t.requires_grad and t.numel()]
    if roots and wanted:
        forward = _now(wanted) - start
        try:
            torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
        except RuntimeError:  # re-entrant checkpoints refuse to be asked: a forward once more, and twice that
            start -= 3 * forward
    seconds = _now(wanted) - start
    return seconds, rebuild({name: t.detach() for name, t in outputs.items()})


def _take_apart(value: Any) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Any]]:
    classes: dict[str, type] = {}
    try:
        tensors, meta = flatten(value, classes)
    except FrameError:
        return {}, lambda _: value
    return tensors, lambda changed: unflatten(meta, changed, classes)


def _leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(needs_grad and differentiable)


def _now(tensors: Sequence[Tensor]) -> float:
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def smooth(samples: Sequence[Sequence[float]], kinds: Sequence[object]) -> list[float]:
    """One cost per layer from its samples, in seconds.

    kinds: layers of equal kind should take equally long. Where a layer's own median is near the median of its kind,
    the kind's is taken: on a noisy machine twelve equal blocks would otherwise be cut unequally.
    """
    by_kind: dict[object, list[float]] = defaultdict(list)
    for layer, kind in zip(samples, kinds, strict=True):
        by_kind[kind].extend(layer)
    costs = []
    for layer, kind in zip(samples, kinds, strict=True):
        own, common = median(layer), median(by_kind[kind])
        costs.append(common if abs(own - common) <= SAME_KIND_TOLERANCE * common else own)
    return costs

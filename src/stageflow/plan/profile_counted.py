"""Counting what blocks cost on an accelerator that is not at hand.

Shapes run through the code on the meta device, without values; where the code asks for values, it is run on the CPU
instead, for what it computes and not for how long it takes. Every operation takes as long as its floating-point
operations at the accelerator's rate or its bytes at the memory's, whichever is longer (the roofline, Williams et al.
2009), over an efficiency below one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stageflow.errors import InputError, SplitError
from stageflow.plan.devices import Accelerator, accelerator
from stageflow.plan.partition import Block, Tie
from stageflow.plan.profile import Profile
from stageflow.plan.profile_measured import SPLIT, Line, find_ties, make_blocks, own_chance
from stageflow.plan.profile_pieces import outline, take_apart
from stageflow.plan.profile_settings import Settings, first_microbatch, moved
from stageflow.runtime.batch import MicroBatch
from stageflow.split import ModelLike
from stageflow.split.deferred import as_model

META, CPU = torch.device("meta"), torch.device("cpu")


class Roofline(TorchDispatchMode):
    """A clock that every operation moves on by what it would take on an accelerator."""

    def __init__(self, on: Accelerator, efficiency: float) -> None:
        super().__init__()
        self.seconds = 0.0
        self._on = on
        self._efficiency = efficiency

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if tensors and not func.is_view:
            self.seconds += self._seconds(func, args, kwargs, result, tensors)
        return result

    def _seconds(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]) -> float:
        count: Callable[..., int] | None = flop_registry.get(_counted_as(func._overloadpacket))
        operations = 0 if count is None else count(*args, **kwargs, out_val=result)
        itemsize = max(t.dtype.itemsize for t in tensors if t.is_floating_point()) if operations else 4
        unique = {id(tensor): tensor.nbytes for tensor in tensors}
        computing = operations / self._on.rate(itemsize)
        moving = sum(unique.values()) / self._on.bandwidth
        return max(computing, moving) / self._efficiency


def _counted_as(packet: Any) -> Any:
    """The operator by which torch counts: addmm for addmm_, attention on the CPU as that on accelerators."""
    name = packet.__name__.removesuffix("_").replace("_for_cpu", "")
    return getattr(torch.ops.aten, name, packet)


class _Fused(TorchFunctionMode):
    """Attention as accelerators do it: on the meta device torch spells it out, with all its scores in memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    bias = None
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        bias = attn_mask.to(query.dtype).expand(shape)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


class _CountedLine(Line):
    """Blocks whose time is what the roofline says."""

    optional = (SPLIT,)
    clock: Roofline | None = None

    def _now(self) -> float:
        return self.clock.seconds if self.clock is not None else 0.0

    def count_time(self, clock: Roofline) -> dict[str, list[float]]:
        """Seconds of F, B, I and W, per block; recomputation takes another F."""
        self.clock = clock
        times: dict[str, list[float]] = {}
        with clock:
            for ways in self._steps:
                times |= self._step(ways)
        times.pop("", None)
        return self._completed(times)


def count(model: ModelLike, example: Any, settings: Settings, on: Accelerator | str, efficiency: float) -> Profile:
    """See `profile_model`."""
    target = accelerator(on)
    if not 0.0 < efficiency <= 1.0:
        raise InputError(f"efficiency must be above 0 and at most 1, got {efficiency}")
    if settings.autocast is not None:
        raise InputError("what autocast does can't be counted without values: give dtype= instead")
    microbatch, samples = first_microbatch(model, example, settings)
    clock = Roofline(target, efficiency)
    with own_chance():
        try:
            name, way, blocks, ties = _count(_outline(model), microbatch, META, settings, clock)
        except (SplitError, RuntimeError):  # torch's many words for "there are no values"
            name, way, blocks, ties = _count(model, microbatch, CPU, settings, clock)
    return Profile(
        model=name,
        way=way,
        blocks=tuple(blocks),
        ties=tuple(ties),
        device=f"{target.name} at {efficiency:.0%} of its roofline",
        measured=False,
        samples=samples,
        rounds=0,
        threads=0,
    )


def _count(
    model: ModelLike, microbatch: MicroBatch, device: torch.device, settings: Settings, clock: Roofline
) -> tuple[str, str, list[Block], list[Tie]]:
    given = moved(microbatch, device, None)
    name, split = take_apart(model, (given.args, given.kwargs), settings.split, settings.at_least)
    with _Fused() if device == META else nullcontext():
        line = _CountedLine(split, device, moved(given, device, settings.dtype), settings)
        sizes = line.count()
        times = line.count_time(clock)
    return name, split.way, list(make_blocks(split, line.programs, sizes, times, settings)), list(find_ties(split))


def _outline(model: ModelLike) -> nn.Module:
    if isinstance(model, (nn.Module, Sequence)):
        return outline(as_model(model))
    with META:
        return outline(as_model(model()))

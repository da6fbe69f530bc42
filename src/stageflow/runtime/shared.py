"""Weights that several stages use: one owner, mirrors elsewhere, equal for ever.

After the last backward each mirror's gradient goes to the owner, which adds it to its own; after the update the new
value goes back. Copies on one worker share their memory, so only other workers get messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stageflow.graph import Bundle, StageProgram
from stageflow.transport.base import Endpoint, Tag


@dataclass(frozen=True)
class _SharedWeight:
    """One weight, seen from a worker. copies: here, the owner's first. owner: its worker. workers: all with a copy."""

    name: str
    copies: list[nn.Parameter]
    owner: int
    workers: tuple[int, ...]


class SharedWeights:
    """All weights of one worker that also live in other stages."""

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        owners: Mapping[str, int],
        mirrors: Mapping[str, tuple[int, ...]],
        placement: Sequence[int],
        rank: int,
    ) -> None:
        self._rank = rank
        self._weights: list[_SharedWeight] = []
        for name, stages in mirrors.items():
            holders = [owners[name], *stages]
            here = (programs[stage].parameters[name] for stage in holders if stage in programs)
            copies = list({id(copy): copy for copy in here}.values())  # stages that travelled together share it already
            if not copies:
                continue
            for copy in copies[1:]:
                copy.data = copies[0].data
            if copies[0].requires_grad:
                workers = tuple(sorted({placement[stage] for stage in holders}))
                self._weights.append(_SharedWeight(name, copies, placement[owners[name]], workers))

    def __bool__(self) -> bool:
        return bool(self._weights)

    def collect_gradients(self, endpoint: Endpoint | None, step: int, timeout: float) -> None:
        """Move every gradient to the owner's copy; all other copies have none afterwards."""
        outgoing: dict[int, dict[str, Tensor]] = {}
        for weight in self._weights:
            first, *others = weight.copies
            for copy in others:
                if copy.grad is not None:
                    first.grad = copy.grad if first.grad is None else _sum(first.grad, copy.grad)
                    copy.grad = None
            if weight.owner != self._rank:
                bundle = outgoing.setdefault(weight.owner, {})
                if first.grad is not None:
                    bundle.update(_packed(weight.name, first.grad))
                    first.grad = None
        for owner, gradients in outgoing.items():
            assert endpoint is not None
            endpoint.send(owner, Tag(step, "M", self._rank, owner, 0), Bundle(gradients))
        self._add_from_mirrors(endpoint, step, timeout)

    def _add_from_mirrors(self, endpoint: Endpoint | None, step: int, timeout: float) -> None:
        own = {weight.name: weight for weight in self._weights if weight.owner == self._rank}
        sources = sorted({worker for weight in own.values() for worker in weight.workers} - {self._rank})
        for source in sources:
            assert endpoint is not None
            gradients = endpoint.recv(Tag(step, "M", source, self._rank, 0), timeout).tensors
            for name, weight in own.items():
                parameter = weight.copies[0]
                here = _unpacked(name, gradients, parameter)
                if here is not None:
                    parameter.grad = here.clone() if parameter.grad is None else _sum(parameter.grad, here)

    def spread_values(self, endpoint: Endpoint | None, step: int, timeout: float) -> None:
        """Send the owner's value to all mirrors; after an update or a load."""
        outgoing: dict[int, dict[str, Tensor]] = {}
        sources: set[int] = set()
        for weight in self._weights:
            if weight.owner == self._rank:
                for worker in weight.workers:
                    if worker != self._rank:
                        outgoing.setdefault(worker, {})[weight.name] = weight.copies[0].detach()
            else:
                sources.add(weight.owner)
        for worker, values in outgoing.items():
            assert endpoint is not None
            endpoint.send(worker, Tag(step, "V", self._rank, worker, 0), Bundle(values))
        here = {weight.name: weight.copies[0] for weight in self._weights}
        with torch.no_grad():
            for source in sorted(sources):
                assert endpoint is not None
                for name, value in endpoint.recv(Tag(step, "V", source, self._rank, 0), timeout).tensors.items():
                    here[name].copy_(value)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Into the first, unless that is sparse and the other not."""
    return other + one if one.is_sparse and not other.is_sparse else one.add_(other)


def _packed(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """A gradient as dense tensors, which can travel; that of an embedding may be sparse."""
    if not gradient.is_sparse:
        return {name: gradient}
    gradient = gradient.coalesce()
    return {f"{name}/indices": gradient.indices(), f"{name}/values": gradient.values()}


def _unpacked(name: str, tensors: Mapping[str, Tensor], parameter: nn.Parameter) -> Tensor | None:
    """What `_packed` made of a gradient, on the parameter's device; None where none came."""
    if f"{name}/indices" in tensors:
        indices, values = (tensors[f"{name}/{part}"].to(parameter.device) for part in ("indices", "values"))
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False, is_coalesced=True)
    return tensors[name].to(parameter.device) if name in tensors else None

"""One stage of a replayed model, as it travels to its worker."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.graph import StageProgram, StageSpec
from stageflow.split.deferred import DeferredModel
from stageflow.split.replay.ghost import Ghost
from stageflow.split.replay.part import Part
from stageflow.split.replay.program import ReplayProgram
from stageflow.split.travel import needs_packing, pack, unpack


@dataclass
class ReplaySpec(StageSpec):
    """The whole model, in which all weights that this stage does not use are ghosts.

    model: or the recipe for it.
    held: the parameters and buffers that are real here, by the names they are owned under.
    first_names: further names of tied tensors -> the name they are owned under.
    without_cache: the model's key-value cache is switched off.
    """

    index: int
    part: Part
    model: nn.Module | DeferredModel
    held: frozenset[str]
    first_names: dict[str, str]
    without_cache: bool = False

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.model, nn.Module) and needs_packing(self.model):
            state["model"] = pack(self.model)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.model, bytes):
            self.model = unpack(self.model)

    def build(self, device: torch.device, dtype: torch.dtype | None = None) -> StageProgram:
        model = self.model
        if isinstance(model, DeferredModel):
            model = model.materialise(self.held)
            haunt(model, self.held, self.first_names, device)
        if self.without_cache:
            switch_cache_off(model)
        _move(model, device, dtype)
        return ReplayProgram(self.part, model, self.first_names, device)


def haunt(model: nn.Module, held: AbstractSet[str], first_names: Mapping[str, str], device: torch.device) -> None:
    """Put ghosts in the place of all parameters and buffers that are not held."""
    ghosts: dict[int, Ghost] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for last, tensor in table.items():
                name = f"{path}.{last}" if path else last
                name = first_names.get(name, name)
                if tensor is None or name in held or isinstance(tensor, Ghost):
                    continue
                if id(tensor) not in ghosts:
                    ghosts[id(tensor)] = Ghost.of(f"s:{name}", tensor, device)
                table[last] = ghosts[id(tensor)]  # type: ignore[assignment]


def switch_cache_off(model: nn.Module) -> bool:
    """Switch the key-value cache of transformers models off; whether there was one.

    Training has no use for it, and it would tie all layers together by one object.
    """
    found = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
            found = True
    return found


def _move(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move and convert what is real; make the ghosts anew, which can't be changed."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                wanted = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
                if tensor.device == device and tensor.dtype == wanted:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _moved(tensor, device, wanted)
                table[name] = moved[id(tensor)]  # type: ignore[assignment]


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, Ghost):
        return Ghost.of(tensor.key, tensor, device, dtype)
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device, dtype)
        return tensor
    return tensor.to(device, dtype)

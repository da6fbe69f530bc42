"""The optimizers of one worker's stages, and what an update needs to know of all stages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stageflow.errors import InputError
from stageflow.graph import Bundle
from stageflow.runtime.schedulers import join
from stageflow.transport.base import Endpoint, Tag

OptimizerFactory = Callable[[Any], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
GroupOptions = Callable[[str, nn.Parameter], Mapping[str, Any]]


@dataclass(frozen=True)
class OptimizerOptions:
    """optimizer: makes one from parameters or parameter groups. lr_scheduler: makes one for an optimizer.
    parameter_groups: name, parameter -> that parameter's own options (lr, weight_decay, ...).
    max_grad_norm: clip to this norm over all stages.
    """

    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    parameter_groups: GroupOptions | None = None
    max_grad_norm: float | None = None


class StageOptimizer:
    """The optimizer and learning-rate scheduler of one stage's own trainable parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: OptimizerOptions) -> None:
        """parameters: by original name, at least one."""
        assert options.optimizer is not None
        groups = _grouped(parameters, options.parameter_groups)
        self.names = [name for names, _ in groups for name in names]
        arguments: Any = [{"params": [parameters[name] for name in names], **chosen} for names, chosen in groups]
        if options.parameter_groups is None:
            arguments = list(parameters.values())
        self.optimizer = options.optimizer(arguments)
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                f"optimizer= gave a {type(self.optimizer).__name__}; expected a function that takes parameters and "
                "returns a torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
            )
        _check_step(self.optimizer, "optimizer")
        self.scheduler = options.lr_scheduler(self.optimizer) if options.lr_scheduler else None
        if options.lr_scheduler is not None:
            _check_step(self.scheduler, "lr_scheduler")

    def step(self) -> None:
        """One update, and one step of the learning-rate scheduler."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors named ``parameter/key``, plain rest: other state, groups with names, the scheduler's state)."""
        raw = self.optimizer.state_dict()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for index, values in raw["state"].items():
            name = self.names[index]
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    plain.setdefault(name, {})[key] = value
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "names": [self.names[i] for i in group["params"]]}
            for group in raw["param_groups"]
        ]
        scheduler = None if self.scheduler is None else _plain_scheduler(self.scheduler)
        return tensors, {"state": plain, "groups": groups, "scheduler": scheduler}

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Take over the state of these parameters, wherever they were optimized before.

        plain: by parameter name "state", "options" (of its group) and "schedulers" (see `runtime.schedulers`).
        """
        raw = self.optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(self.names):
            values = dict(plain["state"].get(name, {}))
            prefix = name + "/"
            values.update({k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)})
            if values:
                state[index] = values
        groups = []
        for group in raw["param_groups"]:
            saved = plain["options"].get(self.names[group["params"][0]], {})
            groups.append({**group, **{k: v for k, v in saved.items() if k in group and k != "params"}})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.scheduler is not None:
            saved = [plain["schedulers"].get(self.names[group["params"][0]]) for group in raw["param_groups"]]
            if all(saved):
                self.scheduler.load_state_dict(join(saved))


def _check_step(made: Any, argument: str) -> None:
    """Raise InputError, before any training, for what can't be stepped as a pipeline does: ``step()``."""
    step = getattr(made, "step", None)
    if not callable(step):
        raise InputError(
            f"{argument}= gave a {type(made).__name__}, which has no step(); expected a function that returns what it "
            "makes, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30)"
        )
    try:
        inspect.signature(step).bind()
    except TypeError as error:
        raise InputError(
            f"{argument}= gave a {type(made).__name__}, whose step() can't be called without arguments ({error}); a "
            "pipeline has no closure that runs the model again and no metric to give: take one that needs neither"
        ) from None
    except ValueError:  # written in C, without a signature
        return


def _grouped(
    parameters: Mapping[str, nn.Parameter], options: GroupOptions | None
) -> list[tuple[list[str], dict[str, Any]]]:
    """Names of the parameters that have the same options, with those options; in the order of the first of each."""
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for name, parameter in parameters.items():
        given = options(name, parameter) if options else {}
        if not isinstance(given, Mapping):
            raise InputError(
                f"parameter_groups gave {given!r} for {name!r}; expected its options, such as {{'weight_decay': 0.0}}, "
                "or {} for none of its own"
            )
        names = next((names for names, chosen in groups if _equal(chosen, given)), None)
        if names is None:
            groups.append(([name], dict(given)))
        else:
            names.append(name)
    return groups


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two parameters' options are the same; tensors, such as a learning rate to be captured, are themselves."""
    if one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def _plain_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """The scheduler's state as far as it is plain; functions come from the user's code again."""
    kept = (bool, int, float, str, list, dict, type(None))
    return {k: v for k, v in scheduler.state_dict().items() if isinstance(v, kept) and not k.startswith("_get_lr")}


def entries(gradient: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one, as of an embedding, those that are stored, each index once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Sum of squares of all gradients."""
    gradients = [entries(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    return float(torch.stack([norm.double().square() for norm in norms]).sum())


def clip(parameters: Iterable[nn.Parameter], total_norm: float, max_norm: float) -> None:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does for a norm of `total_norm`."""
    factor = max_norm / (total_norm + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        # of a sparse gradient all that is stored, an index that stands twice included: it is scaled where it lies
        gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def agree(endpoint: Endpoint | None, workers: int, step: int, value: float, timeout: float) -> float:
    """The sum of every worker's value, the same float on all; nobody has it before all have given theirs."""
    if endpoint is None or workers == 1:
        return value
    rank = endpoint.rank
    if rank != 0:
        endpoint.send(0, Tag(step, "up", rank, 0, 0), Bundle(meta=value))
        return float(endpoint.recv(Tag(step, "down", 0, rank, 0), timeout).meta)
    total = value
    for worker in range(1, workers):
        total += float(endpoint.recv(Tag(step, "up", worker, 0, 0), timeout).meta)
    for worker in range(1, workers):
        endpoint.send(worker, Tag(step, "down", 0, worker, 0), Bundle(meta=total))
    return total

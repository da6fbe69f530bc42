"""Looks at a pipeline's arguments before any work is done."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from stageflow.errors import InputError
from stageflow.plan.shapes import AUTO, PER_DEVICE
from stageflow.runtime.stage import Recompute
from stageflow.schedule import SCHEDULES, Schedule, build_schedule
from stageflow.transport.cores import usable_cores
from stageflow.whole import as_whole

LONGEST_TIMEOUT = 1e8  # three years, which the system's clocks still take: math.inf means for ever

Model = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module]


def check_model(model: Any) -> Model:
    """Raise InputError for what is no model."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise InputError(
            f"model is a {type(model).__name__}, which has no forward; give list(model) for modules that run one after "
            "the other, or a module that says how they do"
        )
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, (str, PathLike)):
        raise InputError(
            f"model is the path {str(model)!r}; give a function that builds the model, such as "
            f"lambda: AutoModelForCausalLM.from_pretrained({str(model)!r}); with weights= no process reads more "
            "than its own part"
        )
    if isinstance(model, Sequence):
        strange = [type(item).__name__ for item in model if not isinstance(item, nn.Module)]
        if model and not strange:
            return model
        raise InputError(f"model is a list; expected only modules in it, got {strange or 'an empty list'}")
    if isinstance(model, type) or not callable(model):
        raise InputError(
            f"model is a {type(model).__name__ if not isinstance(model, type) else 'class'}; expected an nn.Module, a "
            "list of modules, or a function without arguments that builds one (for a class: lambda: Model(...))"
        )
    return cast(Model, model)


def count_stages(
    stages: int | Literal["auto"], schedule: str | Schedule, device: str | Sequence[str], workers: int | None
) -> int:
    """The number of stages: as given, as in the schedule, or "auto": as many as suit the schedule on all devices."""
    if isinstance(schedule, Schedule) and stages == "auto":
        return schedule.n_stages
    if stages == "auto":
        return _stages_on(workers or count_devices(device), schedule)
    count = as_whole(stages, 1)
    if count is None:
        raise InputError(f"stages must be a whole number >= 1 or 'auto', got {stages!r}")
    return count


def count_devices(device: str | Sequence[str]) -> int:
    """How many there are to run workers on; of the CPU, cores."""
    if not isinstance(device, str):
        return len(device)
    if device.startswith("cuda"):
        return max(1, torch.cuda.device_count())
    return usable_cores()


def _stages_on(workers: int, schedule: str | Schedule) -> int:
    """One stage per worker, or two where the schedule is made for that."""
    if schedule in SCHEDULES:
        for stages in (workers, 2 * workers):
            with suppress(InputError):  # not for this number of stages
                if build_schedule(str(schedule), stages=stages, microbatches=stages).n_workers == workers:
                    return stages
    return workers


def count_microbatches(microbatches: int | None, stages: int, schedule: str | Schedule) -> int:
    """The number of micro-batches: as in the schedule, as given, or by default one per stage, for "auto" four."""
    if isinstance(schedule, Schedule):
        if microbatches not in (None, schedule.microbatches):
            raise InputError(
                f"the schedule {schedule.name!r} is for {schedule.microbatches} micro-batches, "
                f"microbatches={microbatches}"
            )
        return schedule.microbatches
    if microbatches is None:
        return PER_DEVICE * stages if schedule == AUTO else stages
    count = as_whole(microbatches, 1)
    if count is None:
        raise InputError(f"microbatches must be a whole number >= 1, got {microbatches!r}")
    return count


def check_functions(**functions: Any) -> None:
    """Raise InputError for what should be a function and is none."""
    for name, value in functions.items():
        if isinstance(value, torch.optim.Optimizer):
            raise InputError(
                f"{name}= is a {type(value).__name__} that holds parameters already; give a function that makes one "
                "for a stage's parameters, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
            )
        if value is not None and not callable(value):
            raise InputError(f"{name}= must be a function, got {type(value).__name__}: {value!r}")


def check_weights(weights: Any, model: Model) -> Path | None:
    """The whole path, for workers that may be in another folder. Raises InputError for what is none."""
    if weights is None:
        return None
    if isinstance(model, (nn.Module, Sequence)):
        raise InputError("weights= is for a model given as a function; a module brings its own: load them into it")
    if not isinstance(weights, (str, Path)):
        raise InputError(f"weights must be the path of a safetensors file or of a folder of them, got {weights!r}")
    path = Path(weights).expanduser().absolute()
    if not path.exists():
        raise InputError(f"weights={str(weights)!r}, but there is nothing at {path}")
    return path


def check_options(
    *,
    workers: Any,
    max_grad_norm: Any,
    batch_dims: Any,
    device: Any,
    dtype: Any,
    autocast: Any,
    seed: Any,
    threads: Any,
    timeout: Any,
) -> None:
    """Raise InputError for an option of `Pipeline` that can't be, before it fails far from here or is believed."""
    if workers is not None and as_whole(workers, 1) is None:
        raise InputError(f"workers must be a whole number >= 1, or None for what suits the schedule, got {workers!r}")
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise InputError(f"max_grad_norm must be a number > 0, or None not to clip, got {max_grad_norm!r}")
    if batch_dims is not None and not isinstance(batch_dims, Mapping):
        raise InputError(f"batch_dims must map names of arguments to dimensions, got {batch_dims!r}")
    for name, dim in (batch_dims or {}).items():
        if dim is not None and as_whole(dim, 0) is None:
            raise InputError(f"batch_dims[{name!r}] must be a dimension counted from 0, or None, got {dim!r}")
    names = [device] if isinstance(device, str) else device
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"device must be a name such as 'cpu' or 'cuda', or a list of one per worker, got {device!r}")
    for option, value in (("dtype", dtype), ("autocast", autocast)):
        floating = isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex)
        if value is not None and not floating:
            raise InputError(f"{option} must be a floating-point torch.dtype or None, got {value!r}")
    if as_whole(seed) is None:
        raise InputError(f"seed must be a whole number, got {seed!r}")
    if as_whole(threads, 1) is None:
        raise InputError(f"threads must be a whole number >= 1, got {threads!r}")
    if not (_is_number(timeout) and timeout > 0):
        raise InputError(f"timeout must be positive seconds, got {timeout!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_recompute(recompute: Any, stages: int) -> Recompute | tuple[Recompute | None, ...] | None:
    """Raise InputError for what is no way to recompute; True means whole stages."""
    if isinstance(recompute, Sequence) and not isinstance(recompute, str):
        if len(recompute) != stages:
            raise InputError(f"recompute={recompute!r} has {len(recompute)} entries for {stages} stages")
        ways: list[Recompute | None] = [_recompute_one(each) for each in recompute]
        return tuple(ways)
    return _recompute_one(recompute)


def _recompute_one(recompute: Any) -> Recompute | None:
    if recompute is None or isinstance(recompute, bool):
        return "stage" if recompute else None
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute={recompute!r}; expected False, 'stage' (or True), 'layer', or a list of these")
    return recompute  # type: ignore[no-any-return]


def model_facts(model: Model) -> dict[str, Any]:
    """What shows that two processes hold the same kind of model: classes and the shapes of its parameters."""
    modules = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    shapes = [(name, tuple(p.shape), str(p.dtype)) for module in modules for name, p in module.named_parameters()]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    kind = type(model).__name__ if modules else getattr(model, "__qualname__", type(model).__name__)
    return {"model": kind, "parameters": len(shapes), "shapes": digest}


def not_importable(classes: Mapping[str, type]) -> dict[str, type]:
    """Those classes that another process can't find by their name."""
    lost = {}
    for name, cls in classes.items():
        module, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module) if module != "__main__" else None
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if found is not cls:
            lost[name] = cls
    return lost

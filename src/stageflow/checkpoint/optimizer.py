"""Optimizer state of many stages, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stageflow.runtime.schedulers import narrow


def combine(rests: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    """The plain parts of several `StageOptimizer.state` as the one that `StageOptimizer.load` takes.

    names: stored name -> name asked for, of the parameters that are wanted.
    """
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    schedulers: dict[str, Any] = {}
    for rest in rests:
        state.update({names[name]: values for name, values in rest["state"].items() if name in names})
        for number, group in enumerate(rest["groups"]):
            own = {key: value for key, value in group.items() if key != "names"}
            for name in group["names"]:
                if name not in names:
                    continue
                options[names[name]] = own
                if rest["scheduler"] is not None:
                    schedulers[names[name]] = narrow(rest["scheduler"], number)
    return {
        "state": state,
        "options": options,
        "schedulers": schedulers,
    }

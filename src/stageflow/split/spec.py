"""What every way of cutting a model results in: a graph of stages and one spec per stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stageflow.errors import SplitError
from stageflow.graph import StageGraph, StageSpec

if TYPE_CHECKING:
    from stageflow.split.state import TensorInfo


@dataclass(frozen=True)
class LayerInfo:
    """One indivisible piece of the model.

    name: module path in the model.
    cost: in ``unit`` of its Split: seconds of forward and backward on the example, or number of parameters.
    stage: where it went.
    """

    name: str
    cost: float
    stage: int


@dataclass(frozen=True)
class InputsUsed:
    """Which of the model's own arguments a stage reads the values of.

    An argument counts as read when any tensor in it is. For the others a stage may be handed a stand-in of the same
    shape and dtype (a tensor on the meta device), which spares sending the values.

    args: positions. kwargs: names.
    """

    args: frozenset[int] = frozenset()
    kwargs: frozenset[str] = frozenset()

    @property
    def nothing(self) -> bool:
        """Whether the stage reads none of the inputs."""
        return not self.args and not self.kwargs


@dataclass
class Split:
    """A model cut into stages.

    way: "sequence", "blocks" or "export".
    reason: one line: why this way, and what stopped the others.
    specs: one per stage, in order.
    owners: every parameter and buffer of the model, by its first name, with the one stage that owns it.
    mirrors: parameters of which further stages hold a copy: name -> those stages, ascending.
    aliases: further names of tied parameters and buffers -> the first name, the one in ``owners``.
    inputs_used: per stage; None where a stage reads all inputs.
    layers: in the model's order, with their costs.
    tensors: shape, dtype and kind of everything in ``owners``.
    unit: of the costs, "s" or "parameters".
    """

    graph: StageGraph
    way: str
    reason: str
    specs: list[StageSpec]
    owners: dict[str, int]
    mirrors: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    inputs_used: list[InputsUsed | None]
    layers: list[LayerInfo]
    tensors: dict[str, TensorInfo]
    unit: str = "s"
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for check in _CHECKS:
            problem = check(self)
            if problem:
                raise SplitError(f"the split by {self.way!r} is inconsistent, which is a fault of stageflow: {problem}")

    @property
    def n_stages(self) -> int:
        """How many stages."""
        return self.graph.n_stages

    def parameter_names(self, stage: int) -> list[str]:
        """Names of the parameters that ``stage`` owns, in the model's order."""
        return self._names(stage, kind="parameter")

    def buffer_names(self, stage: int) -> list[str]:
        """Names of the buffers that ``stage`` owns, in the model's order."""
        return self._names(stage, kind="buffer")

    def mirrored_names(self, stage: int) -> list[str]:
        """Names of the parameters of which ``stage`` holds a copy that it does not own."""
        return [name for name, stages in self.mirrors.items() if stage in stages]

    def layer_names(self, stage: int) -> list[str]:
        """Names of the layers in ``stage``, in the model's order."""
        return [layer.name for layer in self.layers if layer.stage == stage]

    def costs(self) -> list[float]:
        """Sum of the layers' costs per stage, in ``unit``."""
        return [sum(layer.cost for layer in self.layers if layer.stage == s) for s in range(self.n_stages)]

    def describe(self) -> str:
        """A table of the stages: layers, parameters, share of the cost."""
        costs = self.costs()
        total = sum(costs) or 1.0
        rows = [("stage", "layers", "parameters", "tied copies", "cost")]
        for stage, cost in enumerate(costs):
            parameters = sum(self.tensors[name].numel for name in self.parameter_names(stage))
            copies = sum(self.tensors[name].numel for name in self.mirrored_names(stage))
            layers = _abridge(self.layer_names(stage))
            rows.append((str(stage), layers, f"{parameters:,}", f"{copies:,}", f"{cost / total:.1%}"))
        if not self.mirrors:
            rows = [(*row[:3], *row[4:]) for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [f"split by {self.way}: {self.reason}"]
        for row in rows:
            left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
            right = "  ".join(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
            lines.append(f"{left}  {right}".rstrip())
        cost_of = "measured time" if self.unit == "s" else "parameters"
        lines.append(f"slowest stage has {max(costs) * self.n_stages / total:.2f} x the mean cost (by {cost_of})")
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])

    def __str__(self) -> str:
        return self.describe()

    def _names(self, stage: int, kind: str) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == stage and self.tensors[name].kind == kind]


def _abridge(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _check_counts(split: Split) -> str | None:
    n = split.graph.n_stages
    indices = [spec.index for spec in split.specs]
    if indices != list(range(n)):
        return f"the graph has {n} stages, the specs are numbered {indices}"
    if len(split.inputs_used) != n:
        return f"the graph has {n} stages, inputs_used has {len(split.inputs_used)} entries"
    return None


def _check_owners(split: Split) -> str | None:
    missing = sorted(split.tensors.keys() - split.owners.keys())
    if missing:
        return f"no stage owns {_some(missing)}"
    unknown = sorted(split.owners.keys() - split.tensors.keys())
    if unknown:
        return f"the model has nothing named {_some(unknown)}"
    return _out_of_range(split, split.owners.items())


def _check_mirrors(split: Split) -> str | None:
    for name, stages in split.mirrors.items():
        if name not in split.tensors or split.tensors[name].kind != "parameter":
            return f"{name!r} is mirrored but is no parameter of the model"
        if not stages or list(stages) != sorted(set(stages)) or split.owners[name] in stages:
            return f"mirrors of {name!r} are {stages}, its owner is stage {split.owners[name]}"
        problem = _out_of_range(split, ((name, stage) for stage in stages))
        if problem:
            return problem
    return None


def _check_aliases(split: Split) -> str | None:
    for alias, name in split.aliases.items():
        if name not in split.owners:
            return f"{alias!r} is tied to {name!r}, which nobody owns"
        if alias in split.owners:
            return f"{alias!r} is owned twice: under its own name and as {name!r}"
    return None


def _out_of_range(split: Split, where: Iterable[tuple[str, int]]) -> str | None:
    for name, stage in where:
        if not 0 <= stage < split.n_stages:
            return f"{name!r} is in stage {stage} of {split.n_stages}"
    return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


_CHECKS: tuple[Callable[[Split], str | None], ...] = (_check_counts, _check_owners, _check_mirrors, _check_aliases)

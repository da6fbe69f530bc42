"""A sequence of modules, each fed with what the one before gives: cut between any two of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from stageflow.errors import SplitError
from stageflow.graph import StageGraph
from stageflow.split.deferred import DeferredModel
from stageflow.split.follow import Layer, Survey, follow
from stageflow.split.request import ListedModules, Request
from stageflow.split.sequence_program import Given, SequenceSpec
from stageflow.split.spec import InputsUsed, LayerInfo, Split
from stageflow.split.state import Census, assign_owners, take_census, tensor_named


def cut(request: Request) -> Split:
    """Cut an nn.Sequential, or a list of modules, into stages.

    Nested plain nn.Sequentials are opened up. Values between layers may be anything that can travel; a place where
    one can't, or where a module on both sides keeps changing its buffers, is not cut.

    Raises SplitError if the model is no sequence or has too few places to cut at.
    """
    why_not = _why_no_sequence(request.model)
    if why_not:
        raise SplitError(why_not)
    layers = [Layer(k, name, module) for k, (name, module) in enumerate(_open(request.model, ""))]
    census = take_census(request.model)
    survey = follow(request, layers)
    _forbid_cuts_inside_shared_buffers(layers, survey)
    try:
        bounds = request.choose_cuts([layer.name for layer in layers], survey.costs, survey.allowed)
    except SplitError as problem:
        raise SplitError("; ".join([str(problem), *survey.obstacles])) from None
    return _assemble(request, layers, census, survey, bounds)


def _open(sequence: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in sequence._modules.items():
        if module is None:
            continue
        plain = not _why_no_sequence(module) and not isinstance(module, ListedModules)
        if plain and not module._parameters and not module._buffers:
            yield from _open(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _why_no_sequence(module: nn.Module) -> str:
    """Why a module can't be taken apart into the steps of nn.Sequential; empty if it can."""
    cls = type(module)
    if not isinstance(module, nn.Sequential):
        return f"{cls.__name__} is no nn.Sequential or list of modules"
    if cls.__call__ is not nn.Module.__call__ or cls.forward not in (nn.Sequential.forward, ListedModules.forward):
        return f"{cls.__name__} has a forward of its own, so its modules need not run one after the other"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return f"the {cls.__name__} itself has hooks, which no stage would run: put them on one of its modules"
    if not any(child is not None for child in module._modules.values()):
        return f"the {cls.__name__} is empty"
    return ""


def _forbid_cuts_inside_shared_buffers(layers: list[Layer], survey: Survey) -> None:
    """Copies of a buffer that changes would drift apart, so all layers that use one stay together."""
    uses: dict[int, list[Layer]] = {}
    for layer in layers:
        for buffer in layer.module.buffers():
            if id(buffer) in survey.changed:
                uses.setdefault(id(buffer), []).append(layer)
    for users in uses.values():
        inside = survey.allowed & set(range(users[0].number + 1, users[-1].number + 1))
        if inside:
            survey.allowed -= inside
            names = " and ".join(repr(layer.name) for layer in (users[0], users[-1]))
            survey.obstacles.append(f"{names} share a buffer that changes in forward and have to stay in one stage")


def _assemble(request: Request, layers: list[Layer], census: Census, survey: Survey, bounds: list[int]) -> Split:
    stages = [layers[start:end] for start, end in pairwise(bounds)]
    first_names = [{name: census.first_name(name) for x in stage for name in x.state_names()} for stage in stages]
    # What no layer holds is the sequence's own and never used, but it has to be somewhere.
    loose = [name for name in census.tensors if not any(name in names.values() for names in first_names)]
    first_names[0].update({name: name for name in loose})
    owners, mirrors = assign_owners(census, [set(names.values()) for names in first_names])
    specs = [
        SequenceSpec(
            index=index,
            n_stages=len(stages),
            numbers=[layer.number for layer in stage],
            names=[layer.name for layer in stage],
            first_names=first_names[index],
            loose=[] if index else loose,
            one_input=not isinstance(request.model, ListedModules),
            classes=survey.classes,
            weights=_weights(request, stage, [] if index else loose),
        )
        for index, stage in enumerate(stages)
    ]
    untimed = request.balance == "time" and request.boundaries is None and request.example is None
    stage_of = [index for index, stage in enumerate(stages) for _ in stage]
    return Split(
        graph=StageGraph.chain(len(stages)),
        way="sequence",
        reason=f"{type(request.model).__name__} of {len(layers)} layers, balanced by {survey.balanced_by}",
        specs=list(specs),
        owners=owners,
        mirrors=mirrors,
        aliases=census.aliases,
        inputs_used=[None] + [InputsUsed()] * (len(stages) - 1),
        layers=[LayerInfo(x.name, cost, s) for x, cost, s in zip(layers, survey.costs, stage_of, strict=True)],
        tensors=census.tensors,
        unit=survey.unit,
        warnings=["balanced by parameters, since without example= nothing can be timed"] if untimed else [],
    )


def _weights(request: Request, stage: list[Layer], loose: list[str]) -> Given | DeferredModel:
    if request.deferred is not None:
        return request.deferred
    return Given([layer.module for layer in stage], {name: tensor_named(request.model, name) for name in loose})

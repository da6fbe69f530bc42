"""One stage of a replayed model, as its worker runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from stageflow.errors import SplitError
from stageflow.graph import Bundle, StageProgram, StageResult
from stageflow.split.deferred import DeferredModel
from stageflow.split.replay.ghost import Ghost, GhostTouched
from stageflow.split.replay.interception import StageExit, Stand, intercept, tensors_in, walk_atoms
from stageflow.split.replay.log import Log, Outcome
from stageflow.split.replay.reach import reachable
from stageflow.split.replay.run import Run
from stageflow.split.replay.travel import has_hooks, pack, unpack
from stageflow.split.spec import StageSpec
from stageflow.split.state import named_state

MEMORY = 1024  # logs remembered; more only cost time


@dataclass
class Plan:
    """What one stage has to know of the split.

    stage_of: (path, how many-th call) of every atom call seen in the trace -> its stage.
    end: the event at which the next stage begins, where that is no call of an atom.
    opened: modules that are taken apart.
    names: of the trace's events.
    choices: event -> outline of what it gave to Python that depends on data; the trace is typical while these recur,
    handed_back: and these: event -> which of its results is which of its arguments.
    sends: consumer -> keys of the values it needs, as seen in the trace.
    cautious: the model decides by data after this stage, so that the trace can't tell what later stages need.
    common: keys of values that every stage makes by itself.
    classes: of the values, for those that can't be found by name.
    draws_unseen: forward draws random numbers from Python's or numpy's generators.
    within_checkpoints: events that share an activation checkpoint with others.
    """

    index: int
    n_stages: int
    stage_of: dict[tuple[str, int], int]
    end: int | None
    opened: frozenset[str]
    names: tuple[str, ...]
    choices: dict[int, str]
    handed_back: dict[int, dict[int, int]]
    sends: dict[int, list[str]]
    cautious: bool
    common: frozenset[str]
    classes: dict[str, type]
    draws_unseen: bool
    within_checkpoints: frozenset[int]


@dataclass
class ReplaySpec(StageSpec):
    """The whole model, in which all weights that this stage does not use are ghosts.

    model: or the recipe for it.
    held: the parameters and buffers that are real here, by the names they are owned under.
    first_names: further names of tied tensors -> the name they are owned under.
    without_cache: the model's key-value cache is switched off.
    parametrized: paths of modules with parametrizations, whose generated classes can't travel: until `build` they
        are of the class they were made from.
    """

    index: int
    plan: Plan
    model: nn.Module | DeferredModel
    held: frozenset[str]
    first_names: dict[str, str]
    without_cache: bool = False
    parametrized: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            for path, module in self.model.named_modules():
                if parametrize.is_parametrized(module):
                    module.__class__ = type(module).__bases__[0]
                    self.parametrized.append(path)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.model, nn.Module) and has_hooks(self.model):
            state["model"] = pack(self.model)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.model, bytes):
            self.model = unpack(self.model)

    def build(self, device: torch.device) -> StageProgram:
        model = self.model
        if isinstance(model, DeferredModel):
            model = model.materialise(self.held)
            haunt(model, self.held, self.first_names, device)
        for path in self.parametrized:
            module = model.get_submodule(path)
            parametrize._inject_new_class(module)
            for name in module.parametrizations:  # type: ignore[union-attr]
                parametrize._inject_property(module, name)
        if self.without_cache:
            switch_cache_off(model)
        _move(model, device)
        return ReplayProgram(self.plan, model, self.first_names, device)


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
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            found = True
    return found


def _move(model: nn.Module, device: torch.device) -> None:
    """Move what is real; make the ghosts anew, whose device can't be changed."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _moved(tensor, device)
                table[name] = moved[id(tensor)]  # type: ignore[assignment]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, Ghost):
        return Ghost.of(tensor.key, tensor, device)
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)


class ReplayProgram:
    """Runs the model's forward as one of its stages; see `stageflow.graph.StageProgram`.

    Layers are numbered by the count of atoms and random functions before them. ``seed`` is called where one ends, not
    where one begins: activation checkpointing notes the random state before it calls a layer, and would not see a
    key set within.
    """

    def __init__(self, plan: Plan, model: nn.Module, first_names: dict[str, str], device: torch.device) -> None:
        self.index = plan.index
        self.module = model
        self.plan = plan
        self.device = device
        self.parameters: dict[str, nn.Parameter] = {}
        self._buffer_places: dict[str, tuple[nn.Module, str]] = {}
        for name, tensor, kind in named_state(model):
            if isinstance(tensor, Ghost):
                continue
            first = first_names.get(name, name)
            if kind == "parameter":
                self.parameters.setdefault(first, tensor)  # type: ignore[arg-type]
            else:
                path, _, last = name.rpartition(".")
                self._buffer_places.setdefault(first, (model.get_submodule(path), last))
        self._first_names = first_names
        self.stand = Stand()
        self.layers: list[nn.Module] = []
        here = {path for (path, _), stage in plan.stage_of.items() if stage == plan.index}
        for path, module in walk_atoms(model, plan.opened):
            intercept(module, path, self.stand)
            if path in here:
                self.layers.append(module)
        self._read: dict[str, Log] = {}
        self._written: dict[tuple[str, tuple[str, ...], tuple[Outcome, ...]], str] = {}
        self._expected: dict[Any, tuple[Log, str]] = {}
        self._typical: dict[str, bool] = {}
        self.ghost_buffers = [
            (name, module._buffers, tensor)
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if isinstance(tensor, Ghost)
        ]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The live buffers; a forward may put another tensor in a buffer's place."""
        return {name: getattr(module, last) for name, (module, last) in self._buffer_places.items()}

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[int, Bundle],
        seed: Callable[[int], None],
    ) -> StageResult:
        """Replay the model's forward on one micro-batch.

        Raises SplitError if this stage turns out to need a value that no stage sent, or if the model takes another
        path here than it took in the stage before.
        """
        if self.device.type != "meta":
            args, kwargs = _ghosts_for_meta((args, kwargs), self.device)
        text = received[self.index - 1].meta if self.index else ""
        look = text or _look(args, kwargs)
        run = Run(self, text, look, _values(received), seed)
        outer, self.stand.current = self.stand.current, run
        try:
            with run:
                run.begin()
                output = self.module(*args, **kwargs)
            run.leave(output)
        except StageExit:
            output = None
        except GhostTouched as problem:
            raise SplitError(self._explain(problem, run)) from problem
        finally:
            self.stand.current = outer
            self._restore_ghosts()
        if self.index == self.plan.n_stages - 1:
            self._check_output(output, run)
            return StageResult({}, output)
        return StageResult(self._bundles(run))

    # -- messages

    def read_log(self, text: str) -> Log:
        if not text:
            return Log((), ())
        log = self._read.get(text)
        if log is None:
            if len(self._read) >= MEMORY:
                self._read.clear()
            log = self._read[text] = Log.from_text(text)
        return log

    def keep(self, run: Run, output: Any) -> None:
        """Hold on to what is to be sent, at the end of a run and within its frames."""
        if self.index == self.plan.n_stages - 1:
            return
        log, run.text = self._write_log(run)
        typical = self._is_typical(run.text, log)
        for wanted in self.plan.sends.values():
            found = {key: run.find(key) for key in wanted}
            run.kept.update((key, tensor) for key, tensor in found.items() if tensor is not None)
        if self.plan.cautious or not typical:
            held = reachable(sys._getframe(1), ReplayProgram.forward.__code__, self.module, output)
            common = self.plan.common if typical else frozenset()
            alive = [(key, t) for key, t in (*run.arrived.items(), *run.record.values()) if id(t) in held]
            run.spare = [key for key, _ in alive if key not in common]
            run.kept.update((key, t) for key, t in alive if key not in common)

    def _bundles(self, run: Run) -> dict[int, Bundle]:
        bundles = {
            consumer: Bundle({key: run.kept[key] for key in wanted if key in run.kept})
            for consumer, wanted in self.plan.sends.items()
        }
        chain = bundles.setdefault(self.index + 1, Bundle())
        chain.meta = run.text
        chain.tensors.update((key, run.kept[key]) for key in run.spare)
        return bundles

    def expect(self, look: Any) -> tuple[Log, str] | None:
        """The log that the last run on inputs like these left, as itself and as text."""
        return self._expected.get(look)

    def _write_log(self, run: Run) -> tuple[Log, str]:
        """The log up to the end of a run, as itself and as text."""
        if run.expected is not None and run.record.is_as_expected():
            return run.expected
        names, outcomes = tuple(run.record.names), tuple(run.record.outcomes)
        log = Log(run.log.names + names, run.log.outcomes + outcomes)
        place = (run.before, names, outcomes)
        text = self._written.get(place)
        if text is None:
            if len(self._written) >= MEMORY:
                self._written.clear()
            text = self._written[place] = log.to_text()
        if len(self._expected) >= MEMORY:
            self._expected.clear()
        self._expected[run.look] = (log, text)
        return log, text

    def _is_typical(self, text: str, log: Log) -> bool:
        """Whether a timeline so far took the path of the trace."""
        typical = self._typical.get(text)
        if typical is None:
            plan, n = self.plan, len(log.names)
            typical = (
                log.names == plan.names[:n]
                and all(log.outcomes[k].outline == outline for k, outline in plan.choices.items() if k < n)
                and all(which.items() <= log.outcomes[k].handed_back.items() for k, which in plan.handed_back.items() if k < n)
            )
            if len(self._typical) >= MEMORY:
                self._typical.clear()
            self._typical[text] = typical
        return typical

    # -- state

    def _restore_ghosts(self) -> None:
        for name, table, ghost in self.ghost_buffers:
            table[name] = ghost

    def buffer_now(self, name: str) -> Tensor | None:
        """A buffer of this stage, as it is now."""
        place = self._buffer_places.get(name)
        return None if place is None else getattr(*place)

    # -- errors

    def _check_output(self, output: Any, run: Run) -> None:
        for tensor in tensors_in(output):
            if isinstance(tensor, Ghost):
                raise SplitError(self._explain(GhostTouched(tensor.key, "the model's output"), run))

    def _explain(self, problem: GhostTouched, run: Run) -> str:
        made, _, _ = problem.key.partition(".")
        what = "a value that was changed in an earlier stage"
        if made.isdigit() and int(made) < len(run.log.names):
            what = f"what {run.log.names[int(made)]!r} made (event {made})"
        elif problem.key.startswith("s:"):
            what = f"{problem.key[2:]!r}"
        elif problem.key.startswith("i"):
            what = f"tensor {problem.key[1:]} of the model's inputs"
        return (
            f"stage {self.index}: {problem.function} in {run.where()} needs {what}, which was neither sent to this "
            "stage nor is held by it: the model took a path that the example did not show; split with an example that "
            "does, or move the boundary"
        )


def _values(received: Mapping[int, Bundle]) -> dict[str, Tensor]:
    """All that was received; from the later producer, where two sent a value."""
    values: dict[str, Tensor] = {}
    for producer in sorted(received):
        values.update(received[producer].tensors)
    return values


def _look(args: Any, kwargs: Any) -> Any:
    """Shapes of the inputs: micro-batches that look alike usually leave the same log."""
    return tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in((args, kwargs))), torch.is_grad_enabled()


def _ghosts_for_meta(inputs: Any, device: torch.device) -> Any:
    """Inputs whose values this stage was not given arrive on the meta device."""
    if not any(tensor.is_meta for tensor in tensors_in(inputs)):
        return inputs
    count = iter(range(1 << 30))

    def swap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = next(count)
        return Ghost.of(f"i{number}", leaf, device) if leaf.is_meta else leaf

    return pytree.tree_map(swap, inputs)

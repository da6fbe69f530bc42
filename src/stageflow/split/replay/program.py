"""One stage of a replayed model, as its worker runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageflow.errors import SplitError
from stageflow.graph import Bundle, StageResult
from stageflow.split.replay.ghost import Ghost, GhostTouched
from stageflow.split.replay.interception import StageExit, Stand, intercept, tensors_in, walk_atoms
from stageflow.split.replay.log import Log, Outcome
from stageflow.split.replay.part import Part
from stageflow.split.replay.reach import reachable
from stageflow.split.replay.run import Run
from stageflow.split.state import named_state

MEMORY = 1024  # logs remembered; more only cost time


class ReplayProgram:
    """Runs the model's forward as one of its stages; see `stageflow.graph.StageProgram`.

    Layers are numbered by the count of atoms and random functions before them. ``seed`` is called where one ends, not
    where one begins: activation checkpointing notes the random state before it calls a layer, and would not see a
    key set within.
    """

    def __init__(self, part: Part, model: nn.Module, first_names: dict[str, str], device: torch.device) -> None:
        self.index = part.index
        self.module = model
        self.part = part
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
        layers = []
        here = {path for (path, _), stage in part.stage_of.items() if stage == part.index}
        for path, module in walk_atoms(model, part.opened):
            intercept(module, path, self.stand)
            if path in here:
                layers.append(module)
        self.layers: Sequence[nn.Module] | None = layers
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

    def origin(self, value: str) -> str:
        """See `StageProgram.origin`."""
        return _origin(value, self.part.names)

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
        except Exception as problem:
            if run.strayed is None:
                raise
            raise SplitError(
                f"stage {self.index}: the model's forward calls {run.strayed!r} in a thread of its own, which it did "
                "not on the example; split with an example that shows it"
            ) from problem
        finally:
            self.stand.current = outer
            self._restore_ghosts()
        if self.index == self.part.n_stages - 1:
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
        if self.index == self.part.n_stages - 1:
            return
        log, run.text = self._write_log(run)
        typical = self._is_typical(run.text, log)
        for wanted in self.part.sends.values():
            found = {key: run.find(key) for key in wanted}
            run.kept.update((key, tensor) for key, tensor in found.items() if tensor is not None)
        if self.part.cautious or not typical:
            held = reachable(sys._getframe(1), ReplayProgram.forward.__code__, self.module, output)
            common = self.part.common if typical else frozenset()
            alive = [(key, t) for key, t in (*run.arrived.items(), *run.record.values()) if id(t) in held]
            run.spare = [key for key, _ in alive if key not in common]
            run.kept.update((key, t) for key, t in alive if key not in common)

    def _bundles(self, run: Run) -> dict[int, Bundle]:
        bundles = {
            consumer: Bundle({key: run.kept[key] for key in wanted if key in run.kept})
            for consumer, wanted in self.part.sends.items()
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
            typical = self.part.is_typical(log)
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
        what = _origin(problem.key, run.log.names)
        return (
            f"stage {self.index}: {problem.function} in {run.where()} needs {what}, which was neither sent to this "
            "stage nor is held by it: the model took a path that the example did not show, because of other values or "
            "shapes; split with an example that does, or move the boundary"
        )


def _origin(key: str, names: Sequence[str]) -> str:
    """In words, where the value of a key comes from (see `Value`); names: of the events."""
    made, _, _ = key.partition(".")
    if made.isdigit() and int(made) < len(names):
        return f"what {names[int(made)]!r} gives (event {made})"
    if key.startswith("s:"):
        return f"{key[2:]!r}"
    if key.startswith("i"):
        return f"tensor {key[1:]} of the model's inputs"
    return "a value that was changed in an earlier stage"


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

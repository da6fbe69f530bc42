"""How far a model is taken apart.

The answer depends on the model alone, not on the number of stages or on where cuts come to lie: random draws are keyed
by the count of atoms, and must be the same for any number of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stageflow.split.replay.ghost import METADATA
from stageflow.split.replay.interception import Stand, Timeline, intercept, is_compiled, lend

ENOUGH_BLOCKS = 8
ENOUGH_ATOMS = 8


@dataclass(eq=False)
class Call:
    """A call of a module: its path, the call around it, and calls within it, in order."""

    path: str
    parent: Call | None
    within: list[Call] = field(default_factory=list)

    def around(self) -> Iterable[Call]:
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


class _Recorder(Timeline):
    """Also lends values to a model that has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return func(*args, **(kwargs or {}))
        return func(*lend(args), **lend(kwargs or {}))

    def __init__(self) -> None:
        super().__init__()
        self.current: Call = Call("<outside>", None)
        self.calls: list[Call] = []

    def atom(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(path, self.current)
        self.current.within.append(call)
        self.calls.append(call)
        self.current = call
        try:
            return forward(*args, **kwargs)
        finally:
            self.current = call.parent or call


def record_calls(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], hollow: bool = False
) -> list[Call]:
    """Run ``model`` once and list the calls of modules, in the order in which they begin.

    hollow: the model has no weights.
    """
    recorder, stand = _Recorder(), Stand()
    compiled = [f"{path}." for path, module in model.named_modules() if is_compiled(module)]
    undo = [
        intercept(module, path, stand) for path, module in model.named_modules() if not path.startswith(tuple(compiled))
    ]
    stand.current = recorder
    try:
        args, kwargs = arguments
        with recorder if hollow else nullcontext():
            model(*args, **kwargs)
    finally:
        for step in undo:
            step()
    return recorder.calls


class Opening:
    """The modules that are open, grown on request.

    planned: the blocks to start from are those that the model's own plan names.
    """

    def __init__(self, model: nn.Module, calls: list[Call]) -> None:
        self.model = model
        self.calls = calls
        self.paths = {""}
        self.planned = False
        self.sealed = {path for path, module in model.named_modules() if is_compiled(module)}
        self._size = {path: sum(p.numel() for p in m.parameters()) for path, m in model.named_modules()}
        self._modules = dict(model.named_modules())

    @property
    def opened(self) -> frozenset[str]:
        return frozenset(self.paths)

    def seal(self, path: str) -> None:
        """Keep one module in one piece from now on."""
        self.sealed.add(path)
        self.paths = {p for p in self.paths if p != path and not p.startswith(f"{path}.")}

    def open(self, path: str) -> None:
        """Open one module and all that calls it."""
        self._add(path)
        for call in self.calls:
            if call.path == path:
                self._open_around(call)

    def _open_around(self, call: Call) -> None:
        for outer in call.around():
            if outer.path in self._modules:
                self._add(outer.path)
        self._add(call.path.rpartition(".")[0])

    def _add(self, path: str) -> None:
        """With the modules that hold it, which need not be those that call it."""
        while path:
            if not any(path == s or path.startswith(f"{s}.") for s in self.sealed):
                self.paths.add(path)
            path = path.rpartition(".")[0]

    def open_around(self, path: str) -> bool:
        """Make ``path`` an atom, or the first of its atoms one; False if nothing of that name is called."""
        found = [call for call in self.calls if call.path == path or call.path.startswith(f"{path}.")]
        for call in found[:1]:
            self._open_around(call)
        return bool(found)

    def atoms(self) -> list[Call]:
        """The calls that are atoms."""
        return [
            call
            for call in self.calls
            if call.path not in self.paths
            and self._size[call.path]
            and (call.parent is None or call.parent.path in self.paths or call.parent.path not in self._modules)
        ]

    def start(self) -> None:
        """Open down to the repeated blocks; without such, until there are enough atoms."""
        planned = self._planned_calls()
        self.planned = bool(planned)
        blocks = self._outermost(planned or self._block_calls())
        while 0 < len(blocks) < ENOUGH_BLOCKS:
            finer = self._refine(blocks)
            if len(finer) <= len(blocks):
                break
            blocks = finer
        for block in blocks:
            self._open_around(block)
        if not blocks:
            while len(self.atoms()) < ENOUGH_ATOMS and self.grow():
                pass

    def grow(self) -> bool:
        """Open the largest atom that has modules within; False if there is none."""
        inner = [c for c in self.atoms() if c.path not in self.sealed and any(self._size[w.path] for w in c.within)]
        if not inner:
            return False
        self.open(max(inner, key=lambda c: self._size[c.path]).path)
        return True

    def _planned_calls(self) -> list[Call]:
        """Calls of the blocks that the model's own plan for pipelines names.

        Configs of transformers have one, ``base_model_pp_plan``: by the paths of the base model's modules, among them
        the list of its blocks.
        """
        blocks: set[str] = set()
        for path, module in self._modules.items():
            plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None)
            for name in plan if isinstance(plan, Mapping) else ():
                whole = f"{path}.{name}" if path else name
                named = self._modules.get(whole)
                if isinstance(named, (nn.ModuleList, nn.Sequential)):
                    blocks.update(f"{whole}.{child}" for child, _ in named.named_children())
        return [call for call in self.calls if call.path in blocks and self._size[call.path]]

    def _block_calls(self) -> list[Call]:
        """Calls of modules that stand in a list with others of their class, and are made of modules themselves."""
        called = {call.path for call in self.calls}
        blocks: set[str] = set()
        for path, module in self._modules.items():
            if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
                continue
            made = {name: child for name, child in module.named_children() if any(True for _ in child.children())}
            # Counted over all that are there: chance may have left some out of this run.
            kinds = Counter(type(child) for child in made.values())
            blocks.update(f"{path}.{name}" if path else name for name, child in made.items() if kinds[type(child)] > 1)
        return [call for call in self.calls if call.path in blocks & called and self._size[call.path]]

    def _outermost(self, blocks: list[Call]) -> list[Call]:
        chosen = set(blocks)
        return [block for block in blocks if not any(around in chosen for around in block.around())]

    def _refine(self, blocks: list[Call]) -> list[Call]:
        """Blocks replaced by the blocks within them, where these hold most of their parameters."""
        inner = self._block_calls()
        finer: list[Call] = []
        for block in blocks:
            nested = self._outermost([b for b in inner if block in set(b.around())])
            size = sum(self._size[path] for path in {b.path for b in nested})
            finer.extend(nested if size > 0.6 * self._size[block.path] else [block])
        return finer

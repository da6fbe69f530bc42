"""Building a model without its memory, and giving chosen parameters their exact values afterwards.

While a `HollowBuild` is open, every larger parameter gives its memory back as soon as a module registers it, and what
happens to it is written down instead of done: which initialiser, from which state of the random generator. Random
draws are made, in small pieces, into a scrap buffer, so that the generator moves exactly as in a plain build. An
operation that needs the values of such a hollow gets them by repeating what was written down; so does, at the end,
every parameter that is to be kept. All of this sees only operations, no names of initialisers, so that any
initialiser works.

What can't be repeated is a value that existed before the parameter was registered (``nn.Parameter(torch.randn(9))``)
or was copied from elsewhere. Such hollows are lost, and say which numbers (in order of birth, the same in every
process) must be real from birth in a build that wants to keep them.
"""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

SMALL = 16 * 1024  # bytes; parameters up to this size are built as ever
PIECE = 1 << 18  # elements drawn at a time; a multiple of the 16 that torch's normal_ draws together

_aten = torch.ops.aten
_CONVERSIONS = {_aten.clone.default, _aten._to_copy.default}
_SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"} | {
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
_OVERWRITING = {"fill_", "zero_", "normal_", "uniform_", "exponential_", "random_", "log_normal_", "cauchy_"}
_DIRECT_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.data_ptr}
_DRAWN_IN_ORDER = {_aten.normal_.default, _aten.uniform_.default}


@dataclass(frozen=True)
class _Geometry:
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Geometry:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.device, offset, tuple(tensor.shape), tuple(tensor.stride()))

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]


@dataclass(frozen=True)
class _InPlace:
    """An operation that changed a hollow; its other arguments are no tensors."""

    func: Any
    target: _Geometry
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    state: Tensor | None

    def repeat(self, storage: torch.UntypedStorage) -> None:
        target = self.target.over(storage)
        if self.generator is None or self.state is None:
            self.func(target, *self.args, **self.kwargs)
            return
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        self.func(target, *self.args, **self.kwargs)
        self.generator.set_state(now)


@dataclass(frozen=True)
class _Converted:
    """A hollow that began as a copy of another, perhaps of other type or on another device."""

    history: tuple[_InPlace | _Converted, ...]
    nbytes: int
    source: _Geometry
    target: _Geometry

    def repeat(self, storage: torch.UntypedStorage) -> None:
        values = torch.UntypedStorage(self.nbytes, device=self.source.device)
        for step in self.history:
            step.repeat(values)
        self.target.over(storage).copy_(self.source.over(values))


@dataclass(eq=False)
class _Hollow:
    """One storage whose memory has been given back.

    history: what brings its values back; None when they are lost.
    needs: numbers of the hollows that must be real from birth where its values are wanted, if they are lost.
    real: never was a hollow in this build, only counted.
    """

    number: int
    storage: torch.UntypedStorage
    nbytes: int
    needs: frozenset[int]
    history: list[_InPlace | _Converted] | None = None
    real: bool = False

    @property
    def empty(self) -> bool:
        return self.storage.nbytes() == 0

    @property
    def lost(self) -> bool:
        return self.history is None and not self.real

    def deflate(self) -> None:
        self.storage.resize_(0)

    def inflate(self) -> None:
        if self.empty:
            self.storage.resize_(self.nbytes)
            for step in self.history or ():
                step.repeat(self.storage)


class HollowBuild(TorchDispatchMode):
    """Open it around the building of one model, in one thread; see the module's text.

    real: numbers of hollows that are to be real from birth.
    draw: whether random draws move the generator; False where all values will be loaded.
    missed: after the build, numbers that must be real from birth because somebody read their lost values.
    """

    def __init__(self, real: AbstractSet[int] = frozenset(), draw: bool = True) -> None:
        super().__init__()
        self.missed: set[int] = set()
        self._real = real
        self._draw = draw
        self._hollows: dict[int, _Hollow] = {}
        self._count = 0
        self._inflated: set[_Hollow] = set()
        self._scrap = _Scrap()
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Read by torch, which would otherwise import its compiler (seconds, 150 MB) to keep it off this mode."""
        return False

    def __enter__(self) -> HollowBuild:
        with ExitStack() as stack:
            hook: Any = self._registered  # torch's annotation denies that a hook may give another parameter
            stack.callback(register_module_parameter_registration_hook(hook).remove)
            stack.enter_context(_DirectReads(self))
            super().__enter__()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._opened.close()

    def is_hollow(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory has been given back."""
        hollow = self._hollow_of(tensor)
        return hollow is not None and not hollow.real

    def needs(self, tensor: Tensor) -> frozenset[int]:
        """Which numbers must be real from birth in a build that is to `keep` this tensor."""
        hollow = self._hollow_of(tensor)
        return hollow.needs if hollow is not None and hollow.lost else frozenset()

    def keep(self, tensor: Tensor, values: bool = True) -> None:
        """Give a tensor its memory back for good, with its values unless it is about to be filled."""
        hollow = self._hollow_of(tensor)
        if hollow is not None and not hollow.real:
            if not values:
                hollow.history = None
            hollow.inflate()
            hollow.real = True

    def bring_back(self, tensor: Tensor) -> None:
        """Let the tensor have its memory and values until an operation needs those of another hollow."""
        with _disable_current_modes():
            self._run(lambda: None, (), {}, [], [tensor])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = [(t, g) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and (g := self._hollow_of(t))]
        if not touched or _name(func) in _SHAPE_ONLY:
            return func(*args, **kwargs)
        if func in _CONVERSIONS:
            return self._convert(func, args, kwargs, touched[0][1])
        if touched[0][1].real and len(touched) == 1:
            return func(*args, **kwargs)
        writes, reads = _roles(func, args, kwargs)
        if not writes and not reads:
            return self._view(func, args, kwargs, [hollow for _, hollow in touched if hollow.empty])
        if len(writes) == 1 and not reads and args[0] is writes[0]:
            return self._write_down(func, args, kwargs, touched[0][1])
        return self._run(func, args, kwargs, writes, reads)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Called by torch before a module takes a parameter; may give another to take in its place."""
        if parameter is None or threading.get_ident() != self._thread or parameter.device.type == "meta":
            return None
        if not torch._C._has_storage(parameter) or self._hollow_of(parameter) is not None:
            return None
        storage = parameter.untyped_storage()
        if storage.nbytes() <= SMALL:
            return None
        if not storage.resizable():  # memory of somebody else, a mapped file say; it goes when the parameter does
            return self._registered_mapped(parameter)
        hollow = self._born(storage, frozenset())
        if not hollow.real:
            hollow.deflate()
        return None

    def _registered_mapped(self, parameter: nn.Parameter) -> nn.Parameter | None:
        stand_in = nn.Parameter(torch.empty_like(parameter, requires_grad=False), parameter.requires_grad)
        vars(stand_in).update(vars(parameter))
        hollow = self._born(stand_in.untyped_storage(), frozenset())
        if hollow.real:
            return None
        hollow.deflate()
        return stand_in

    def _born(self, storage: torch.UntypedStorage, needs: frozenset[int]) -> _Hollow:
        number = self._count
        self._count += 1
        hollow = _Hollow(number, storage, storage.nbytes(), needs | {number}, real=number in self._real)
        self._hollows[storage._cdata] = hollow  # the hollow holds the storage, so that the key stays its own
        return hollow

    def _hollow_of(self, tensor: Tensor) -> _Hollow | None:
        if not torch._C._has_storage(tensor):
            return None
        return self._hollows.get(tensor.untyped_storage()._cdata)

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: _Hollow) -> Tensor:
        tensor = args[0]
        outline = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        outline = func(outline, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
        if outline.nbytes <= SMALL:
            return self._run(func, args, kwargs, [], [tensor])
        device = kwargs.get("device") or tensor.device
        copy = torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype, device=device)
        hollow = self._born(copy.untyped_storage(), source.needs if source.lost else frozenset())
        if hollow.real:
            return self._run(_aten.copy_.default, (copy, tensor), {}, [], [tensor])
        if source.history is not None:
            step = _Converted(tuple(source.history), source.nbytes, _Geometry.of(tensor), _Geometry.of(copy))
            hollow.history = [step]
        hollow.deflate()
        return copy

    def _write_down(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hollow: _Hollow) -> Tensor:
        target = args[0]
        generator = _generator(func, target, kwargs)
        if generator is not None and not self._draw:
            func, args, kwargs, generator = _aten.zero_.default, (target,), {}, None
        state = generator.get_state() if generator is not None else None
        step = _InPlace(func, _Geometry.of(target), args[1:], kwargs, generator, state)
        if _name(func) in _OVERWRITING and target.nbytes == hollow.nbytes and _is_dense(target):
            hollow.history = [step]
            hollow.deflate()
        elif hollow.history is not None:
            hollow.history.append(step)
        if not hollow.empty:
            func(*args, **kwargs)
        elif generator is not None:
            self._scrap.advance(func, target, args[1:], kwargs)
        return target

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], empty: list[_Hollow]) -> Any:
        for hollow in empty:  # a view must lie within its storage; memory that nobody touches costs nothing
            hollow.storage.resize_(hollow.nbytes)
        result = func(*args, **kwargs)
        for hollow in empty:
            hollow.deflate()
        return result

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes: list[Tensor], reads: list[Tensor]
    ) -> Any:
        """Run an operation for real; hollows it doesn't concern give up what they had been brought back for."""
        read = {g for t in reads if (g := self._hollow_of(t)) and not g.real}
        written = {g for t in writes if (g := self._hollow_of(t)) and not g.real}
        for hollow in read:
            if hollow.empty and hollow.lost:
                self.missed |= hollow.needs
        for hollow in self._inflated - read - written:
            hollow.deflate()
        self._inflated = read | written
        for hollow in self._inflated:
            hollow.inflate()
        result = func(*args, **kwargs)
        for hollow in written:
            hollow.history = None  # what it was given can't be repeated
        return result


class _DirectReads(TorchFunctionMode):
    """Brings values back for the few methods that read memory without an operation that a dispatch mode sees."""

    def __init__(self, build: HollowBuild) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DIRECT_READS:
            self._build.bring_back(args[0])
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _roles(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors whose values an operation changes and those whose values it reads; a view does neither."""
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if argument.alias_info is None:
            reads += tensors
        elif argument.alias_info.is_write:
            writes += tensors
    return writes, reads


def _generator(func: Any, target: Tensor, kwargs: dict[str, Any]) -> torch.Generator | None:
    """The random generator that an operation moves, if it does."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    if kwargs.get("generator") is not None:
        return kwargs["generator"]
    if target.device.type == "cuda":
        return torch.cuda.default_generators[target.device.index or 0]
    return torch.default_generator


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor, as large as its storage, has each element once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class _Scrap:
    """Memory to draw into; one piece for all draws, since a fresh one each time would leave the heap in tatters."""

    def __init__(self) -> None:
        self._pieces: dict[torch.dtype, Tensor] = {}

    def advance(self, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move the generator as ``func(target)`` would."""
        if func not in _DRAWN_IN_ORDER or not target.is_contiguous() or target.is_cuda:
            like = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
            func(like, *args, **kwargs)
            return
        if target.dtype not in self._pieces:
            self._pieces[target.dtype] = torch.empty(PIECE + 16, dtype=target.dtype)
        piece, left = self._pieces[target.dtype], target.numel()
        while left > PIECE + 16:
            func(piece[:PIECE], *args, **kwargs)
            left -= PIECE
        func(piece[:left], *args, **kwargs)

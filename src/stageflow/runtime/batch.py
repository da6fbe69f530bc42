"""A batch of a model's inputs, and the micro-batches it is cut into.

    train_step(x[10, 3], mask=m[10, 7], target=y[10], ...) in 4 micro-batches

        rows   0 1 2 | 3 4 5 | 6 7 | 8 9          sizes 3, 3, 2, 2: they differ by at most one

Tensors whose first dimension is the batch size are cut; everything else reaches every micro-batch whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from stageflow.errors import FrameError, InputError
from stageflow.graph import Bundle
from stageflow.transport.structure import flatten, unflatten

TARGET = "target"


@dataclass(slots=True)
class MicroBatch:
    """The model's inputs and the target of one micro-batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    def copied_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with tensors of their own."""
        classes: dict[str, type] = {}
        tensors, outline = flatten((self.args, self.kwargs), classes)
        copies = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}
        return unflatten(outline, copies, classes)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class BatchLayout:
    """How a flat batch is put together again; plain and the same for all micro-batches.

    slots: per input (argument position, keyword or TARGET) its structure as `flatten` gives it.
    cut: names of the tensors that are cut -> along which dimension.
    sizes: samples in each micro-batch.
    """

    slots: dict[str, Any]
    cut: dict[str, int]
    sizes: tuple[int, ...]

    def plain(self) -> dict[str, Any]:
        return {"slots": self.slots, "cut": self.cut, "sizes": list(self.sizes)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BatchLayout:
        return cls(plain["slots"], plain["cut"], tuple(plain["sizes"]))


class _Slot(NamedTuple):
    """One input of the model, or the target, as `Batch.microbatch` needs it.

    leaves: (name within the slot, tensor, dimension it is cut along). one: the value is one tensor.
    form: it has no content.
    """

    name: str
    meta: Any
    leaves: list[tuple[str, Tensor, int | None]]
    one: bool
    form: bool


@dataclass
class Batch:
    """A whole batch, flat: tensors by name (``"0/..."`` positional, ``"=mask/..."`` keyword, ``"target/..."``)."""

    tensors: dict[str, Tensor]
    layout: BatchLayout
    classes: dict[str, type]

    def __post_init__(self) -> None:
        self._starts = [0, *itertools.accumulate(self.layout.sizes)]
        self._slots = [self._slot(name, meta) for name, meta in self.layout.slots.items()]
        self._forms: dict[tuple[str, int], Any] = {}  # (slot, size of a micro-batch) -> a value without content

    def _slot(self, name: str, meta: Any) -> _Slot:
        leaves = [
            (leaf[len(name) + 1 :], tensor, self.layout.cut.get(leaf))
            for leaf, tensor in self.tensors.items()
            if leaf.startswith(name + "/")
        ]
        one = isinstance(meta, dict) and meta.keys() == {"tensor"}
        # such values differ in size only, and hold nothing that a stage could change
        form = all(tensor.is_meta for _, tensor, _ in leaves) and (one or not isinstance(meta, list | dict))
        return _Slot(name, meta, leaves, one, form)

    def microbatch(self, index: int) -> MicroBatch:
        """Cut one micro-batch out; its tensors are views, each with a version of its own for autograd: a model that
        writes into its inputs writes into this micro-batch's only."""
        start, size = self._starts[index], self.layout.sizes[index]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        target = None
        for slot in self._slots:
            value = self._form(slot, start, size) if slot.form else self._value(slot, start, size)
            if slot.name == TARGET:
                target = value
            elif slot.name[0] == "=":
                kwargs[slot.name[1:]] = value
            else:
                args.append(value)
        return MicroBatch(tuple(args), kwargs, target)

    def _form(self, slot: _Slot, start: int, size: int) -> Any:
        key = (slot.name, size)
        if key not in self._forms:
            self._forms[key] = self._value(slot, start, size)
        return self._forms[key]

    def _value(self, slot: _Slot, start: int, size: int) -> Any:
        if slot.one:
            ((_, tensor, dim),) = slot.leaves
            return tensor if dim is None else _cut(tensor, dim, start, size)
        tensors = {leaf: t if dim is None else _cut(t, dim, start, size) for leaf, t, dim in slot.leaves}
        return unflatten(slot.meta, tensors, self.classes)

    def bundle(self, wanted: Callable[[str], bool]) -> Bundle:
        """The message that carries this batch to a worker; of tensors nobody there wants, only the form."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if wanted(name)}
        forms = {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in self.tensors.items()
            if name not in tensors
        }
        return Bundle(tensors, {"layout": self.layout.plain(), "forms": forms, "order": list(self.tensors)})

    @classmethod
    def from_bundle(cls, bundle: Bundle, device: torch.device, classes: dict[str, type]) -> Batch:
        """The other end of `bundle`: tensors on the device, unwanted ones on the meta device.

        So a stage can't take values that it was not given for true ones, zeros for instance.
        """
        tensors: dict[str, Tensor] = {}
        forms = bundle.meta["forms"]
        for name in bundle.meta["order"]:
            if name in forms:
                shape, dtype = forms[name]
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            else:
                tensors[name] = bundle.tensors[name].to(device, non_blocking=True)
        return cls(tensors, BatchLayout.from_plain(bundle.meta["layout"]), classes)


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise InputError for tensors of a batch that can't go to a worker."""
    for leaf, tensor in tensors.items():
        if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            _refuse(leaf.partition("/")[0].removeprefix("="), tensor, kind)


def _refuse(name: str, tensor: Tensor, kind: str) -> NoReturn:
    place = f"positional argument {name}" if name.isdigit() else repr(name)
    raise InputError(
        f"{place} of the batch holds a {kind} tensor of {tensor.dtype}; expected a dense one with values, of which the "
        "model itself can make another kind"
    )


def _cut(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    part = tensor.narrow(dim, start, size)
    return part if part.requires_grad else part.data


def cut_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    microbatches: int,
    batch_dims: Mapping[str, int | None],
    positional_names: tuple[str, ...] = (),
) -> Batch:
    """Flatten a batch and decide how it is cut.

    batch_dims: argument name ("target" too, positional ones by the model's own name or by number) -> the dimension
        its tensors are cut along, or None to keep them whole. Others are cut along dimension 0 where its size is the
        batch size: that of the first tensor argument, of the first one named in batch_dims if there is one.
    positional_names: names of the model's positional arguments.
    Raises InputError when there is nothing to cut into micro-batches or sizes disagree.
    """
    classes: dict[str, type] = {}
    slots: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    entries = [(str(i), positional_names[i] if i < len(positional_names) else str(i), a) for i, a in enumerate(args)]
    entries += [("=" + key, key, value) for key, value in kwargs.items()]
    if target is not None:
        entries.append((TARGET, TARGET, target))
    for slot, name, value in entries:
        try:
            flat, slots[slot] = flatten(value, classes, where=f"the batch's {name!r}")
        except FrameError as error:
            raise InputError(str(error)) from None
        for leaf, tensor in flat.items():
            if tensor.is_nested:  # it has no size to cut by
                _refuse(name, tensor, "nested")
            tensors[f"{slot}/{leaf}"] = tensor.detach() if not tensor.requires_grad else tensor
            names[f"{slot}/{leaf}"] = name
    known = {name for _, name, _ in entries} | {slot for slot, _, _ in entries if slot.isdigit()}
    if unknown := set(batch_dims) - known:
        raise InputError(f"batch_dims names {sorted(unknown)}, but this batch has the arguments {sorted(known)}")

    def told(leaf: str) -> tuple[bool, int | None]:
        for key in (names[leaf], leaf.split("/", 1)[0]):
            if key in batch_dims:
                return True, batch_dims[key]
        return False, 0

    size = _batch_size(tensors, told, names)
    cut: dict[str, int] = {}
    for leaf, tensor in tensors.items():
        explicit, dim = told(leaf)
        if dim is None or size is None:
            continue
        if explicit and (tensor.dim() <= dim or tensor.shape[dim] != size):
            raise InputError(
                f"argument {names[leaf]!r} has shape {tuple(tensor.shape)}, but batch_dims says that its dimension "
                f"{dim} is the batch, of size {size}"
            )
        if explicit or (tensor.dim() > 0 and tensor.shape[0] == size):
            cut[leaf] = dim
    _check_target(tensors, cut, size, target is not None, explicit=TARGET in batch_dims)
    sizes = (1,) if size is None else split_sizes(size, microbatches)
    return Batch(tensors, BatchLayout(slots, cut, sizes), classes)


def _batch_size(
    tensors: Mapping[str, Tensor], told: Callable[[str], tuple[bool, int | None]], names: Mapping[str, str]
) -> int | None:
    """The number of samples; None when no tensor has a batch dimension."""
    candidates: list[tuple[int, str]] = []
    for leaf, tensor in tensors.items():
        explicit, dim = told(leaf)
        if dim is None or tensor.dim() <= dim or (leaf.startswith(TARGET + "/") and candidates):
            continue
        candidates.append((0 if explicit else 1, leaf))
    if not candidates:
        return None
    _, leaf = min(candidates, key=lambda item: item[0])
    size = tensors[leaf].shape[told(leaf)[1] or 0]
    if size == 0:
        raise InputError(f"the batch is empty: argument {names[leaf]!r} has shape {tuple(tensors[leaf].shape)}")
    return size


def _check_target(
    tensors: Mapping[str, Tensor], cut: Mapping[str, int], size: int | None, given: bool, explicit: bool
) -> None:
    """A target none of whose tensors has the batch's size is a mistake, not something to hand over whole."""
    leaves = [leaf for leaf in tensors if leaf.startswith(TARGET + "/")]
    if not given or explicit or size is None or not leaves or any(leaf in cut for leaf in leaves):
        return
    shapes = [tuple(tensors[leaf].shape) for leaf in leaves]
    raise InputError(
        f"the batch has {size} samples, but the target has shape {shapes[0] if len(shapes) == 1 else shapes}: "
        "its first dimension must be the batch (or say batch_dims={'target': dim}, None to hand it over whole)"
    )


def split_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Cut `size` samples into at most `parts` micro-batches whose sizes differ by at most one, larger ones first."""
    parts = min(size, parts)
    return tuple(size // parts + (i < size % parts) for i in range(parts))

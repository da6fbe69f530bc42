"""Tensors with a shape, a dtype and a device, and no values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from stageflow.errors import SplitError


class GhostTouched(SplitError):
    """Code asked for the values of a ghost."""

    def __init__(self, key: str, function: str) -> None:
        super().__init__(f"{function} needs the values of {key!r}, which this stage does not have")
        self.key = key
        self.function = function


class Ghost(Tensor):
    """Stands where a tensor would be whose values are elsewhere.

    Shape, dtype, device and the like answer as the true tensor's would, ``requires_grad`` too, although autograd
    itself sees a tensor that doesn't: so no graph is built over ghosts. Any use of its values raises GhostTouched,
    so that a fault in a split can't become a wrong number.

    key: which value it stands for.
    """

    key: str
    shows_grad: bool

    @staticmethod
    def __new__(
        cls,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
        parameter: bool = False,
    ) -> Ghost:
        ghost = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        ghost.key = key
        ghost.shows_grad = requires_grad
        if parameter:
            ghost._is_param = True  # what isinstance(..., nn.Parameter) looks at
        return ghost

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in __new__; Tensor's own would refuse the arguments."""

    @classmethod
    def of(cls, key: str, tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Ghost:
        """A ghost that looks like ``tensor``, on ``device``; dtype: its own, if another."""
        is_parameter = isinstance(tensor, nn.Parameter)
        return cls(key, tuple(tensor.shape), dtype or tensor.dtype, device, tensor.requires_grad, is_parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            ghost = args[0]
            if func in _SHOWN and type(ghost) is Ghost:
                return _SHOWN[func](ghost)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise GhostTouched(_first_key((args, kwargs)), getattr(func, "__name__", str(func)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd does so with tensors it hands around
            return args[0]
        raise GhostTouched(_first_key((args, kwargs)), str(func))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = getattr(self, "_is_param", False)
        return Ghost, (self.key, tuple(self.shape), self.dtype, self.device, self.shows_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        make, arguments = self.__reduce_ex__(2)
        return memo.setdefault(id(self), make(*arguments))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Ghost({self.key!r}, {tuple(self.shape)}, {self.dtype})"


def become(one: Tensor, other: Tensor) -> None:
    """Turn ``one`` into what ``other`` is, wherever it is referred to; ``other`` is not to be used any more.

    As torch.utils.swap_tensors, which however refuses a tensor that autograd keeps. A ghost may be kept so, by a
    checkpoint around it, but only in a graph through which no gradient ever flows.
    """
    if weakref.getweakrefs(one):
        raise SplitError(
            f"the model keeps a weak reference to a value of shape {tuple(one.shape)} that crosses between stages; "
            "keep the tensor itself, or move the boundary"
        )
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__  # type: ignore[misc]
    torch._C._swap_tensor_impl(one, other)


def has_ghost(value: Any) -> bool:
    """Whether a ghost is among arguments of a torch function, which nest in lists, tuples and dicts at most."""
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            kind = type(item)
            if kind is Ghost or (kind in _NESTING and has_ghost(item)):
                return True
        return False
    if kind is dict:
        return any(has_ghost(item) for item in value.values())
    if kind is slice:
        return any(type(item) is Ghost for item in (value.start, value.stop, value.step))
    return kind is Ghost


_NESTING = frozenset({tuple, list, dict, slice})


def _first_key(value: Any) -> str:
    if type(value) is Ghost:
        return value.key
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((key for key in map(_first_key, items) if key), "")


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def _methods(*names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


_SHOWN = {
    Tensor.requires_grad.__get__: lambda ghost: ghost.shows_grad,  # type: ignore[attr-defined]
    Tensor.__repr__: Ghost.__repr__,
}

# What can be asked of a tensor without its values. Such calls are no events: they cost little and change nothing.
METADATA: frozenset[Any] = frozenset(
    _getters(
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "names",
        "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested",
        "is_mkldnn", "is_ipu", "is_xla", "is_maia", "is_mtia", "is_vulkan", "itemsize", "nbytes", "_version",
        "_is_view", "retains_grad", "output_nr", "_backward_hooks", "_base", "_cdata",
    )
    + _methods(
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "get_device",
        "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "storage_offset",
        "__len__", "has_names", "is_same_size", "__hash__", "__repr__", "dim_order", "is_pinned", "is_shared",
        "is_coalesced", "_is_view",
    )
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_signed, torch.is_inference]
    + [torch._C._set_grad_enabled]
)  # fmt: skip

"""The split backward: weight gradients put off from I to W, nothing computed twice.

    forward     y = x wᵀ + b
    B           gx = gy w    gw = gyᵀ x    gb = Σ gy
    I           gx = gy w    keep (x, gy)
    W                        gw = gyᵀ x    gb = Σ gy

Linear layers and convolutions hold nearly all of a model's weights, so they alone are split (Qi et al., Zero Bubble
Pipeline Parallelism, ICLR 2024, Section 2). What else a stage holds (norms, embeddings, custom autograd functions,
compiled parts) gets its whole gradient in I, which is right, only less balanced; a layer of another kind may bring its
own W (see `SplitsItself`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

Pending = list[tuple[Callable[..., None], tuple[Any, ...]]]


@runtime_checkable
class SplitsItself(Protocol):
    """A layer that knows how to put its own weight gradients off.

    In its backward, when ``put_off.pending`` is a list, it appends (function, arguments) that will compute them and add
    them to ``.grad``; when that is None, it computes them at once.
    """

    def split_with(self, put_off: PutOff) -> None:
        """Remember where to put off; called once, before the first forward that gets an I and a W."""


class PutOff:
    """Where the weight gradients of one stage wait for their W.

    splitting: whether forwards running now will get an I and a W (else a whole B).
    pending: the list that an I now running fills; None outside an I, so that gradients asked for by other means
        (``torch.autograd.grad`` inside a forward) are whole.
    """

    def __init__(self) -> None:
        self.splitting = False
        self.pending: Pending | None = None

    def install(self, module: nn.Module) -> int:
        """Make the layers inside `module` that can put off do so; returns how many there are."""
        shared = _used_more_than_once(module)
        count = 0
        for layer in module.modules():
            if isinstance(layer, SplitsItself):
                layer.split_with(self)
                count += 1
                continue
            derived = _splitting_class(type(layer))
            if derived is None or not _holds_its_weights(layer):
                continue
            if any(id(p) in shared for p in layer.parameters(recurse=False)):
                continue
            layer.__class__ = derived
            layer._put_off = self  # type: ignore[assignment]
            count += 1
        return count


def run_pending(pending: Pending) -> None:
    """The W of one micro-batch: compute what was put off and add it to ``.grad``."""
    for compute, arguments in pending:
        compute(*arguments)
    pending.clear()


def _used_more_than_once(module: nn.Module) -> set[int]:
    """Parameters that several modules hold: their gradient is complete only in one piece, so they aren't split."""
    seen: set[int] = set()
    twice: set[int] = set()
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _holds_its_weights(layer: nn.Module) -> bool:
    """Whether a layer's weights are its own parameters; not made in each forward from others (weight norm, pruning)."""
    if isinstance(layer, nn.MultiheadAttention):
        return {"in_proj_weight", "in_proj_bias"} <= layer._parameters.keys() and _holds_its_weights(layer.out_proj)
    return {"weight", "bias"} <= layer._parameters.keys()


def _has_hooks(parameter: Tensor | None) -> bool:
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd would, hooks included."""
    if _has_hooks(parameter):
        torch.autograd.backward((parameter,), (gradient.to(parameter.dtype),))
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient


def _linear_weight_gradients(
    x: Tensor, gy: Tensor, weight: Tensor | None, bias: Tensor | None, transposed: bool
) -> None:
    """gyᵀ x into the weight (xᵀ gy where the weight is stored transposed), Σ gy into the bias; x conjugated."""
    gy = gy.reshape(-1, gy.shape[-1])
    if weight is not None:
        x = x.reshape(-1, x.shape[-1]).conj()
        left, right = (x.t(), gy) if transposed else (gy.t(), x)
        if weight.grad is not None and weight.grad.dtype == gy.dtype and not _has_hooks(weight):
            weight.grad.addmm_(left, right)
        else:
            _accumulate(weight, left @ right)
    if bias is not None:
        _accumulate(bias, gy.sum(0))


class _Linear(torch.autograd.Function):
    """y = x wᵀ + b (x w + b where transposed), whose weight gradients can be put off."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, leaves: Any, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off, ctx.leaves, ctx.transposed = put_off, leaves, transposed
        y = F.linear(x, weight.t() if transposed else weight, bias)
        # of more than two dimensions it is a view, which whoever comes next could not change in place
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        gx = None
        if need_x:
            gx = gy @ (weight.t() if ctx.transposed else weight).conj()
        pending = ctx.put_off.pending
        if pending is None:
            gw = gb = None
            flat = gy.reshape(-1, gy.shape[-1])
            if need_w:
                rows = x.reshape(-1, x.shape[-1]).conj()
                gw = rows.t() @ flat if ctx.transposed else flat.t() @ rows
            if need_b:
                gb = flat.sum(0)
            return gx, gw, gb, None, None, None
        leaf_w, leaf_b = ctx.leaves
        if leaf_w is not None or leaf_b is not None:
            pending.append((_linear_weight_gradients, (x, gy, leaf_w, leaf_b, ctx.transposed)))
        return gx, None, None, None, None, None


def linear(put_off: PutOff, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor:
    """``F.linear`` (``x @ weight + bias`` where transposed) whose weight gradients wait for W."""
    leaves = (weight if weight.requires_grad else None, bias if bias is not None and bias.requires_grad else None)
    if not _can_put_off(put_off, leaves):
        return F.linear(x, weight.t() if transposed else weight, bias)
    if _is_autocast_on(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _autocast(x, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    return _Linear.apply(x, weight, bias, put_off, leaves, transposed)  # type: ignore[no-any-return]


def _is_autocast_on(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # torch knows no autocast there and raises


def _autocast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value


def _can_put_off(put_off: PutOff, leaves: tuple[Tensor | None, ...]) -> bool:
    if not put_off.splitting or not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_transformed():
        return False
    trained = [leaf for leaf in leaves if leaf is not None]
    # a hook has to fire once, with the whole gradient: autograd would fire it in I as well
    return bool(trained) and all(leaf.is_leaf and not _has_hooks(leaf) for leaf in trained)


def _is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) is at work, which asks more of an autograd function than these here do."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Convolution(torch.autograd.Function):
    """A convolution whose weight gradients can be put off. settings: stride, padding, dilation, groups."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, leaves: Any, settings: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off, ctx.leaves, ctx.settings = put_off, leaves, settings
        stride, padding, dilation, groups = settings
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        pending = ctx.put_off.pending
        if pending is None:
            return *_convolution_gradients(x, gy, weight, ctx.settings, (need_x, need_w, need_b)), None, None, None
        gx = _convolution_gradients(x, gy, weight, ctx.settings, (True, False, False))[0] if need_x else None
        leaf_w, leaf_b = ctx.leaves
        pending.append((_convolution_weight_gradients, (x, gy, weight.detach(), leaf_w, leaf_b, ctx.settings)))
        return gx, None, None, None, None, None


def _convolution_gradients(
    x: Tensor, gy: Tensor, weight: Tensor, settings: Any, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    stride, padding, dilation, groups = settings
    zeros = [0] * len(stride)
    bias_sizes = [weight.shape[0]] if mask[2] else None
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        gy, x, weight, bias_sizes, stride, padding, dilation, False, zeros, groups, list(mask)
    )


def _convolution_weight_gradients(
    x: Tensor, gy: Tensor, weight: Tensor, leaf_w: Tensor | None, leaf_b: Tensor | None, settings: Any
) -> None:
    mask = (False, leaf_w is not None, leaf_b is not None)
    _, gw, gb = _convolution_gradients(x, gy, weight, settings, mask)
    if leaf_w is not None and gw is not None:
        _accumulate(leaf_w, gw)
    if leaf_b is not None and gb is not None:
        _accumulate(leaf_b, gb)


class _LinearLayer:
    def forward(self: Any, input: Tensor) -> Tensor:
        return linear(self._put_off, input, self.weight, self.bias)


class _TransposedLinearLayer:
    """The linear layer of GPT-2 in transformers, which stores its weight transposed and calls itself Conv1D."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return linear(self._put_off, x, self.weight, self.bias, transposed=True)


class _ConvolutionLayer:
    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolution_forward(self, input, weight, bias, super()._conv_forward)  # type: ignore[misc]


def _convolution_forward(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plain: Callable[..., Tensor]
) -> Tensor:
    leaves = (weight if weight.requires_grad else None, bias if bias is not None and bias.requires_grad else None)
    dims = len(layer.kernel_size)
    simple = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and x.dim() == dims + 2
    simple = simple and not weight.is_complex()  # torch makes three real ones of it
    if not simple or _is_autocast_on(x) or not _can_put_off(layer._put_off, leaves):
        return plain(x, weight, bias)
    settings = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
    return _Convolution.apply(x, weight, bias, layer._put_off, leaves, settings)  # type: ignore[no-any-return]


class _AttentionLayer:
    """Its projections reach torch as bare weights, out of sight of the layers above; the common case is spelt out."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
        options = {"need_weights": True, **dict(zip(names, args, strict=False)), **kwargs}
        leaves = (self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias)
        simple = (
            query is key
            and key is value
            and query.dim() == 3
            and not options["need_weights"]
            and self._qkv_same_embed_dim
            and self.bias_k is None
            and not self.add_zero_attn
            and not query.is_nested
            and not _is_autocast_on(query)
        )
        if not simple or not _can_put_off(self._put_off, tuple(p for p in leaves if p is not None)):
            return super().forward(query, key, value, *args, **kwargs)  # type: ignore[misc]
        return self._self_attention(query, **{name: options.get(name) for name in (names[0], names[2], names[4])}), None

    def _self_attention(
        self: Any, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool | None
    ) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        batch, length, width = x.shape
        heads = self.num_heads
        packed = linear(self._put_off, x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = packed.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        causal = bool(is_causal) and key_padding_mask is None
        mask = None if causal else _attention_mask(key_padding_mask, attn_mask, batch, heads, x)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        result = linear(self._put_off, attended, self.out_proj.weight, self.out_proj.bias)
        return result if self.batch_first else result.transpose(0, 1)


def _attention_mask(
    padding: Tensor | None, attention: Tensor | None, batch: int, heads: int, like: Tensor
) -> Tensor | None:
    """Both masks as one additive mask that broadcasts over (batch, heads, query, key)."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like.dtype)
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))

    mask = None
    if attention is not None:
        mask = additive(attention)
        mask = mask.view(batch, heads, *mask.shape[-2:]) if mask.dim() == 3 else mask
    if padding is not None:
        keys = additive(padding)[:, None, None, :]
        mask = keys if mask is None else mask + keys
    return mask


# base class, the methods that a subclass must not have changed, what replaces one of them
_SPLITTABLE: list[tuple[type[nn.Module], tuple[str, ...], type]] = [
    (nn.Linear, ("forward",), _LinearLayer),
    (nn.Conv1d, ("forward", "_conv_forward"), _ConvolutionLayer),
    (nn.Conv2d, ("forward", "_conv_forward"), _ConvolutionLayer),
    (nn.Conv3d, ("forward", "_conv_forward"), _ConvolutionLayer),
    (nn.MultiheadAttention, ("forward",), _AttentionLayer),
]


@functools.cache
def _splitting_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass of a layer's class that can put off; None where the layer is of another kind."""
    for base, methods, mixin in _SPLITTABLE:
        if issubclass(kind, base) and all(getattr(kind, name) is getattr(base, name) for name in methods):
            return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return type(kind.__name__, (_TransposedLinearLayer, kind), {"__module__": kind.__module__})
    return None

"""Outputs of micro-batches, put together to the output of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from stageflow.errors import InputError
from stageflow.transport.structure import flatten, unflatten


def merge_outputs(outputs: list[Any], sizes: tuple[int, ...], dims: Collection[int] = (0,)) -> Any:
    """Put the outputs of all micro-batches together: the model's own kind of output for the whole batch.

    dims: along which the inputs are cut.

    A tensor is joined along its first dimension, or one of `dims`: the one in which it has the micro-batch's size.
    Else a floating-point scalar (a loss) becomes the mean weighted by micro-batch size; what is the same in every
    micro-batch stays so; and where all inputs are cut along their first dimension, tensors with several rows for each
    sample (beams, tiles of an image) are joined along it. Raises InputError for anything else, and where several
    dimensions could be the batch.
    """
    if len(outputs) == 1:
        return outputs[0]
    classes: dict[str, type] = {}
    flats, metas = [], []
    for output in outputs:
        flat, meta = flatten(output, classes)
        flats.append(flat)
        metas.append(meta)
    if any(meta != metas[0] for meta in metas[1:]):
        raise InputError(
            "the outputs of the micro-batches differ in more than their tensors, so they can't be put together: "
            f"{metas[0]} and {next(m for m in metas if m != metas[0])}; use microbatches=1"
        )
    merged = {name: _merge(name, [flat[name] for flat in flats], sizes, dims) for name in flats[0]}
    return unflatten(metas[0], merged, classes)


def _merge(name: str, parts: list[Tensor], sizes: tuple[int, ...], dims: Collection[int]) -> Tensor:
    first = parts[0]
    along = [dim for dim in sorted({0, *dims}) if _has_rows(parts, sizes, dim, 1)]
    if len(along) == 1:
        return torch.cat(parts, along[0])
    if not along:
        if first.dim() == 0 and first.dtype.is_floating_point:
            weights = [size / sum(sizes) for size in sizes]
            return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum()
        if all(part.shape == first.shape and torch.equal(part, first) for part in parts):
            return first
        # beside another dimension that is the batch, a first one of several times its size is more likely no batch
        if set(dims) <= {0} and first.dim() > 0 and _has_rows(parts, sizes, 0, first.shape[0] // sizes[0]):
            return torch.cat(parts)
    inputs = f"the inputs are cut along {_dimensions(sorted(dims))}"
    problem = (
        f"it could be joined along {_dimensions(along)}" if along else "nothing to join along, nor the same in each"
    )
    raise InputError(
        f"output {name!r} has shapes {[tuple(part.shape) for part in parts]} in micro-batches of sizes {list(sizes)}; "
        f"{inputs}: {problem}. Use microbatches=1{', or a batch with micro-batches of another size' if along else ''}"
    )


def _has_rows(parts: list[Tensor], sizes: tuple[int, ...], dim: int, each: int) -> bool:
    """Whether the parts have so many entries per sample along a dimension, and agree in the others."""
    first = parts[0].shape
    return all(
        dim < part.dim()
        and part.shape[dim] == each * size
        and part.shape[:dim] == first[:dim]
        and part.shape[dim + 1 :] == first[dim + 1 :]
        for part, size in zip(parts, sizes, strict=True)
    )


def _dimensions(dims: Sequence[int]) -> str:
    return f"dimension {dims[0]}" if len(dims) == 1 else f"dimensions {' and '.join(map(str, dims))}"

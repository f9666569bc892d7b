"""Checks of the arguments of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...autograd.named_axes import Axes

_SYNONYMS = {
    "varying": "sharded",
    "invariant": "replicated",
    "invarying": "replicated",
    "pending": "unreduced",
}


def canonical_word(name: str, to: str, known: Any) -> str:
    word = _SYNONYMS.get(to, to)
    if word not in known:
        raise ValueError(f"{name}(to={to!r}): to must be one of {', '.join(map(repr, known))}")
    return word


def checked_dim(name: str, argument: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"{name}: {argument}={dim} is out of range for a tensor of {ndim} dims; write one from "
            f"{-ndim} to {ndim - 1}"
        )
    return dim % ndim


def check_one_each(name: str, argument: str, axes: Axes, part: Tensor, dim: int) -> None:
    if part.shape[dim] != axes.size:
        raise ValueError(
            f"{name} over {axes} of {axes.size} ranks: dim {dim} ({argument}) of "
            f"{list(part.shape)} must have {axes.size} elements, one for each rank; to split it "
            "into longer parts, pass tiled=True"
        )


def check_no_sizes(name: str, sizes: Sequence[int] | None) -> None:
    if sizes is not None:
        raise ValueError(
            f"{name}: sizes={tuple(sizes)} are lengths of parts to concatenate; pass tiled=True"
        )


def lengths_along(
    name: str, axes: Axes, part: Tensor, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the length of every rank's part along a dim."""
    if sizes is None:
        return (part.shape[dim],) * axes.size
    lengths = tuple(int(n) for n in sizes)
    if len(lengths) != axes.size or lengths[axes.index] != part.shape[dim]:
        raise ValueError(
            f"{name} over {axes} of {axes.size} ranks: sizes={lengths} must hold the length of "
            f"every rank's part along dim {dim}; the part of rank {axes.index} is "
            f"{list(part.shape)}"
        )
    return lengths


def checked_pairs(name: str, axes: Axes, perm: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    pairs = tuple((int(source), int(destination)) for source, destination in perm)
    for side in zip(*pairs, strict=True):
        if len(set(side)) < len(side) or not all(0 <= place < axes.size for place in side):
            raise ValueError(
                f"{name} over {axes}: perm={list(pairs)} must be pairs (source, destination) of "
                f"indices from 0 to {axes.size - 1}, none twice on one side"
            )
    return pairs

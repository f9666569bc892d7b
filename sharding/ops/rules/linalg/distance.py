"""Distances and similarities of vectors: features over which they are taken are whole, or summed up over their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import settled, splits
from ..notation import Rule, einrule
from ..registry import form, rule


def _along(x1: Tensor, x2: Tensor, dim: int, keepdim: bool = False) -> Rule:
    """Operands that broadcast against each other, and a result without `dim`, which is whole."""
    ndim = max(x1.ndim, x2.ndim)
    names = [f"[d{d}]" if d == dim % ndim else f"d{d}" for d in range(ndim)]
    right = [("1" if keepdim else "") if d == dim % ndim else f"d{d}" for d in range(ndim)]
    left = ", ".join(" ".join(names[ndim - x.ndim :]) for x in (x1, x2))
    return einrule(f"{left} -> {' '.join(right)}", x1, x2)


def _is_split_along(x1: Tensor, x2: Tensor, dim: int) -> bool:
    """Whether the dim, counted as in the result of broadcasting, is split in either operand."""
    place = dim % max(x1.ndim, x2.ndim) - max(x1.ndim, x2.ndim)
    return any(x.ndim >= -place and splits(x, [place]) for x in (x1, x2))


@rule("cosine_similarity")
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Rule:
    return _along(x1, x2, dim)


@form("cosine_similarity")
def _cosine_similarity_form(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Callable[..., Any] | None:
    """Over a split dim: two norms and a sum, each with one small reduction."""
    torch.cosine_similarity(x1.detach(), x2.detach(), dim, eps)
    return _cosines if _is_split_along(x1, x2, dim) else None


def _cosines(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """As torch computes it: norms are at least eps, and their gradients are those of the norms themselves."""
    x1, x2 = torch.broadcast_tensors(x1, x2)
    return (_directions(x1, dim, eps) * _directions(x2, dim, eps)).sum(dim)


def _directions(x: Any, dim: int, eps: float) -> Any:
    x = settled(x)
    norm = settled(torch.linalg.vector_norm(x, 2, dim, keepdim=True))
    return x / (norm + (norm.detach().clamp_min(eps) - norm.detach()))


@rule("pairwise_distance")
def _pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Rule:
    return _along(x1, x2, -1, keepdim)


@form("pairwise_distance")
def _pairwise_distance_form(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    return _pairwise if _is_split_along(x1, x2, -1) else None


def _pairwise(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Over split features, the norm of the difference."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("pdist")
def _pdist(input: Tensor, p: float = 2) -> Rule:
    """Every row meets every other, in an order that no split follows."""
    return einrule("[n] [m] -> 1", input)


_MATMUL_FROM = 25  # rows from which torch takes Euclidean distances by a product of matrices; aten/src/ATen/native/Distance.cpp


@rule("cdist")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary") -> Rule:
    """Rows on both sides are split freely; which way a part is computed is decided by the whole, as in one process."""
    if compute_mode == "use_mm_for_euclid_dist_if_necessary":
        many = max(x1.shape[-2], x2.shape[-2]) > _MATMUL_FROM
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    local = partial(_cdist_local, mode=compute_mode)
    return einrule("... p [m], ... r [m] -> ... p r", x1, x2, local=local)


def _cdist_local(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None, *, mode: str | None) -> Tensor:
    return torch.cdist(x1, x2, p, mode)  # type: ignore[arg-type]

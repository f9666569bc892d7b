"""Distances and similarities of vectors: features are whole, or sums over parts are reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import is_split, reduce_pending
from ..notation import Rule, aligned_along, einrule
from ..registry import decomposition, rule, rules


def _is_split_along(x1: Tensor, x2: Tensor, dim: int) -> bool:
    """Return whether the dim, counted as in the broadcast result, is split in either operand."""
    last = dim % max(x1.ndim, x2.ndim) - max(x1.ndim, x2.ndim)
    return any(x.ndim >= -last and is_split(x, [last]) for x in (x1, x2))


@decomposition(
    "cosine_similarity",
    check=torch.cosine_similarity,
    when=lambda a: _is_split_along(a.x1, a.x2, a.dim),
    rule=lambda a: einrule(aligned_along(a.dim, "[k]", "", a.x1, a.x2), a.x1, a.x2),
)
def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Take two norms, at least eps as in torch, and a sum, each with one small reduction."""
    x1, x2 = torch.broadcast_tensors(x1, x2)
    return (_directions(x1, dim, eps) * _directions(x2, dim, eps)).sum(dim)


def _directions(x: Any, dim: int, eps: float) -> Any:
    x = reduce_pending(x)
    norm = reduce_pending(torch.linalg.vector_norm(x, 2, dim, keepdim=True))
    return x / (norm + (norm.detach().clamp_min(eps) - norm.detach()))


@decomposition(
    "pairwise_distance",
    when=lambda a: _is_split_along(a.x1, a.x2, -1),
    rule=lambda a: einrule(
        aligned_along(-1, "[k]", "1" if a.keepdim else "", a.x1, a.x2), a.x1, a.x2
    ),
)
def _pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Return the norm of the difference."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


# Every row is combined with every other, in an order that no split follows.
rules({"pdist(input, p=2)": "[n] [m] -> 1"})

# rows from which torch takes Euclidean distances by a product of matrices;
# aten/src/ATen/native/Distance.cpp
_MATMUL_FROM = 25


@rule("cdist")
def _cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary",
) -> Rule:
    """Return the rule; the global size determines the algorithm for a part, as in one process."""
    mode: Any = compute_mode
    if mode == "use_mm_for_euclid_dist_if_necessary":
        many = max(x1.shape[-2], x2.shape[-2]) > _MATMUL_FROM
        mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    return einrule(
        "... p [m], ... r [m] -> ... p r",
        x1,
        x2,
        local=lambda x1, x2, p=2.0, compute_mode=None: torch.cdist(x1, x2, p, mode),
    )

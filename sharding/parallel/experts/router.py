"""Routers: top-k choice of experts for tokens, and the load-balancing loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout.layout import Layout
from ...layout.spec import P
from ...ops.rules.decomposition_utils import from_parts, splitting_axes
from ...tensor.sharded_tensor import ShardedTensor


class Routing(NamedTuple):
    """The experts that tokens choose, and their weights.

    Attributes:
        experts: indices of experts, first choice first [... k], int64.
        weights: the weight of each choice [... k].
    """

    experts: Tensor
    weights: Tensor


def top_k_routing(logits: Tensor, k: int, *, normalize: bool = True) -> Routing:
    """top_k_routing(logits, k) -> Routing: the k experts with the largest logits per token.

    Weighted by the softmax.

    Args:
        logits: of all experts [... e], whole in the last dim.
        k: the number of experts per token.
        normalize: take the softmax over the chosen experts, so that weights sum to 1; else over all
            experts (Switch).

    Communication: none if the last dim is whole.

    Example:
        >>> routing = sm.parallel.top_k_routing(x @ router, 2)
    """
    if normalize:
        scores, experts = logits.topk(k, -1)
        return Routing(experts, scores.softmax(-1))
    weights, experts = logits.softmax(-1).topk(k, -1)
    return Routing(experts, weights)


def load_balance_loss(logits: Tensor, experts: Tensor) -> Tensor:
    """load_balance_loss(logits, experts) -> a scalar between 1 and e.

    1 if all experts get the same share, e if one gets all.

    e * sum over experts of (its share of the choices) * (its mean probability): Fedus et al. 2021,
    "Switch Transformers", equations 4 to 6, for any number of choices. Its gradient is through the
    probabilities only. Shares and means are over the global batch.

    Args:
        logits: of the router [... e], with the last dim whole. Plain logits are a separate batch.
        experts: the chosen experts [... k], as in `Routing`.

    Raises:
        TypeError: a plain tensor together with a sharded one.

    Communication: two reductions of e numbers over the axes that split the tokens; backward none.

    Example:
        >>> loss = loss + 0.01 * sm.parallel.load_balance_loss(logits, routing.experts)
    """
    count = logits.shape[-1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    share = _counts(logits, experts, count, dtype) / experts.numel()
    likely = logits.softmax(-1, dtype=dtype).mean(tuple(range(logits.ndim - 1)))
    return count * (share * likely).sum()


def _counts(logits: Tensor, experts: Any, count: int, dtype: torch.dtype) -> Tensor:
    """Return how many choices each expert gets."""

    def count_local(part: Tensor) -> Tensor:
        flat = part.flatten()  # the host waits for a bincount
        return flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat)).to(dtype)

    if not isinstance(logits, ShardedTensor) and not isinstance(experts, ShardedTensor):
        return count_local(experts)
    check_sharded("load_balance_loss", {"logits": logits, "experts": experts})
    split = {
        axis: "sum" for dim in range(experts.ndim) for axis in splitting_axes(experts._layout, dim)
    }
    layout = Layout.of(experts.mesh, P(unreduced=split), (count,), dtype)
    return from_parts(layout, count_local, experts).redistribute(P())


def check_sharded(name: str, tensors: dict[str, Any]) -> None:
    """Raise a TypeError if a tensor is plain."""
    for path, x in tensors.items():
        if not isinstance(x, ShardedTensor):
            shape = f" of shape {list(x.shape)}" if isinstance(x, Tensor) else ""
            raise TypeError(
                f"{name}: {path} is a plain {type(x).__name__}{shape}; place it on the mesh with "
                "sm.from_local(x, mesh, P(...)) or sm.device_put(x, mesh, P(...))"
            )

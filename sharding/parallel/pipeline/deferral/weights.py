"""Weights, and their gradients in one backward that is split in two.

    weight ------------------------------- _LaterGrad ---- root       an edge to the weight
    weight, detached ---- operator ---- ... ---- outputs              no edge

Backward for the inputs starts at the outputs. It does not reach the weight; the operator stores in
a `WeightGrad` how to compute its gradient. Backward for the weights starts at the roots, computes
the gradients there, and continues as any backward does: through a cast, a transpose, or the gather
of a `fully_shard` unit to the parameter, its hooks and `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ....tensor.sharded_tensor import ShardedTensor

_GATHER_OF_UNIT = "_GatherParamsBackward"
# Nodes of autograd through which a tensor is still a weight: casts, views and copies of one, and
# the conversions of sharded parameters. None of them saves a tensor.
_NODES_OF_WEIGHTS = frozenset(
    {
        _GATHER_OF_UNIT,
        "AliasBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "TransposeBackward1",
        "UnbindBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        "_RedistributeBackward",
        "_ScaleGradBackward",
        "_ToLocalBackward",
    }
)


class WeightGrad:
    """The gradient of a weight from one of its uses.

    Attributes:
        compute: returns the gradient; None until the backward for the inputs has met the use.
    """

    __slots__ = ("compute",)

    def __init__(self) -> None:
        self.compute: Callable[[], Tensor] | None = None

    def take(self, _: Tensor) -> Tensor:
        """Compute the gradient, in place of the one given to the root, and forget how."""
        compute, self.compute = self.compute, None
        return compute()  # type: ignore[misc]


class _LaterGrad(torch.autograd.Function):
    """Nothing in forward; a gradient that is computed late, in backward.

    Its result shares no memory with the weight.
    """

    @staticmethod
    def forward(ctx: Any, grad: WeightGrad, weight: Tensor) -> Tensor:
        ctx.grad = grad
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.grad.take(*grads)


class Weights:
    """The weights that one forward uses, and their gradients."""

    def __init__(self) -> None:
        self._uses: list[tuple[WeightGrad, Tensor]] = []  # with the root of each
        self._sharded_leaves: dict[int, Tensor] = {}  # local parts of sharded parameters, by id
        self._anchors: dict[torch.device, Tensor] = {}

    def add_sharded(self, tensors: Iterable[Any]) -> None:
        """Treat the local parts of the sharded parameters among these tensors as weights."""
        for x in tensors:
            if isinstance(x, ShardedTensor) and isinstance(x, nn.Parameter):
                self._sharded_leaves[id(x._local)] = x._local

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor that requires grad is a parameter, or one converted.

        Converted are: views, copies and casts, the result of a redistribution, and parameters that
        a `fully_shard` unit has gathered.
        """
        node = x.grad_fn
        if node is None:
            return self._is_weight_leaf(x)
        while (name := type(node).__name__) in _NODES_OF_WEIGHTS:
            if name == _GATHER_OF_UNIT:
                return True
            edges = node.next_functions
            if len(edges) > 1:
                edges = [edge for edge in edges if edge[0] is not None]
                if len(edges) > 1:
                    return False
            node = edges[0][0] if edges else None
            if node is None:
                return False
        return name == "AccumulateGrad" and self._is_weight_leaf(node.variable)  # type: ignore[attr-defined]

    def _is_weight_leaf(self, x: Tensor) -> bool:
        return isinstance(x, nn.Parameter) or id(x) in self._sharded_leaves

    def add_use(self, weight: Tensor) -> WeightGrad:
        """Return the gradient of a new use of a weight, in the order of forward.

        Autograd runs the node that was created last first, so gradients are summed in the order of
        a backward that is not split.
        """
        grad = WeightGrad()
        if weight.is_leaf:  # its memory lives longer than its uses
            root = weight.view_as(weight)
            root.register_hook(grad.take)
        else:
            root = _LaterGrad.apply(grad, weight)  # type: ignore[assignment]
        self._uses.append((grad, root))
        return grad

    def anchor(self, device: torch.device) -> Tensor:
        """Return an empty leaf that requires grad.

        As an operand of a use it makes the result require grad where no other operand does.
        """
        anchor = self._anchors.get(device)
        if anchor is None:
            anchor = torch.empty(0, device=device, requires_grad=True)
            self._anchors[device] = anchor
        return anchor

    def drop_unused(self) -> None:
        """Forget uses without a gradient, such as those of recomputations."""
        self._uses = [(grad, root) for grad, root in self._uses if grad.compute is not None]

    def take_roots(self) -> list[Tensor]:
        """Return the tensors from which backward computes all gradients, and forget them."""
        uses, self._uses = self._uses, []
        return [root for grad, root in uses if grad.compute is not None]

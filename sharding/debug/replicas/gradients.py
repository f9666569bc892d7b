"""Check that the gradients of replicas agree, where a replicated value has left as plain tensors and all ranks must use it alike: by
`to_local`, or as the gradient of a plain tensor that counts as replicated.

The check is made when a signature is first seen: the lines of the program that lead to the call of `to_local`, the layout, and which one
of these it is in the backward pass. What is called ten times in a loop is checked ten times in the first pass and not in the second. All of
it is the same on ranks that run one program, and a signature is kept only after a check that the whole group has passed; so ranks decide
alike.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.group import Group
from ...layout.bounded_cache import keep
from ...layout.layout import Layout
from ...tensor.autograd import engine_hooks

CHECKS = (True, False, "always")
LEFT_BY_TO_LOCAL = (
    "the gradients of to_local() differ between the replicas on axes {axes} of {layout}: each rank used the value differently; say "
    "to_local(grad_placements=[Partial() on those axes]) so that they are summed"
)
USED_DIFFERENTLY = (
    "the gradient of a plain tensor that is replicated on axes {axes} ({layout}) is to be differentiated, and each rank used it "
    "differently: the gradients of that gradient differ between the replicas. A plain tensor is one value for all ranks, and so is its "
    "gradient: compute the same of it on every rank, or make it a ShardedTensor before ranks go different ways, "
    "ShardedTensor.from_local(gradient, mesh, P())"
)


class _Passed:
    """The signatures that have passed in a group.

    Attributes:
        signatures: those, in the order in which they passed.
        task: the backward pass that ran last.
        counts: how many gradients with a path and layout have come in it.
    """

    def __init__(self) -> None:
        self.signatures: dict[Any, None] = {}
        self.task = -1
        self.counts: Counter[Any] = Counter()

    def signature(self, path: int, layout: Layout) -> Any:
        task = engine_hooks.current_backward()
        if task != self.task:
            self.task = task
            self.counts.clear()
        place = path, layout.stamp
        self.counts[place] += 1
        return place, self.counts[place]


def check_replicas_agree(grad: Tensor, layout: Layout, path: int | None, text: str = LEFT_BY_TO_LOCAL) -> None:
    """Check that the ranks along the replicated axes of `layout` have the same gradient, if this signature has not passed before.

    Args:
        path: the `call_path` of where the value left; None to check whatever has passed.
        text: of the error, with places for `axes` and `layout`.

    Raises:
        RuntimeError: on every rank of the axes, if the replicas differ.

    Communication: an all_reduce of 40 bytes over the replicated axes, if it checks.
    """
    mesh: Any = layout.mesh
    if not layout.replicated_axes or mesh.coordinate is None:
        return
    group = mesh.group(layout.replicated_axes)
    if path is None:
        _compare(grad, layout, group, text)
        return
    passed = group.agreed.setdefault(_Passed, _Passed())
    signature = passed.signature(path, layout)
    if signature not in passed.signatures:
        _compare(grad, layout, group, text)
        keep(passed.signatures, signature, None)


def _compare(grad: Tensor, layout: Layout, group: Group, text: str) -> None:
    """Compare checksums of the gradient in a group: of its values, to half the digits of its dtype, and of where it is not finite."""
    values = torch.view_as_real(grad.detach().resolve_conj()) if grad.is_complex() else grad.detach()
    wide = values.double().flatten()
    ramp = torch.linspace(1, 2, wide.numel(), dtype=torch.float64, device=wide.device)
    finite = wide.isfinite()
    wide = wide.where(finite, 0)
    checks = torch.stack([(wide * ramp).sum(), (~finite * ramp).sum()])
    extremes = torch.cat([checks, -checks, wide.abs().sum()[None]])
    group.all_reduce(extremes, "max")
    if extremes.is_meta:
        return  # no values to compare
    high, high_odd, low, low_odd, scale = extremes.tolist()
    if high + low > math.sqrt(torch.finfo(values.dtype).eps) * scale or high_odd + low_odd > 1e-9:
        raise RuntimeError(text.format(axes=layout.replicated_axes, layout=layout))

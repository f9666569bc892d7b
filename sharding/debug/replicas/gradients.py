"""`check_replicas_agree`: compare the gradients of replicas of a value that left as plain tensors, which all ranks must use the same way.

That is the result of `to_local`, or the gradient of a plain tensor that counts as replicated. The check is made when a signature is first
seen: the lines of the program that lead to the call of `to_local`, the layout, and how many with these came before in the backward
pass. What is called ten times in a loop is checked ten times in the first pass and not in the second. Signatures are the same on ranks
that run the same program, and one is kept only after the whole group has passed the check, so all ranks make the same decision.
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
    "the gradients of to_local() differ between the replicas on axes {axes} of {layout}: each rank used the value differently; write "
    "to_local(grad_placements=[Partial() on those axes]) so that they are summed"
)
USED_DIFFERENTLY = (
    "the gradient of a plain tensor that is replicated on axes {axes} ({layout}) is to be differentiated, and each rank used it "
    "differently: the gradients of that gradient differ between the replicas. A plain tensor is one value for all ranks, and so is its "
    "gradient: compute the same of it on every rank, or make it a ShardedTensor before ranks go different ways, "
    "ShardedTensor.from_local(gradient, mesh, P())"
)


class _Passed:
    """The signatures that have passed the check in a group.

    Attributes:
        signatures: in the order in which they passed.
        task: the last backward pass.
        counts: the number of gradients with a path and layout in it.
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
        key = path, layout.fingerprint
        self.counts[key] += 1
        return key, self.counts[key]


def check_replicas_agree(grad: Tensor, layout: Layout, path: int | None, text: str = LEFT_BY_TO_LOCAL) -> None:
    """Check that the ranks along the replicated axes of `layout` have the same gradient, unless this signature has passed before.

    Args:
        path: the `call_path` at which the value left; None to check in any case.
        text: the error, with the fields `axes` and `layout`.

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
    """Compare checksums of the gradient in a group: of its values, to half the digits of its dtype, and of its non-finite elements."""
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
    high, high_infinite, low, low_infinite, scale = extremes.tolist()
    if high + low > math.sqrt(torch.finfo(values.dtype).eps) * scale or high_infinite + low_infinite > 1e-9:
        raise RuntimeError(text.format(axes=layout.replicated_axes, layout=layout))

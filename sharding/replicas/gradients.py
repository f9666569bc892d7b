"""`check_replicas_agree`: compare the gradients of replicas of a value.

It left as plain tensors, which all ranks must use the same way.

Gradients agree if they are equal up to rounding: replicas may sum in another order. Ranks exchange
random projections of their gradients and the norm; two projections may differ by `tolerance` times
the largest norm. If the norm of the difference is d times that norm, all 8 projections miss it with
a probability of about (0.8 * tolerance / d) ** 8. Elements that are not finite must be the same
ones.

That is the result of `to_local`, or the gradient of a plain tensor that counts as replicated. The
check is made when a signature is first seen: the lines of the program that lead to the call of
`to_local`, the layout, and how many with these came before in the backward pass. What is called ten
times in a loop is checked ten times in the first pass and not in the second. Signatures are the
same on ranks that run the same program, and one is kept only after the whole group has passed the
check, so all ranks make the same decision.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...mesh.comm.dispatch_modes import outside_of_program_modes
from ...mesh.comm.group import Group
from ..autograd import engine_hooks
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from .bit_hash import GOLDEN, bit_hash, flat_of, permute_

CHECKS = (True, False, "always")
LEFT_BY_TO_LOCAL = (
    "the gradients of to_local() differ between the replicas on axes {axes} of {layout}: each rank "
    "used the value differently; write to_local(grad_placements=[Partial() on those axes]) so that "
    "they are summed"
)
USED_DIFFERENTLY = (
    "the gradient of a plain tensor that is replicated on axes {axes} ({layout}) is to be "
    "differentiated, and each rank used it differently: the gradients of that gradient differ "
    "between the replicas. A plain tensor is one value for all ranks, and so is its gradient: "
    "compute the same of it on every rank, or make it a ShardedTensor before ranks go different "
    "ways, ShardedTensor.from_local(gradient, mesh, P())"
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


def check_replicas_agree(
    grad: Tensor,
    layout: Layout,
    path: int | None,
    text: str = LEFT_BY_TO_LOCAL,
    precision: torch.dtype | None = None,
) -> None:
    """Check that the ranks along the replicated axes of `layout` have the same gradient.

    Unless this signature has passed before.

    Args:
        path: the `call_path` at which the value left; None to check in any case.
        text: the error, with the fields `axes` and `layout`.

        precision: a dtype in which the gradient was computed, if that is coarser than its own.

    Raises:
        RuntimeError: on every rank of the axes, if the replicas differ by more than rounding
            (`tolerance`).

    Communication: an all_reduce of 152 bytes over the replicated axes, if it checks.
    """
    mesh: Any = layout.mesh
    if not layout.replicated_axes or mesh.coordinate is None:
        return
    group = mesh.group(layout.replicated_axes)
    if path is None:
        _compare(grad, layout, group, text, precision)
        return
    passed = group.agreed.setdefault(_Passed, _Passed())
    signature = passed.signature(path, layout)
    if signature not in passed.signatures:
        _compare(grad, layout, group, text, precision)
        keep(passed.signatures, signature, None)


def _compare(
    grad: Tensor, layout: Layout, group: Group, text: str, precision: torch.dtype | None
) -> None:
    """Compare the gradient with those of the group, up to rounding.

    By random projections, its norm and where it is not finite.
    """
    values = (
        torch.view_as_real(grad.detach().resolve_conj()) if grad.is_complex() else grad.detach()
    )
    with outside_of_program_modes():
        sums, norm, not_finite = _projections(flat_of(values))
        extremes = torch.cat([sums, -sums, not_finite, -not_finite, norm])
    group.all_reduce(extremes, "max")
    if extremes.is_meta:
        return  # no values to compare
    high, low, positions, largest_norm = extremes.split([PROJECTIONS, PROJECTIONS, 2, 1])
    bound = tolerance(values.dtype, precision) * largest_norm
    if bool((high + low > bound).any() | (positions.sum() != 0)):
        raise RuntimeError(text.format(axes=layout.replicated_axes, layout=layout))


# -- random projections ----------------------------------------------------------------------------

PROJECTIONS = 8
_TERMS = 2  # products of an element's and a row's factor that make up a weight
_ROW = 1 << 14
_ROWS_AT_A_TIME = 64


def tolerance(dtype: torch.dtype, precision: torch.dtype | None = None) -> float:
    """Return the difference of two projections, relative to the gradient's norm, due to rounding.

    This is half the digits of the gradient's dtype, or of the dtype in which it was computed if
    that is coarser.
    """
    return math.sqrt(max(torch.finfo(t).eps for t in (dtype, precision or dtype)))


def _projections(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return projections of a 1-d tensor, its norm, and a hash of non-finite positions.

    The hash is 0 if all elements are finite.

    A projection is a sum with random weights of mean 0 and variance 1, which depend on the position
    alone. The weights are continuous, not signs: sums with random signs of two tensors that differ
    in two elements by the same amount are equal with probability 1/2, while the density of a sum
    with uniform weights is at most sqrt(2) over its norm (Ball 1986, "Cube slicing in R^n").
    """
    sums, norm = _weighted_sums(flat)
    not_finite = sums.new_zeros(1)
    if not flat.is_meta and not bool(sums.isfinite().all()):
        finite = flat.isfinite()
        sums, norm = _weighted_sums(flat.where(finite, 0))
        if not bool(finite.all()):
            not_finite += bit_hash(finite) >> 12  # a float64 holds 53 bits
    return sums, norm, not_finite


def _weighted_sums(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the projections and the norm.

    The weight of element j of row i, of `_ROW` elements, is the sum over `_TERMS` of u[j] * v[i]:
    one pass over the tensor, as a product with a matrix that stays in the cache.
    """
    sums = torch.zeros(PROJECTIONS * _TERMS, dtype=torch.float64, device=flat.device)
    squares = torch.zeros(1, dtype=torch.float64, device=flat.device)
    columns = _of_elements(flat.device)
    for start in range(0, flat.numel(), _ROW * _ROWS_AT_A_TIME):
        part = flat[start : start + _ROW * _ROWS_AT_A_TIME].double()
        squares += part.square().sum()
        count = part.numel() // _ROW
        factors = _of_rows(start // _ROW, count + 1, flat.device)
        sums += (part[: count * _ROW].view(count, _ROW) @ columns * factors[:-1]).sum(0)
        rest = part[count * _ROW :]
        sums += rest @ columns[: rest.numel()] * factors[-1]
    return sums.view(_TERMS, PROJECTIONS).sum(0), squares.sqrt()


@lru_cache(maxsize=8)
def _of_elements(device: torch.device) -> Tensor:
    """Return the factors of the elements of a row: uniform, of variance 1."""
    with _disable_current_modes():
        return (2 * math.sqrt(3)) * (_uniform(0, _ROW, device) - 0.5)


def _of_rows(first: int, count: int, device: torch.device) -> Tensor:
    """Return the factors of rows: random directions, one a projection; all rows count equally."""
    uniform = _uniform((1 << 40) + first * PROJECTIONS * _TERMS, count, device) - 0.5
    directions = uniform.view(count, _TERMS, PROJECTIONS)
    return (directions / directions.norm(dim=1, keepdim=True)).view(count, -1)


def _uniform(counter: int, count: int, device: torch.device) -> Tensor:
    """Return [count, columns] numbers of [0, 1), the same everywhere: SplitMix64 of a counter."""
    columns = PROJECTIONS * _TERMS
    words = torch.arange(1, 1 + count * columns, device=device).add_(counter).mul_(GOLDEN)
    words ^= (words >> 30).bitwise_and_((1 << 34) - 1)
    return (
        (permute_(words) >> 11)
        .bitwise_and_((1 << 53) - 1)
        .double()
        .mul_(2.0**-53)
        .view(count, columns)
    )

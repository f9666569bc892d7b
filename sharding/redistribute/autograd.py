"""Redistribution of local tensors, with gradients.

    forward    src ------------- plan(src, dst) ------------> dst
    backward   dual(src) <-- plan(dual(dst), dual(src)) --- dual(dst)

The gradient of a tensor laid out as L is laid out as dual(L) (pending sum <-> replicated, sharded
<-> itself), so the backward of a redistribution is the redistribution between the duals: all_gather
<-> reduce_scatter, all_reduce <-> all_reduce, a slice <-> a pad with zeros (`linear.py`). Pending
max, min, average and product are not linear in this sense and are composed from operations that are
(`pending_kinds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.pending import Pending
from ...mesh.comm.work import DONE
from ..autograd.engine_hooks import transforming
from ..layout.layout import Layout
from .executor import Pair, executor
from .linear import apply_node, cast, is_linear, redistribute_linear, start_linear
from .pending_kinds import redistribute_nonlinear


def redistribute_local(
    local: Tensor, src: Layout, dst: Layout, *, backward_dtype: torch.dtype | None = None
) -> Tensor:
    """Take this rank's part of a tensor from layout `src` to layout `dst`.

    The result may share memory with `local` if the plan is a slice.

    Args:
        local: this rank's box under `src`; if in another dtype, it is cast on the way (and its
            gradient back).
        src: the layout of `local`.
        dst: the wanted layout: same mesh, global shape and dtype.
        backward_dtype: dtype in which the gradient is sent; by default the gradient's own.

    Returns:
        This rank's box under `dst`.

    Raises:
        ValueError: different meshes, shapes or dtypes.

    Communication: the plan's, over the axes that differ; none if the layouts are equal.
    """
    if src is dst:
        return cast(local, dst.dtype)
    if (local.requires_grad and torch.is_grad_enabled()) or transforming():
        redistribute = redistribute_linear if is_linear(src, dst) else redistribute_nonlinear
        return redistribute(local, src, dst, backward_dtype)
    return executor(src, dst)(local)


def redistribute_locals(
    locals_: Sequence[Tensor], pairs: Sequence[Pair], *, backward_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Call `redistribute_local` for tensors at once, in a bucket per group and dtype, both ways.

    Communication: as `start_redistribute`.
    """
    return start_redistribute(list(locals_), pairs, backward_dtype=backward_dtype).wait()


def start_redistribute(
    tensors: list[Tensor],
    pairs: Sequence[Pair],
    *,
    backward_dtype: torch.dtype | None = None,
    donate: bool = False,
    outs: Sequence[Tensor] | None = None,
    **options: Any,
) -> Pending[list[Tensor]]:
    """Launch a redistribution of one or more tensors, and return the results to come.

    Args:
        tensors: a list of this rank's parts, which is emptied.
        pairs: for each of them the layouts before and after.
        donate: the parts may be overwritten, and results may share their memory.
        outs: contiguous tensors for the results.
        options: max_bytes, accumulate_dtype, transport: see `plan`.

    Communication: the plans'; collectives of one stage with the same group, kind and dtype are one.
        A tensor that requires grad and is pending with another kind than sum is redistributed by
        itself, and waited for at once.
    """
    if not tensors:
        return Pending(list, DONE)
    if transforming():
        moved = [
            redistribute_local(x, *pair, backward_dtype=backward_dtype)
            for x, pair in zip(tensors, pairs, strict=True)
        ]
        tensors.clear()
        return Pending(lambda: moved, DONE)
    nonlinear = [
        i
        for i, x in enumerate(tensors)
        if x.requires_grad and torch.is_grad_enabled() and not is_linear(*pairs[i])
    ]
    if not nonlinear:
        return start_linear(tensors, pairs, backward_dtype, donate=donate, outs=outs, **options)
    results = {
        i: redistribute_nonlinear(tensors[i], *pairs[i], backward_dtype, **options)
        for i in nonlinear
    }
    rest = [i for i in range(len(tensors)) if i not in results]
    linear_tensors = [tensors[i] for i in rest]
    tensors.clear()
    if not rest:
        return Pending(lambda: [results[i] for i in sorted(results)], DONE)

    def in_order(linear: list[Tensor]) -> list[Tensor]:
        by_index = {**results, **dict(zip(rest, linear, strict=True))}
        return [by_index[i] for i in sorted(by_index)]

    return start_linear(
        linear_tensors, [pairs[i] for i in rest], backward_dtype, donate=donate, **options
    ).then(in_order)


def with_gradient_of_redistribute(
    local: Tensor, src: Layout, dst: Layout, result: Tensor
) -> Tensor:
    """Return `result` with the gradient of `redistribute_local(local, src, dst)`.

    `result` equals that, but was computed in another way.

    Communication: none forward; backward, the plan's between the duals.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        return result
    (out,) = apply_node([(src, dst, None, None)], None, Pending(lambda: [result]), [local])
    return out

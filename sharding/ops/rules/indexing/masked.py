"""Operators with a result shape that depends on values.

`nonzero`, `masked_select`, `x[mask]`, `unique`.

Every rank works on its own part, and one small gather collects the lengths of the results. If the
parts follow each other in row-major order, as they do when only the first dim is split, these are
the parts of the result:

    x over 3 ranks, rows      [1 0 | 0 0 | 2 3]
    x[x > 0]                  [1 |  | 2 3]             sizes (1, 0, 2)

Other splits are first moved to the first dim, by one exchange of the operand and one of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from ....layout.layout import Layout
from ....layout.spec import Cut, P
from ...dispatch import wrap
from ..decomposition_utils import all_splitting_axes, as_replicated, reduce_pending, unshard
from ..elementwise.pointwise import is_operand
from ..registry import decomposition

Decomposition = Callable[..., Any]


def split_by_rows(x: Any, ndim: int) -> Any:
    """Return the tensor with its first dim split over the axes that split its first `ndim` dims."""
    x = reduce_pending(x)
    inner = [axis for dim in x.spec.dims[1:ndim] for axis in dim]
    if not inner:
        return x
    first = [*x.spec.cuts[0], *[Cut((axis,)) for axis in inner]]
    return x.redistribute(P.of_cuts([first, *[()] * (ndim - 1), *x.spec.cuts[ndim:]], {}))


def concatenate_parts(
    mesh: Any, axes: tuple[str, ...], local: Tensor, shape: Sequence[int] = (), cuts: Any = ()
) -> Any:
    """Return the tensor whose parts along its first dim are the ranks' `local`, of any lengths.

    Args:
        mesh, axes: the ranks, in order.
        shape, cuts: of the other dims.

    Raises:
        NotImplementedError: on a rank outside the mesh, which cannot know how long it is.
    """
    check_inside(mesh)
    counts = Layout.of(mesh, P(axes), (mesh.size(axes) if axes else 1,), torch.int64)
    sizes = tuple(wrap(torch.tensor([len(local)], device=local.device), counts).tolist())
    spec = P.of_cuts([[Cut(axes, sizes)] if axes else (), *cuts], {})
    return wrap(local, Layout.of(mesh, spec, (sum(sizes), *shape), local.dtype))


def check_inside(mesh: Any) -> None:
    """Refuse a rank outside the mesh, which cannot know the shape of the result.

    Raises:
        NotImplementedError: this rank is outside.
    """
    if mesh.coordinate is None:
        raise NotImplementedError(
            "the shape of the result depends on values, and this rank, outside the mesh, does not "
            "have them"
        )


def check_not_recorded(
    name: str,
    x: Any,
    advice: str = "Keep the shape: torch.where, a product with the mask, or its sum for a number",
) -> None:
    """Refuse an operator whose result has a shape that depends on the values of x.

    Raises:
        JitError: inside `sm.jit(fullgraph=True)`.
    """
    if thread_context.recorder is not None:
        thread_context.recorder.refuse(
            f"the shape of the result of {name} depends on values, of {x._layout}, and a graph has "
            "one shape",
            advice,
        )


# -- boolean masks ---------------------------------------------------------------------------------


@decomposition("nonzero", "argwhere")
def _nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    check_not_recorded("nonzero", input)
    x = split_by_rows(input.detach(), input.ndim)
    local_indices = torch.nonzero(x._local)
    if x.ndim and len(local_indices):
        local_indices[:, 0] += x._layout.box[0][0]
    indices = concatenate_parts(
        x.mesh, x.spec.dims[0] if x.ndim else (), local_indices, (x.ndim,), [()]
    )
    if not as_tuple:
        return indices
    # torch treats a 0-d tensor as one of one element here
    return indices.unbind(1) if x.ndim else (indices.new_zeros((len(indices),), dtype=torch.int64),)


@decomposition("torch.where", when=lambda a: not a.choices and not a.named)
def _where(condition: Any, *choices: Any, **named: Any) -> Any:
    """Return the indices for `where(mask)`; with choices it is an elementwise operator."""
    return _nonzero(condition, as_tuple=True)


@decomposition("masked_select", when=lambda a: is_operand(a.input) and is_operand(a.mask))
def _masked_select(input: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return _select(input.expand(shape), mask.expand(shape))


def index_by_mask(input: Tensor, index: Any) -> Decomposition | None:
    """Return the decomposition of `x[:, mask]`, which leaves selected elements where they are."""
    place = mask_of(index, input.ndim) if is_operand(input) else None
    if place is None or input.shape[place[1] : place[1] + place[0].ndim] != place[0].shape:
        return None
    at, ndim = place[1], place[0].ndim
    first = [*range(at, at + ndim), *range(at), *range(at + ndim, input.ndim)]
    back = [*range(1, at + 1), 0, *range(at + 1, input.ndim - ndim + 1)]

    def run(input: Any, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        mask = next(e for e in entries if isinstance(e, Tensor))
        if not at:
            return _select(input, mask)
        return _select(input.permute(first), mask).permute(back)

    return run


def mask_of(index: Any, ndim: int) -> tuple[Tensor, int] | None:
    """Return the mask of an index that is one, and the first dim that it indexes; else None."""
    entries = list(index) if isinstance(index, tuple) else [index]
    masks = [e for e in entries if is_operand(e) and e.dtype is torch.bool and e.ndim]
    if len(masks) != 1 or not all(
        e is masks[0] or e is Ellipsis or (isinstance(e, slice) and e == slice(None))
        for e in entries
    ):
        return None
    missing = ndim - masks[0].ndim - sum(isinstance(e, slice) for e in entries)
    at = next(i for i, e in enumerate(entries) if e is masks[0])
    return masks[0], at + (missing - 1 if any(e is Ellipsis for e in entries[:at]) else 0)


def _select(input: Any, mask: Any) -> Any:
    """Return the elements (or slices of further dims) where the mask is true."""
    check_not_recorded("a selection by a mask", mask)
    if not mask.ndim:
        return _select(input.reshape(1), mask.reshape(1))
    x, ndim = split_by_rows(input, mask.ndim), mask.ndim
    rows = reduce_pending(mask).redistribute(P.of_cuts([x.spec.cuts[0], *[()] * (ndim - 1)], {}))
    return concatenate_parts(
        x.mesh, x.spec.dims[0], x._local[rows._local], x.shape[ndim:], x.spec.cuts[ndim:]
    )


# -- distinct values -------------------------------------------------------------------------------


@decomposition("unique")
def _unique(
    input: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Gather every rank's distinct values and find the distinct ones among these."""
    check_not_recorded("unique", input)
    if dim is not None:
        return _on_whole(torch.unique, input, sorted, return_inverse, return_counts, dim)
    x = reduce_pending(input.detach())
    values, inverse, counts = torch.unique(x._local, return_inverse=True, return_counts=True)
    proposed = concatenate_parts(x.mesh, all_splitting_axes(x._layout), values)
    numbers = wrap(counts, proposed._layout.replace(dtype=torch.int64))
    final, indices = torch.unique(unshard(proposed, 0)._local, return_inverse=True)
    results = [as_replicated(final, x)]
    if return_inverse:
        numbers_of_x = indices[inverse + proposed._layout.box[0][0]]
        results.append(wrap(numbers_of_x, x._layout.replace(dtype=torch.int64)))
    if return_counts:
        zeros = final.new_zeros(len(final), dtype=torch.int64)
        results.append(as_replicated(zeros.index_add(0, indices, unshard(numbers, 0)._local), x))
    return results[0] if len(results) == 1 else tuple(results)


@decomposition("unique_consecutive", with_func=True)
def _on_whole(func: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the whole tensor, on every rank.

    Communication: an all_gather of the tensor.
    """
    check_not_recorded("unique_consecutive", input)
    result = func(input.detach().full_tensor(), *args, **kwargs)
    if isinstance(result, tuple):
        return tuple(as_replicated(x, input) for x in result)
    return as_replicated(result, input)

"""Where values decide how much there is: `nonzero`, `masked_select`, `x[mask]`, `unique`.

Every rank works on its own part, and one small gather tells how long each of the parts' results is. Where the parts follow each
other in row-major order, as they do when only the first dim is split, these are the parts of the result:

    x over 3 ranks, rows      [1 0 | 0 0 | 2 3]
    x[x > 0]                  [1 |  | 2 3]             sizes (1, 0, 2)

Other splits are first moved to the first dim, by one exchange of what is selected from and one of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import Cut, P
from ...dispatch import wrap
from ..decomposition_utils import all_splitting_axes, replicated, settled, whole
from ..elementwise.pointwise import is_operand
from ..registry import form

Form = Callable[..., Any] | None


def by_rows(x: Any, ndim: int) -> Any:
    """The tensor with none of its first `ndim` dims split but the first, over all axes that split any of them."""
    x = settled(x)
    inner = [axis for dim in x.spec.dims[1:ndim] for axis in dim]
    if not inner:
        return x
    first = [*x.spec.cuts[0], *[Cut((axis,)) for axis in inner]]
    return x.redistribute(P.of_cuts([first, *[()] * (ndim - 1), *x.spec.cuts[ndim:]], {}))


def end_to_end(mesh: Any, axes: tuple[str, ...], local: Tensor, shape: Sequence[int] = (), cuts: Any = ()) -> Any:
    """The tensor whose parts along its first dim are what the ranks of some axes have, however long; its further dims have
    this shape, and are cut so.

    Raises:
        NotImplementedError: on a rank outside the mesh, which cannot know how long it is.
    """
    check_inside(mesh)
    counts = Layout.of(mesh, P(axes), (mesh.size(axes) if axes else 1,), torch.int64)
    sizes = tuple(wrap(torch.tensor([len(local)], device=local.device), counts).tolist())
    spec = P.of_cuts([[Cut(axes, sizes)] if axes else (), *cuts], {})
    return wrap(local, Layout.of(mesh, spec, (sum(sizes), *shape), local.dtype))


def check_inside(mesh: Any) -> None:
    """Raises: NotImplementedError on a rank outside the mesh, for results whose shape it cannot know."""
    if mesh.coordinate is None:
        raise NotImplementedError("the shape of the result depends on values, and this rank, outside the mesh, does not have them")


# -- truth values ------------------------------------------------------------------------------------------------------


@form("nonzero", "argwhere")
def _nonzero_form(input: Tensor, *, as_tuple: bool = False) -> Form:
    return _nonzero


def _nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    x = by_rows(input.detach(), input.ndim)
    found = torch.nonzero(x._local)
    if x.ndim and len(found):
        found[:, 0] += x._layout.box[0][0]
    places = end_to_end(x.mesh, x.spec.dims[0] if x.ndim else (), found, (x.ndim,), [()])
    return places if not as_tuple else places.unbind(1) if x.ndim else _place_of_number(places)


def _place_of_number(places: Any) -> tuple[Any, ...]:
    """torch takes a number for a tensor of one element here."""
    return (places.new_zeros((len(places),), dtype=torch.int64),)


@form(also=(torch.where,))
def _where_form(condition: Tensor, *choices: Any, **named: Any) -> Form:
    """`where(mask)` asks for places; with choices it is an operator on elements."""
    return None if choices or named else lambda condition: _nonzero(condition, as_tuple=True)


@form("masked_select")
def _masked_select_form(input: Tensor, mask: Tensor) -> Form:
    return _masked_select if is_operand(input) and is_operand(mask) else None


def _masked_select(input: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return _selected(input.expand(shape), mask.expand(shape))


def mask_form(input: Tensor, index: Any) -> Form:
    """`x[mask]`, or `x[:, mask]`: what is selected stays where it is."""
    found = mask_of(index, input.ndim) if is_operand(input) else None
    if found is None or input.shape[found[1] : found[1] + found[0].ndim] != found[0].shape:
        return None
    at, ndim = found[1], found[0].ndim
    first = [*range(at, at + ndim), *range(at), *range(at + ndim, input.ndim)]
    back = [*range(1, at + 1), 0, *range(at + 1, input.ndim - ndim + 1)]

    def run(input: Any, index: Any) -> Any:
        mask = next(e for e in (index if isinstance(index, tuple) else (index,)) if isinstance(e, Tensor))
        return _selected(input, mask) if not at else _selected(input.permute(first), mask).permute(back)

    return run


def mask_of(index: Any, ndim: int) -> tuple[Tensor, int] | None:
    """The mask of an index that is nothing else, and the first dim that it is for; None for another index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    masks = [e for e in entries if is_operand(e) and e.dtype is torch.bool and e.ndim]
    if len(masks) != 1 or not all(e is masks[0] or e is Ellipsis or (isinstance(e, slice) and e == slice(None)) for e in entries):
        return None
    missing = ndim - masks[0].ndim - sum(isinstance(e, slice) for e in entries)
    at = next(i for i, e in enumerate(entries) if e is masks[0])
    return masks[0], at + (missing - 1 if any(e is Ellipsis for e in entries[:at]) else 0)


def _selected(input: Any, mask: Any) -> Any:
    """The elements (or what stands in further dims) where the mask is true, in row-major order."""
    if not mask.ndim:
        return _selected(input.reshape(1), mask.reshape(1))
    x, ndim = by_rows(input, mask.ndim), mask.ndim
    rows = settled(mask).redistribute(P.of_cuts([x.spec.cuts[0], *[()] * (ndim - 1)], {}))
    return end_to_end(x.mesh, x.spec.dims[0], x._local[rows._local], x.shape[ndim:], x.spec.cuts[ndim:])


# -- distinct values ---------------------------------------------------------------------------------------------------


@form("unique")
def _unique_form(
    input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Form:
    return _unique if dim is None else _unique_of_whole


def _unique(input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: None = None) -> Any:
    """Every rank's distinct values are gathered, and the distinct ones among these found."""
    x = settled(input.detach())
    values, inverse, counts = torch.unique(x._local, return_inverse=True, return_counts=True)
    proposed = end_to_end(x.mesh, all_splitting_axes(x._layout), values)
    numbers = wrap(counts, proposed._layout.replace(dtype=torch.int64))
    final, places = torch.unique(whole(proposed, 0)._local, return_inverse=True)
    results = [replicated(final, x)]
    if return_inverse:
        results.append(wrap(places[inverse + proposed._layout.box[0][0]], x._layout.replace(dtype=torch.int64)))
    if return_counts:
        results.append(replicated(final.new_zeros(len(final), dtype=torch.int64).index_add(0, places, whole(numbers, 0)._local), x))
    return results[0] if len(results) == 1 else tuple(results)


def _unique_of_whole(input: Any, *args: Any, **kwargs: Any) -> Any:
    return _on_whole(torch.unique, input, *args, **kwargs)


@form("unique_consecutive")
def _unique_consecutive_form(input: Tensor, *args: Any, **kwargs: Any) -> Form:
    return lambda input, *args, **kwargs: _on_whole(torch.unique_consecutive, input, *args, **kwargs)


def _on_whole(func: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on the whole tensor, on every rank.

    Communication: an all_gather of the tensor.
    """
    found = func(input.detach().full_tensor(), *args, **kwargs)
    return tuple(replicated(x, input) for x in found) if isinstance(found, tuple) else replicated(found, input)

"""Writing by index: `x[...] = value`, `index_put`, `masked_scatter`.

The written tensor is not moved: every rank writes the elements in its part, and the value is sent
where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from .....mesh.comm.transforms import transforms_active
from ....layout.layout import Layout
from ....layout.shard_holders import intervals
from ....layout.spec import Cut, P
from ....tensor.sharded_tensor import ShardedTensor
from ...sliced_from import check_base, write_through
from ..decomposition_utils import is_split, layout_of, splitting_axes
from ..elementwise.pointwise import is_operand
from ..notation import Rule, dim_names, einrule, whole_dims
from ..registry import decomposition, handler, rule
from .index import expand_index, index_names, patterns, selects
from .local_indices import Part, pad_by_one
from .masked import mask_of


@handler("__setitem__")
def _skip_written(input: Any, index: Any, value: Any) -> Any:
    """Skip the last step of `x[i] += y` where x is written; write through copies of slices."""
    source = value._sliced_from if type(value) is ShardedTensor else None
    if source is not None and source.has_written(input, index, value):
        return None
    return write_through(torch.Tensor.__setitem__, input, index, value)


# -- by integers and slices ------------------------------------------------------------------------


@rule("__setitem__")
def _setitem(input: Tensor, index: Any, value: Any) -> Rule | None:
    return _rule_of_write(input, index, value, _Writer(torch.Tensor.__setitem__, in_place=True))


@rule("index_put", "index_put_", with_func=True)
def _index_put(
    func: Any, input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Rule | None:
    writer = _Writer(func, func.__name__ == "index_put_", accumulate)
    return _rule_of_write(input, tuple(indices), values, writer)


@dataclass(frozen=True)
class _Writer:
    """Writes values at indices of this rank's part: `x[index] = value`, or `index_put`.

    Attributes:
        func: the operator.
        in_place: whether it writes its operand, and not a copy.
        accumulate: whether it adds.
    """

    func: Callable[..., Any]
    in_place: bool
    accumulate: bool = False

    def target(self, input: Tensor) -> Tensor:
        """Return the tensor to write."""
        return input if self.in_place else input.clone()

    def index(self, indices: Any) -> Any:
        """Return the index that the operator's argument is."""
        return indices if self.func is torch.Tensor.__setitem__ else tuple(indices)

    def write(self, x: Tensor, entries: Any, value: Any) -> None:
        """Write a value at local indices of x."""
        if self.func is torch.Tensor.__setitem__:
            x[entries] = value
        else:
            x.index_put_(tuple(e for e in entries if isinstance(e, Tensor)), value, self.accumulate)


def _needs_static_shapes() -> bool:
    """Return whether no shape may depend on values: inside `sm.jit` and transforms.

    Selecting this rank's elements of an index writes only these; writing the others elsewhere
    copies the part, which is much larger than the index where a cache is written.
    """
    return thread_context.recorder is not None or transforms_active()


def _touch(local: Tensor, value: Any) -> None:
    """Write no elements, so that leaves raise and the value is in the graph, as on other ranks."""
    none = local.narrow(0, 0, 0)
    if isinstance(value, Tensor) and value.requires_grad:
        none.add_(value.reshape(-1)[:0].sum())
    else:
        none.zero_()


def _rule_of_write(input: Tensor, index: Any, value: Any, writer: _Writer) -> Rule | None:
    """Return the rule of an operator that writes a value at an index."""
    mask = mask_of(index, input.ndim)
    if mask is not None:
        return _written_where(input, *mask, value, writer)
    entries = expand_index(index, input.ndim)
    if entries is None or any(isinstance(e, Tensor) and e.ndim == 0 for e in entries):
        return None
    left, before, after = patterns(input, entries)
    indices, names, picked = index_names(entries)
    taken = f"{before} {picked} {after}".split()
    values = [value] if is_operand(value) else []
    if values:
        names.append(_pattern_of_value(taken, value.ndim))
    if not writer.accumulate:
        names = [" ".join(f"[{n}]" if n[0] == "i" else n for n in side.split()) for side in names]
    left = left.replace("[", "").replace("]", "")
    options: dict[str, Any] = {"bind": partial(_bind_entries, writer)}
    if values:
        options |= {"linear": ((0, 1 + len(indices)),), "additive": (0,) * writer.accumulate}
    pattern = f"{', '.join([left, *names])} -> {left}"
    return einrule(pattern, input, *indices, *values, **options)


def _pattern_of_value(taken: Sequence[str], ndim: int) -> str:
    """Return the pattern of a value that is broadcast to these dims."""
    return " ".join(["1"] * (ndim - len(taken)) + list(taken[max(0, len(taken) - ndim) :]))


def _bind_entries(writer: _Writer, targets: Sequence[Layout], _: Any) -> Callable[..., Any]:
    """Return what writes into this rank's part: the operator itself if no dim is split."""
    layout = targets[0]
    split = [d for d in range(len(layout.shape)) if splitting_axes(layout, d)]
    return partial(_write_entries, writer, layout, split) if split else writer.func


def _write_entries(
    writer: _Writer,
    layout: Layout,
    split: Sequence[int],
    input: Tensor,
    indices: Any,
    values: Any,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Write into this rank's part, given the whole index and value."""
    result = writer.target(input)
    index = writer.index(indices)
    entries, values = _local_slices(layout, split, input, index, values)
    if entries is None:
        _touch(result, values)
        return result
    numbers = [n for n, e in enumerate(entries) if e is not None]
    indexed = [d for d in split if isinstance(entries[numbers[d]], Tensor)]
    parts = {numbers[d]: Part(layout, d, wraps=True) for d in indexed}
    after = _result_dims(entries)[1]
    if parts and (_needs_static_shapes() or _has_summed_gradient(entries, values, after)):
        wide = result
        for d in indexed:
            wide = pad_by_one(wide, d)
        for n, part in parts.items():
            entries[n] = part.find(entries[n], part.length)[0]
        writer.write(wide, tuple(entries), values)
        return result.copy_(wide[tuple(map(slice, result.shape))])
    if parts:
        entries, values = _local_entries(parts, entries, values, after)
    writer.write(result, tuple(entries), values)
    return result


def _has_summed_gradient(entries: Sequence[Any], value: Any, after: int) -> bool:
    """Return whether the gradient of a value is a sum over what the index tensors select.

    A sum over the indices of this rank alone, and one that has zeros for the others, may differ in
    the last bit; the latter is in use wherever there is one, so that a graph has the bits of eager
    code.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    shape = torch.broadcast_shapes(*[e.shape for e in entries if isinstance(e, Tensor)])
    stop = max(0, value.ndim - after)
    return value.shape[max(0, stop - len(shape)) : stop] != shape


def _local_slices(
    layout: Layout, split: Sequence[int], local: Tensor, index: Any, value: Any
) -> tuple[list[Any] | None, Any]:
    """Return the index and the value that this rank's part is assigned.

    Slices and integers of split dims become those of the part. The index is None if it selects
    nothing of the part.
    """
    entries = expand_index(index, local.ndim, local.device) or []
    numbers = [n for n, e in enumerate(entries) if e is not None]
    order, _ = _result_dims(entries)
    for dim in split:
        number, (start, stop), size = numbers[dim], layout.box[dim], layout.shape[dim]
        entry = entries[number]
        if isinstance(entry, slice) and entry.indices(size) != (0, size, 1):
            entries[number], chosen = _local_slice(entry.indices(size), start, stop)
            value = _narrow_value(value, order[number], chosen)
        elif type(entry) is int:
            entries[number] = entry % size - start
            if not start <= entry % size < stop:
                return None, value
    return entries, value


def _result_dims(entries: Sequence[Any]) -> tuple[dict[int, int], int]:
    """Return the result's dim of each slice, from the right, and how many follow index tensors."""
    remaining = [n for n, e in enumerate(entries) if not selects(e)]
    picks = [i for i, n in enumerate(remaining) if isinstance(entries[n], Tensor)]
    ndim = max((entries[remaining[i]].ndim for i in picks), default=0)
    at = picks[0] if picks and picks[-1] - picks[0] + 1 == len(picks) else 0
    after = [n for n in remaining[at:] if not isinstance(entries[n], Tensor)]
    order = {n: i for i, n in enumerate(reversed(after))}
    before = {n: len(after) + ndim + i for i, n in enumerate(reversed(remaining[:at]))}
    return order | before, len(after)


def _local_slice(
    bounds: tuple[int, int, int], start: int, stop: int
) -> tuple[slice, tuple[int, int]]:
    """Return a slice of a dim as one of this rank's part, and the interval of its elements."""
    first, last, step = bounds
    count = len(range(first, last, step))
    low, high = (min(max(0, -((first - edge) // step)), count) for edge in (start, stop))
    if high <= low:
        return slice(0, 0), (low, high)
    begin, end = (first + i * step - start for i in (low, high - 1))
    return slice(begin, end + 1, step), (low, high)


def _narrow_value(value: Any, from_right: int, chosen: tuple[int, int]) -> Any:
    """Return the interval of a value along a dim from the right; all of it if it is broadcast."""
    dim = value.ndim - 1 - from_right if isinstance(value, Tensor) else -1
    if dim < 0 or value.shape[dim] == 1:
        return value
    return value.narrow(dim, chosen[0], chosen[1] - chosen[0])


def _local_entries(
    parts: dict[int, Part], entries: Sequence[Any], value: Any, after: int
) -> tuple[list[Any], Any]:
    """Return local indices in this rank's part for index tensors, and the values written there."""
    numbers = [n for n, e in enumerate(entries) if isinstance(e, Tensor)]
    tensors = torch.broadcast_tensors(*[entries[n] for n in numbers])
    indices = dict(zip(numbers, tensors, strict=True))
    is_local = torch.ones_like(indices[numbers[0]], dtype=torch.bool)
    for n, part in parts.items():
        indices[n], _ = part.find(indices[n], part.length)
        is_local = is_local & (indices[n] != part.length)
    local_entries = [indices[n][is_local] if n in indices else e for n, e in enumerate(entries)]
    return local_entries, _values_at(value, is_local, after)


def _values_at(value: Any, is_local: Tensor, after: int) -> Any:
    """Return the values of this rank's indices; a value that is broadcast to all stays whole.

    Args:
        is_local: for each index, whether it is in this rank's part.
        after: the dims of the value after those of the indices.
    """
    if not isinstance(value, Tensor) or value.ndim <= after:
        return value
    tail = value.ndim - after
    lead = max(0, tail - is_local.ndim)
    shape = [*value.shape[:lead], *[1] * (is_local.ndim - tail), *value.shape[lead:]]
    sizes = [*value.shape[:lead], *is_local.shape, *value.shape[tail:]]
    return value.reshape(shape).expand(sizes)[(slice(None),) * lead + (is_local,)]


# -- from a value that is split --------------------------------------------------------------------


def _layout_of_value(a: Any) -> tuple[Layout, P] | None:
    """Return the layout of x and the spec that a value split along a split dim needs, or None."""
    input, index, value = a.input, a.index, a.value
    if not (is_operand(value) and is_operand(input)) or mask_of(index, input.ndim) is not None:
        return None
    entries = expand_index(index, input.ndim)
    if entries is None or any(isinstance(e, Tensor) for e in entries) or layout_of(input).pending:
        return None
    input[index] = value  # raises torch's own error first
    layout = layout_of(input)
    cuts = _cuts_of_value(layout, entries, value)
    if not any(
        cut and cut != layout.spec.cuts[d] and is_split(value, [v]) for v, (d, cut) in cuts.items()
    ):
        return None
    return layout, P.of_cuts([cuts[v][1] if v in cuts else () for v in range(value.ndim)], {})


@decomposition("__setitem__", prepare=_layout_of_value)
def _write_split(prepared: tuple[Layout, P], input: Any, index: Any, value: Any) -> None:
    """Send a split value to the ranks that write it, and to no others."""
    layout, spec = prepared
    check_base(input)
    part = value.redistribute(spec)._local
    split = [d for d in range(input.ndim) if splitting_axes(layout, d)]
    inside = layout.mesh.coordinate is not None  # type: ignore[attr-defined]
    entries = _local_slices(layout, split, input._local, index, None)[0] if inside else None
    if entries is None:
        _touch(input._local, part)
    else:
        input._local[tuple(entries)] = part
    input._sync_requires_grad()


def _cuts_of_value(
    layout: Layout, entries: Sequence[Any], value: Tensor
) -> dict[int, tuple[int, Any]]:
    """Return, for dims of the value, the dim of x that each is written along, and its cuts."""
    order, _ = _result_dims(entries)
    numbers = [n for n, e in enumerate(entries) if e is not None]
    cuts = {}
    for dim, n in enumerate(numbers):
        at = value.ndim - 1 - order[n] if n in order else -1
        if at >= 0 and value.shape[at] > 1 and splitting_axes(layout, dim):
            cuts[at] = dim, _cut_like_slice(layout, dim, entries[n].indices(layout.shape[dim]))
    return cuts


def _cut_like_slice(layout: Layout, dim: int, bounds: tuple[int, int, int]) -> Sequence[Cut]:
    """Return the cuts of a slice of a dim by which each rank has what its part of the dim has."""
    if bounds == (0, layout.shape[dim], 1):
        return layout.spec.cuts[dim]
    chosen = [_local_slice(bounds, part.start, part.stop)[1] for part in intervals(layout, dim)]
    return (Cut(layout.spec.dims[dim], tuple(high - low for low, high in chosen)),)


# -- by boolean masks ------------------------------------------------------------------------------


def _written_where(input: Tensor, mask: Tensor, at: int, value: Any, writer: _Writer) -> Rule:
    """Return the rule of writing a value for each true element of a mask, or one for all."""
    dims = [f"d{d}" for d in range(input.ndim)]
    before, masked, after = dims[:at], dims[at : at + mask.ndim], dims[at + mask.ndim :]
    dim = value.ndim - 1 - len(after) if is_operand(value) else -1
    numbered = dim >= 0 and value.shape[dim] != 1
    names = [" ".join(f"[m{d}]" for d in range(mask.ndim)) if numbered else " ".join(masked)]
    values = [value] if is_operand(value) else []
    if values:
        names.append(_pattern_of_value([*before, "[v]" if numbered else "1", *after], value.ndim))
    bind_mask = _bind_numbered if numbered else _bind_mask
    bind = partial(bind_mask, at, mask.ndim, len(after), writer)
    pattern = f"{', '.join([' '.join(dims), *names])} -> {' '.join(dims)}"
    linear = ((0, 2),) if values else ()
    return einrule(pattern, input, mask, *values, linear=linear, bind=bind)


def _bind_mask(
    at: int, ndim: int, after: int, writer: _Writer, targets: Sequence[Layout], _: Any
) -> Callable[..., Any]:
    """Return what writes one value, or one slice of further dims, where the mask is true.

    If the value has a gradient, it is written by `torch.where`, see `_has_summed_gradient`.
    """

    def write(input: Tensor, indices: Any, values: Any, *args: Any, **kwargs: Any) -> Tensor:
        needs_where = isinstance(values, Tensor) and (
            values.requires_grad or _needs_static_shapes()
        )
        if not needs_where:
            return writer.func(input, indices, values, *args, **kwargs)
        dim = values.ndim - 1 - after
        each = values.unflatten(dim, [1] * ndim) if dim >= 0 else values
        return _write_where(writer, writer.target(input), _mask_in(indices), each, after)

    return write


def _bind_numbered(
    at: int, ndim: int, after: int, writer: _Writer, targets: Sequence[Layout], _: Any
) -> Callable[..., Any]:
    """Return what writes a value for each true element of the mask, which is whole."""
    layout = targets[0]
    is_split = any(splitting_axes(layout, d) for d in range(at, at + ndim))
    box = tuple(slice(*interval) for interval in layout.box[at : at + ndim])

    def write(input: Tensor, indices: Any, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_static = _needs_static_shapes()
        if not (is_split or is_static):
            return writer.func(input, indices, values, *args, **kwargs)
        mask, dim, result = _mask_in(indices), values.ndim - 1 - after, writer.target(input)
        order, local_mask = _order(mask, values.shape[dim])[box], mask[box]
        if not is_static:
            chosen = values.index_select(dim, order[local_mask])
            writer.write(result, (*[slice(None)] * at, local_mask), chosen)
            return result
        if not values.shape[dim]:
            _touch(result, values)
            return result
        each = values.index_select(dim, order.clamp(min=0).flatten()).unflatten(dim, order.shape)
        return _write_where(writer, result, local_mask, each, after)

    return write


def _mask_in(index: Any) -> Tensor:
    """Return the mask that an index consists of, next to whole dims."""
    entries = index if isinstance(index, (tuple, list)) else (index,)
    return next(e for e in entries if isinstance(e, Tensor))


def _write_where(
    writer: _Writer, x: Tensor, mask: Tensor, values: Tensor, after: int = 0
) -> Tensor:
    """Write the values where the mask, which has no `after` last dims, is true."""
    values = values.to(x.dtype)
    mask = mask.reshape(*mask.shape, *[1] * after)
    return x.copy_(torch.where(mask, x + values if writer.accumulate else values, x))


def _order(mask: Tensor, count: int, least: bool = False) -> Tensor:
    """Return how many true values precede each element.

    Args:
        count: how many there must be, or at most with `least`.

    Raises:
        RuntimeError: there are others; inside `sm.jit` the device checks it, also in later calls.
    """
    advice = "pass one value for each"
    if thread_context.recorder is not None:
        total = mask.sum()
        torch._assert_async(
            total <= count if least else total == count,
            f"the mask has not as many true elements as values are given, {count}; {advice}",
        )
    elif (total := int(mask.sum())) > count or (total < count and not least):
        raise RuntimeError(
            f"the mask has {total} true elements, but {count} values are given; {advice}"
        )
    return mask.flatten().cumsum(0).reshape(mask.shape) - 1


@rule("masked_scatter", "masked_scatter_", with_func=True)
def _masked_scatter(func: Any, input: Tensor, mask: Tensor, source: Tensor) -> Rule | None:
    if not (is_operand(mask) and is_operand(source)) or not input.ndim or mask.ndim > input.ndim:
        return None
    dims = dim_names(input.ndim)
    pattern = f"{dims}, {whole_dims(mask, 'm')}, {whole_dims(source, 's')} -> {dims}"
    bind = partial(_bind_masked_scatter, _Writer(func, func.__name__ == "masked_scatter_"))
    return einrule(pattern, input, mask, source, linear=((0, 2),), bind=bind)


def _bind_masked_scatter(
    writer: _Writer, targets: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    """Return what writes into this rank's part; mask and source are whole."""
    shape, box = targets[0].shape, tuple(slice(*interval) for interval in targets[0].box)

    def write(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        mask, result = mask.expand(shape), writer.target(input)
        order, local_mask = _order(mask, source.numel(), least=True)[box], mask[box]
        if not _needs_static_shapes():
            result[local_mask] = source.take(order[local_mask])
        elif source.numel():
            each = source.take(order.clamp(0, source.numel() - 1))
            _write_where(writer, result, local_mask, each)
        else:
            _touch(result, source)
        return result

    return write

"""Reading by index: `x[...]`, `gather`, `index_select`, `take`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import splitting_axes
from ..elementwise.pointwise import is_operand
from ..notation import Rule, dim_names, einrule, whole_dims
from ..registry import decomposition, rule
from .local_indices import Part, kind_of_sum, mask_values, not_empty, reads_in_parts

Local = Callable[..., Tensor]


def expand_index(index: Any, ndim: int, device: Any = "meta") -> list[Any] | None:
    """Return the index with one entry per dim (None adds one), or None if it has no rule."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for d, entry in enumerate(entries):
        if isinstance(entry, list) and entry and all(type(e) is int for e in entry):
            entries[d] = torch.tensor(entry, device=device)
    if not all(map(_is_known, entries)):
        return None
    indexed = sum(e is not None and e is not Ellipsis for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return entries[:at] + [slice(None)] * (ndim - indexed) + entries[at + 1 :]


def _is_known(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dtype in (torch.int64, torch.int32)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int


def selects(entry: Any) -> bool:
    """Return whether an entry selects one index of its dim: an integer, also as a 0-d tensor."""
    return type(entry) is int or (isinstance(entry, Tensor) and entry.ndim == 0)


def patterns(input: Tensor, entries: Sequence[Any], parts: bool = False) -> tuple[str, str, str]:
    """Return the patterns of the operand and of the result.

    That of the result is in two parts: before and after the dims that index tensors make.

    Dims taken whole keep their split; sliced ones must be whole, and so must those that tensors
    index, unless they are read in parts. Index tensors that are not adjacent put their dims first.
    """
    left, right, dim = [], [], 0
    for entry in entries:
        if entry is None:
            right.append("1")
            continue
        size = input.shape[dim]
        full = isinstance(entry, slice) and entry.indices(size) == (0, size, 1)
        left.append(f"d{dim}" if full or (parts and isinstance(entry, Tensor)) else f"[d{dim}]")
        if not selects(entry):
            right.append(f"d{dim}" if full else "1" if isinstance(entry, slice) else "picked")
        dim += 1
    picks = [i for i, name in enumerate(right) if name == "picked"]
    at = picks[0] if picks and picks[-1] - picks[0] + 1 == len(picks) else 0
    before, after = right[:at], [name for name in right[at:] if name != "picked"]
    return " ".join(left), " ".join(before), " ".join(after)


def index_names(entries: Sequence[Any]) -> tuple[list[Tensor], list[str], str]:
    """Return the index tensors among the operands, their patterns, and that of all broadcast."""
    tensors = [e for e in entries if isinstance(e, Tensor)]
    operands = [t for t in tensors if is_operand(t)]
    ndim = max((t.ndim for t in tensors), default=0)
    listed = {i for t in tensors if not is_operand(t) for i in range(ndim - t.ndim, ndim)}
    known = {i for t in operands for i in range(ndim - t.ndim, ndim)}
    names = [f"[i{i}]" if i in listed else f"i{i}" for i in range(ndim)]
    picked = [f"i{i}" if i in known - listed else "1" for i in range(ndim)]
    return operands, [" ".join(names[ndim - t.ndim :]) for t in operands], " ".join(picked)


@rule("__getitem__", view=True)
def _getitem(input: Tensor, index: Any) -> Rule | None:
    """Read dims that tensors index in parts; the result is pending."""
    entries = expand_index(index, input.ndim)
    if entries is None:
        return None
    # A 0-d meta tensor cannot be an index.
    result = input[tuple(0 if isinstance(e, Tensor) and selects(e) else e for e in entries)]
    left, before, after = patterns(input, entries, reads_in_parts(input, result.numel()))
    indices, names, picked = index_names(entries)
    pattern = f"{', '.join([left, *names])} -> {before} {picked} {after}"
    numbered = [
        d for d, e in enumerate(e for e in entries if e is not None) if isinstance(e, Tensor)
    ]
    bind = partial(_bind_getitem, numbered, len(after.split())) if numbered else None
    options = {"combine": kind_of_sum(input.dtype), "bind": bind, "result": result}
    return einrule(pattern, input, *indices, linear=((0,),), transparent=True, **options)


def _bind_getitem(dims: Sequence[int], after: int, targets: Sequence[Layout], _: Any) -> Local:
    parts = {d: Part(targets[0], d, wraps=True) for d in dims if splitting_axes(targets[0], d)}
    return partial(_read_parts, parts, after) if parts else torch.Tensor.__getitem__


def _read_parts(parts: dict[int, Part], after: int, local: Tensor, index: Any) -> Tensor:
    entries = expand_index(index, local.ndim, local.device) or []
    numbers = [i for i, e in enumerate(entries) if e is not None]
    is_local = torch.ones((), dtype=torch.bool, device=local.device)
    for dim, part in parts.items():
        entries[numbers[dim]], in_part = part.find(entries[numbers[dim]], 0)
        is_local = is_local & in_part
    return mask_values(is_local, not_empty(local, list(parts))[tuple(entries)], after)


@rule("index_select")
def _index_select(input: Tensor, dim: int, index: Tensor) -> Rule | None:
    if not (input.ndim and is_operand(index)):
        return None
    dim %= input.ndim
    parts = reads_in_parts(input, input.numel() // max(input.shape[dim], 1) * index.numel())
    left = " ".join(f"[d{d}]" if d == dim and not parts else f"d{d}" for d in range(input.ndim))
    number = "i" if index.ndim else ""
    right = " ".join(number or "1" if d == dim else f"d{d}" for d in range(input.ndim))
    options = {"combine": kind_of_sum(input.dtype), "bind": partial(_bind_index_select, dim)}
    return einrule(f"{left}, {number} -> {right}", input, index, linear=((0,),), **options)


def _bind_index_select(dim: int, targets: Sequence[Layout], _: Any) -> Local:
    if not splitting_axes(targets[0], dim):
        return torch.index_select
    part, after = Part(targets[0], dim), len(targets[0].shape) - 1 - dim

    def read(input: Tensor, dim: int, index: Tensor) -> Tensor:
        local, is_local = part.find(index.reshape(-1), 0)
        return mask_values(
            is_local, not_empty(input, [dim % input.ndim]).index_select(dim, local), after
        )

    return read


@rule("gather")
def _gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Rule | None:
    """Return the rule: the indexed dim may be split, and those in which the index is as long."""
    if sparse_grad or not is_operand(index):
        return None
    dim %= max(input.ndim, 1)
    free = [d for d in range(input.ndim) if d != dim and input.shape[d] == index.shape[d]]
    left = " ".join(
        f"d{d}" if d in free or (d == dim and reads_in_parts(input, index.numel())) else f"[d{d}]"
        for d in range(input.ndim)
    )
    right = " ".join(
        f"d{d}" if d in free else f"i{d}" if d == dim else f"[i{d}]" for d in range(index.ndim)
    )
    options = {"combine": kind_of_sum(input.dtype), "bind": partial(_bind_gather, dim)}
    return einrule(f"{left}, {right} -> {right}", input, index, linear=((0,),), **options)


def _bind_gather(dim: int, targets: Sequence[Layout], _: Any) -> Local:
    if not targets[0].shape or not splitting_axes(targets[0], dim):
        return torch.gather
    part = Part(targets[0], dim)

    def read(input: Tensor, _: Any = None, index: Any = None, **__: Any) -> Tensor:
        local, is_local = part.find(index, 0)
        return mask_values(is_local, not_empty(input, [dim]).gather(dim, local))

    return read


@rule("take")
def _take(input: Tensor, index: Tensor) -> Rule | None:
    if not is_operand(index):
        return None
    read = reads_in_parts(input, index.numel())
    left = dim_names(input.ndim) if read else whole_dims(input)
    right = dim_names(index.ndim, prefix="i")
    options = {"combine": kind_of_sum(input.dtype), "bind": _bind_take}
    return einrule(f"{left}, {right} -> {right}", input, index, linear=((0,),), **options)


def _bind_take(targets: Sequence[Layout], _: Any) -> Local:
    layout = targets[0]
    dims = range(len(layout.shape))
    if not any(splitting_axes(layout, d) for d in dims):
        return torch.take
    part = Part(layout, *dims, wraps=True)

    def read(input: Tensor, index: Tensor) -> Tensor:
        local, is_local = part.find(index, 0)
        return mask_values(is_local, not_empty(input.reshape(-1), [0]).take(local))

    return read


@decomposition("take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    """Call `gather` on operands broadcast in all dims but one."""
    if dim is None:
        return input.take(indices.flatten())
    dim %= input.ndim
    shape = torch.broadcast_shapes(
        *[[1 if d == dim else n for d, n in enumerate(x.shape)] for x in (input, indices)]
    )
    # `gather` takes no negative indices
    indices = torch.where(indices < 0, indices + input.shape[dim], indices)
    input, indices = (
        x.expand([x.shape[d] if d == dim else n for d, n in enumerate(shape)])
        for x in (input, indices)
    )
    return input.gather(dim, indices)


@rule("unravel_index")
def _unravel_index(indices: Tensor, shape: Any) -> Rule:
    count = 1 if isinstance(shape, int) else len(shape)
    result = tuple(torch.empty_like(indices, dtype=torch.int64) for _ in range(count))
    return einrule(f"... -> {', '.join(['...'] * count)}", indices, result=result)

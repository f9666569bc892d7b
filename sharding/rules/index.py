"""Indexing and slicing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .notation import Rule, einrule
from .pointwise import is_operand
from .registry import handler, rule


def _expanded(index: Any, ndim: int) -> list[Any] | None:
    """The index with one entry per dim (None entries add dims), or None where it is of a kind without a rule."""
    entries = [_as_list(e) for e in (index if isinstance(index, tuple) else (index,))]
    if not all(map(_is_known, entries)):
        return None
    given = sum(e is not None and e is not Ellipsis for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return entries[:at] + [slice(None)] * (ndim - given) + entries[at + 1 :]


def _as_list(entry: Any) -> Any:
    """A list of numbers stands for a tensor of them."""
    numbers = isinstance(entry, list) and entry and all(type(e) is int for e in entry)
    return torch.tensor(entry, device="meta") if numbers else entry


def _is_known(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dtype in (torch.int64, torch.int32)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int


def _selects(entry: Any) -> bool:
    """Whether an entry takes one place of its dim: a number, also as a 0-d tensor."""
    return type(entry) is int or (isinstance(entry, Tensor) and entry.ndim == 0)


def _is_full(entry: Any, size: int) -> bool:
    return isinstance(entry, slice) and entry.indices(size) == (0, size, 1)


def _patterns(input: Tensor, entries: Sequence[Any]) -> tuple[str, str, str]:
    """Dims of the operand, and of the result before and after those that index tensors make.

    Dims taken whole keep their split; sliced and indexed ones must be whole. Index tensors that stand apart put their
    dims first.
    """
    left, right, dim = [], [], 0
    for entry in entries:
        if entry is None:
            right.append("1")
            continue
        full = _is_full(entry, input.shape[dim])
        left.append(f"d{dim}" if full else f"[d{dim}]")
        if not _selects(entry):
            right.append(f"d{dim}" if full else "1" if isinstance(entry, slice) else "picked")
        dim += 1
    picks = [i for i, name in enumerate(right) if name == "picked"]
    at = picks[0] if picks and picks[-1] - picks[0] + 1 == len(picks) else 0
    before, after = right[:at], [name for name in right[at:] if name != "picked"]
    return " ".join(left), " ".join(before), " ".join(after)


def _index_names(entries: Sequence[Any]) -> tuple[list[Tensor], list[str], str]:
    """The index tensors among the operands, the dims of each, and those of all index tensors broadcast together."""
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
    entries = _expanded(index, input.ndim)
    if entries is None:
        return None
    left, before, after = _patterns(input, entries)
    indices, names, picked = _index_names(entries)
    pattern = f"{', '.join([left, *names])} -> {before} {picked} {after}"
    # A 0-d meta tensor cannot be an index.
    result = input[tuple(0 if isinstance(e, Tensor) and _selects(e) else e for e in entries)]
    return einrule(pattern, input, *indices, linear=((0,),), transparent=True, result=result)


@rule("__setitem__")
def _setitem(input: Tensor, index: Any, value: Any) -> Rule | None:
    """Written dims must be whole where the index picks from them; the tensor itself never moves."""
    if is_operand(index) and index.dtype is torch.bool:
        return _set_where(input, index, value)
    entries = _expanded(index, input.ndim)
    if entries is None or any(isinstance(e, Tensor) and e.ndim == 0 for e in entries):
        return None
    left, before, after = _patterns(input, entries)
    indices, names, picked = _index_names(entries)
    values = [value] if is_operand(value) else []
    taken = f"{before} {picked} {after}".split()
    if values:
        names.append(" ".join(["1"] * (value.ndim - len(taken)) + taken[max(0, len(taken) - value.ndim) :]))
    linear = ((0, 1 + len(indices)),) if values else ()
    return einrule(f"{', '.join([left, *names])} -> {left}", input, *indices, *values, linear=linear)


def _set_where(input: Tensor, mask: Tensor, value: Any) -> Rule | None:
    """`x[mask] = number`: a choice by element, in the dims that the mask has."""
    if is_operand(value) and value.ndim:
        return None
    dims, numbers = " ".join(f"d{d}" for d in range(input.ndim)), [value] if is_operand(value) else []
    sides = [dims, " ".join(f"d{d}" for d in range(mask.ndim)), *[""] * len(numbers)]
    return einrule(f"{', '.join(sides)} -> {dims}", input, mask, *numbers)


@rule("index_select")
def _index_select(input: Tensor, dim: int, index: Tensor) -> Rule:
    dim %= input.ndim
    left = " ".join(f"[d{d}]" if d == dim else f"d{d}" for d in range(input.ndim))
    right = " ".join("i" if d == dim else f"d{d}" for d in range(input.ndim))
    return einrule(f"{left}, i -> {right}", input, index, linear=((0,),))


@rule("gather")
def _gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Rule | None:
    """Dims in which the index is as long as the input are taken element by element; the others must be whole."""
    if sparse_grad or not is_operand(index):
        return None
    dim %= max(input.ndim, 1)
    same = [d for d in range(input.ndim) if d != dim and input.shape[d] == index.shape[d]]
    left = " ".join(f"d{d}" if d in same else f"[d{d}]" for d in range(input.ndim))
    right = " ".join(f"d{d}" if d in same else f"i{d}" if d == dim else f"[i{d}]" for d in range(input.ndim))
    return einrule(f"{left}, {right} -> {right}", input, index, linear=((0,),))


@handler("take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    """`gather`, of operands broadcast in all dims but one."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim %= input.ndim
    shape = torch.broadcast_shapes(*[[1 if d == dim else n for d, n in enumerate(x.shape)] for x in (input, indices)])
    sized = [x.expand([x.shape[d] if d == dim else n for d, n in enumerate(shape)]) for x in (input, indices)]
    return sized[0].gather(dim, sized[1])

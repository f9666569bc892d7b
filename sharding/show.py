"""How tensors look in print: `repr`, and `visualize`, a picture of which rank holds what."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layout import Layout, dtype_name

if TYPE_CHECKING:
    from .tensor import ShardedTensor


def tensor_repr(x: ShardedTensor) -> str:
    """`ShardedTensor(f32[8, 8] @ P('x', None) on (x=4), local [2, 8] ...)`, with this rank's values. No communication."""
    local = torch.Tensor.__repr__(x._local.detach())
    kind = "Parameter(ShardedTensor" if getattr(x, "_is_param", False) else "ShardedTensor"
    grad = ", requires_grad=True" if x._local.requires_grad and x._local.is_leaf else ""
    if x._local.grad_fn is not None:
        grad = f", grad_fn=<{type(x._local.grad_fn).__name__}>"
    return f"{kind}({x._layout!r}{grad},\n{local}" + (")" * kind.count("(")) + ")"


def visualize(x: ShardedTensor | Layout | nn.Module) -> str:
    """A picture of which ranks hold which part of a tensor, or a table of how a module's tensors lie, as text.

    One-dimensional tensors are a row; of tensors with more dims the last two are drawn, at index 0 of the others.
    Ranks that hold the same part share a cell; `+` marks values that are still pending.

    Communication: none.

    Example:
        >>> print(visualize(Layout.of(AbstractMesh((2, 2), ("dp", "tp")), P("dp", "tp"), (4, 6))))
        f32[4, 6] @ P('dp', 'tp') on (dp=2, tp=2)
                  cols 0:3  cols 3:6
        rows 0:2         0         1
        rows 2:4         2         3
    """
    if isinstance(x, nn.Module):
        return _module_table(x)
    layout: Any = x if isinstance(x, Layout) else x._layout
    cells = _cells(layout)
    rows, cols = sorted({r for r, _ in cells}, key=_interval_key), sorted({c for _, c in cells}, key=_interval_key)
    mark = "+" if layout.pending else ""
    table = [["", *[_interval("cols", c) for c in cols]]]
    table += [[_interval("rows", r), *[_ranks(cells[r, c]) + mark for c in cols]] for r in rows]
    return "\n".join([str(layout), *(_aligned(table, str.rjust) if cells else ["no elements"])])


def _cells(layout: Layout) -> dict[tuple[Any, Any], list[int]]:
    """(row interval, column interval) -> the ranks that hold it, in the last two dims at index 0 of the others."""
    cells: dict[tuple[Any, Any], list[int]] = {}
    for coordinate, box in layout.boxes():
        if all(start == 0 for start, _ in box[:-2]) and all(stop > start for start, stop in box):
            row, col = [None, None, *box][-2:]
            cells.setdefault((row, col), []).append(int(layout.mesh.ranks[coordinate]))
    return cells


def _interval_key(interval: Any) -> tuple[int, int]:
    return interval or (0, 0)


def _interval(what: str, interval: Any) -> str:
    return f"{what} {interval[0]}:{interval[1]}" if interval else "all"


def _ranks(ranks: list[int]) -> str:
    """Ranks with runs of three or more shortened: `0-3,8,9`."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in run]
        parts += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else map(str, found)
    return ",".join(parts)


def _module_table(module: nn.Module) -> str:
    """One line per parameter and buffer: name, what it is, how it lies, and this rank's part."""
    header = ["tensor", "global", "spec", "local"]
    named = [*module.named_parameters(), *module.named_buffers()]
    return "\n".join(_aligned([header, *[_tensor_row(name, x) for name, x in named]], str.ljust))


def _tensor_row(name: str, x: Any) -> list[str]:
    if hasattr(x, "_layout"):
        return [name, _kind(x.dtype, x.shape), repr(x._layout.spec), str(list(x._local.shape))]
    return [name, _kind(x.dtype, x.shape), "plain", str(list(x.shape))]


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"


def _aligned(table: list[list[str]], justify: Callable[[str, int], str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(justify(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]

"""`visualize`: which rank holds which part, as text, in colour or a picture; `repr` of tensors."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import nn

from ...mesh.text import Lines
from ..layout.layout import Layout
from ..parallel.module_repr import module_rich, module_table, module_tree
from ..parallel.rank_table import RankTable
from .picture import layout_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from ..tensor.sharded_tensor import ShardedTensor

Style: TypeAlias = Literal["text", "tree", "rich", "picture"]
_STYLES = ("text", "tree", "rich", "picture")
_OF_MODULES = {"text": module_table, "tree": module_tree}


@overload
def visualize(
    x: ShardedTensor | Layout | nn.Module, *, style: Literal["text", "tree"] = "text"
) -> str: ...
@overload
def visualize(x: ShardedTensor | Layout | nn.Module, *, style: Literal["rich"]) -> Table: ...
@overload
def visualize(
    x: ShardedTensor | Layout, *, style: Literal["picture"], path: str | PathLike[str] | None = None
) -> Figure: ...
def visualize(
    x: ShardedTensor | Layout | nn.Module,
    *,
    style: Style = "text",
    path: str | PathLike[str] | None = None,
) -> Any:
    """visualize(x, style="text") -> str: which ranks hold which part of a tensor, or of a module's.

    Ranks that hold the same part share a cell. For pending values, `+` follows ranks that hold
    contributions to a sum; ` max` and so on for the other kinds. Of a tensor with more than two
    dims the last two that are split are rows and columns, and further split dims make pages. Of
    long tables the first and last rows, columns and pages are shown, and the last line counts the
    rest.

    Args:
        x: a tensor or a layout (on an `AbstractMesh`, too) of any number of dims, or a module.
        style: "text", which notebooks show as lines; "rich", a `rich.table.Table` in which each
            cell has the colour of the ranks that hold it: notebooks show it, `rich.print` prints
            it; "picture", a `matplotlib.figure.Figure` with a panel for each page, for up to 64
            ranks; or for modules "tree", the text of `repr(module)` with the layout of each tensor.
        path: for "picture", a file to write as well: .png, .svg, .pdf or another format of
            matplotlib.

    Raises:
        TypeError: `x` is something else, such as a plain tensor.
        ValueError: a style that does not exist for this `x`, a path for another style than
            "picture", a picture of more than 64 ranks, or a file format that matplotlib does not
            know.
        ImportError: rich or matplotlib is needed and not installed.

    Communication: none.

    Example:
        >>> print(visualize(Layout.of(AbstractMesh((2, 2), ("dp", "tp")), P("dp", "tp"), (4, 6))))
        f32[4, 6] @ P('dp', 'tp') on (dp=2, tp=2)
                  cols 0:3  cols 3:6
        rows 0:2         0         1
        rows 2:4         2         3
    """
    _check_style(x, style, path)
    if isinstance(x, nn.Module):
        return module_rich(x) if style == "rich" else Lines(_OF_MODULES[style](x))
    layout = layout_of(x, "visualize")
    if style == "picture":
        return layout_picture(layout, path)
    table = RankTable.of(layout)
    return table.rich() if style == "rich" else Lines(table.text())


def layout_of(x: Any, function: str) -> Layout:
    """Return the layout of a `ShardedTensor`, or a layout itself.

    `function` is the name of the public function, for errors.

    Raises:
        TypeError: `x` is something else.
    """
    layout = x if isinstance(x, Layout) else getattr(x, "_layout", None)
    if isinstance(layout, Layout):
        return layout
    instead = "give a ShardedTensor or a Layout"
    if isinstance(x, nn.Module):
        instead = (
            f"give one of its tensors, such as {function}(module.weight), or print "
            "visualize(module)"
        )
    elif isinstance(x, torch.Tensor):
        instead = (
            "a plain tensor is on this rank only; shard it with distribute_tensor or device_put "
            "first"
        )
    raise TypeError(f"{function}({type(x).__name__}): {instead}")


def _check_style(x: Any, style: Any, path: Any) -> None:
    known = _STYLES[:3] if isinstance(x, nn.Module) else (_STYLES[0], *_STYLES[2:])
    if style not in known:
        kind = "a module" if isinstance(x, nn.Module) else "a tensor or a layout"
        other = "; draw its tensors one by one" if style == "picture" else ""
        raise ValueError(
            f"visualize(style={style!r}): the styles for {kind} are "
            f"{', '.join(map(repr, known))}{other}"
        )
    if path is not None and style != "picture":
        raise ValueError(
            f"visualize(style={style!r}, path={str(path)!r}): only pictures are written to files; "
            "add style='picture'"
        )

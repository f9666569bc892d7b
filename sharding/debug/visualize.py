"""How tensors look: `repr`, and `visualize`, which rank holds what, as text, in colour or as a picture."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import nn

from ..layout.layout import Layout
from .grid import Grid
from .module_repr import module_rich, module_table, module_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from ..tensor.sharded_tensor import ShardedTensor

Style: TypeAlias = Literal["text", "tree", "rich", "picture"]
_STYLES = ("text", "tree", "rich", "picture")


def tensor_repr(x: ShardedTensor) -> str:
    """`ShardedTensor(f32[8, 8] @ P('x', None) on (x=4), local [2, 8] ...)`, with this rank's values. No communication."""
    local = torch.Tensor.__repr__(x._local.detach())
    kind = "Parameter(ShardedTensor" if getattr(x, "_is_param", False) else "ShardedTensor"
    grad = ", requires_grad=True" if x._local.requires_grad and x._local.is_leaf else ""
    if x._local.grad_fn is not None:
        grad = f", grad_fn=<{type(x._local.grad_fn).__name__}>"
    return f"{kind}({x._layout!r}{grad},\n{local}" + (")" * kind.count("(")) + ")"


@overload
def visualize(x: ShardedTensor | Layout | nn.Module, *, style: Literal["text", "tree"] = "text") -> str: ...
@overload
def visualize(x: ShardedTensor | Layout | nn.Module, *, style: Literal["rich"]) -> Table: ...
@overload
def visualize(
    x: ShardedTensor | Layout, *, style: Literal["picture"], path: str | PathLike[str] | None = None
) -> Figure: ...
def visualize(
    x: ShardedTensor | Layout | nn.Module, *, style: Style = "text", path: str | PathLike[str] | None = None
) -> Any:
    """visualize(x, style="text") -> str: which ranks hold which part of a tensor, or how a module's tensors lie.

    Ranks that hold the same part share a cell. Where values are pending, `+` stands behind ranks that hold contributions to
    a sum; ` max` and so on for the other kinds. Of tensors with more dims than two the last two that are split are the rows
    and columns, and further split dims make pages. Of long tables the first and last rows, columns and pages are shown,
    and the last line says what is not.

    Args:
        x: a tensor or a layout (on an `AbstractMesh` too) of any number of dims, or a module.
        style: "text"; "rich", a `rich.table.Table` in which each cell has the colour of the ranks that hold it: notebooks show
            it, `rich.print` prints it; "picture", a `matplotlib.figure.Figure` with a panel for each page, for up to 64
            ranks; or for modules "tree", the text of `repr(module)` with how each tensor lies.
        path: of "picture", a file to write as well: .png, .svg, .pdf or what else matplotlib knows.

    Raises:
        TypeError: `x` is something else, such as a plain tensor.
        ValueError: a style that there is not for this `x`, a path for another style than "picture", a picture of more than 64
            ranks, or a kind of file that matplotlib does not know.
        ImportError: rich or matplotlib is asked for and not installed.

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
        return {"text": module_table, "tree": module_tree, "rich": module_rich}[style](x)
    layout = layout_of(x, "visualize")
    if style == "picture":
        from .picture import layout_picture

        return layout_picture(layout, path)
    grid = Grid.of(layout)
    return grid.rich() if style == "rich" else grid.text()


def layout_of(x: Any, what: str) -> Layout:
    """The layout of a `ShardedTensor`, or of a layout itself.

    Raises:
        TypeError: anything else; `what` is the function that was called with it.
    """
    layout = x if isinstance(x, Layout) else getattr(x, "_layout", None)
    if isinstance(layout, Layout):
        return layout
    instead = "give a ShardedTensor or a Layout"
    if isinstance(x, nn.Module):
        instead = f"give one of its tensors, such as {what}(module.weight), or print visualize(module)"
    elif isinstance(x, torch.Tensor):
        instead = "a plain tensor lies on this rank alone; place it with distribute_tensor or device_put first"
    raise TypeError(f"{what}({type(x).__name__}): {instead}")


def _check_style(x: Any, style: Any, path: Any) -> None:
    known = _STYLES[:3] if isinstance(x, nn.Module) else (_STYLES[0], *_STYLES[2:])
    if style not in known:
        of = "a module" if isinstance(x, nn.Module) else "a tensor or a layout"
        other = "; draw its tensors one by one" if style == "picture" else ""
        raise ValueError(f"visualize(style={style!r}): of {of} there are the styles {', '.join(map(repr, known))}{other}")
    if path is not None and style != "picture":
        raise ValueError(f"visualize(style={style!r}, path={str(path)!r}): only a picture is written; add style='picture'")

"""How pictures are made: by matplotlib, without a display, and the same file each time."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours and hatches of the parts of a bar. Neighbours differ in lightness, so that they can be
# told apart in grey.
SERIES = ("#1f4e79", "#e1a95f", "#4f9a6b", "#d9d9d9", "#7a4b8f", "#a6cfe0", "#8c3b3b", "#c9d77e")
HATCHES = ("", "", "", "", "//", "//", "//", "//")

# A notebook draws a chart of at most so many bars where it is the value of a cell: about a second.
MOST_BARS = 1_000

# to write the same file each time
_STYLE = {"svg.hashsalt": "shardmesh", "svg.fonttype": "none", "hatch.linewidth": 0.4}


def drawn(draw: Callable[[type[Figure]], Figure], path: str | PathLike[str] | None) -> Figure:
    """Return `draw(Figure)` in the style of all pictures; write it to a path, if given.

    The type given to `draw` is a subclass, which notebooks display.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file format that matplotlib does not know.
    """
    try:
        from matplotlib import style

        from .notebook_figure import NotebookFigure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install shardmesh[viz]"
        ) from error
    # Without the time and the version of matplotlib, which would make each file a different one.
    metadata = {".svg": {"Date": None, "Creator": "shardmesh"}, ".pdf": {"CreationDate": None}}
    with style.context(["default", _STYLE]):
        figure = draw(NotebookFigure)
        if path is not None:
            figure.savefig(path, dpi=120, metadata=metadata.get(str(path)[-4:].lower(), {}))
    return figure


class Pictured:
    """A result that notebooks display as its text, and below it as its picture."""

    __slots__ = ()

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Return a figure, and write it to a file if path is given."""
        raise NotImplementedError

    def _notebook_text(self) -> str | None:
        """Return the text above the picture; None if a notebook is to show no picture."""
        return str(self)

    def _repr_html_(self) -> str | None:
        """Return what a notebook displays; None, for the `repr`, if there is no picture."""
        text = self._notebook_text()
        if text is None:
            return None
        try:
            content, size = self.picture()._repr_png_()  # pyright: ignore[reportAttributeAccessIssue]
        except (ImportError, ValueError):  # no matplotlib; nothing to draw, or too many ranks
            return None
        above = f"<pre>{html.escape(text)}</pre>" if text else ""
        source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        return f'{above}<img src="{source}" width="{size["width"]}" height="{size["height"]}">'


def in_bytes(most: float) -> tuple[str, float]:
    """Return a unit in which a number of bytes is short, and how many of it a byte is."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return unit, 1 / size
    return "bytes", 1.0

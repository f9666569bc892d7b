"""How pictures are made: by matplotlib, without a display, and the same file each time."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours and hatches of the parts of a bar. Neighbours differ in lightness, so that they can be
# told apart in grey.
SERIES = ("#1f4e79", "#e1a95f", "#4f9a6b", "#d9d9d9", "#7a4b8f", "#a6cfe0", "#8c3b3b", "#c9d77e")
HATCHES = ("", "", "", "", "//", "//", "//", "//")

# to write the same file each time
_STYLE = {"svg.hashsalt": "shardmesh", "svg.fonttype": "none", "hatch.linewidth": 0.4}


def drawn(draw: Callable[[type[Figure]], Figure], path: str | PathLike[str] | None) -> Figure:
    """Return `draw(Figure)` in the style of all pictures; write it to a path, if given.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file format that matplotlib does not know.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install shardmesh[viz]"
        ) from error
    # Without the time and the version of matplotlib, which would make each file a different one.
    metadata = {".svg": {"Date": None, "Creator": "shardmesh"}, ".pdf": {"CreationDate": None}}
    with style.context(["default", _STYLE]):
        figure = draw(Figure)
        if path is not None:
            figure.savefig(path, dpi=120, metadata=metadata.get(str(path)[-4:].lower(), {}))
    return figure


def in_bytes(most: float) -> tuple[str, float]:
    """Return a unit in which a number of bytes is short, and how many of it a byte is."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return unit, 1 / size
    return "bytes", 1.0

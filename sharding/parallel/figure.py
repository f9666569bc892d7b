"""How pictures are made: by matplotlib, without a display, and the same file each time."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

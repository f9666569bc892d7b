"""A figure of matplotlib that notebooks display."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure

_DPI = 144  # two pixels for each of a picture of 72 dots per inch


class NotebookFigure(Figure):
    """A figure that a notebook shows where it is the value of a cell.

    Notebooks display a plain `Figure` as its `repr` until `matplotlib.pyplot` is imported.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the picture, and the width and height in which a notebook shows it."""
        file = BytesIO()
        self.savefig(file, format="png", dpi=_DPI)
        width, height = (int(72 * inches) for inches in self.get_size_inches())
        return file.getvalue(), {"width": width, "height": height}

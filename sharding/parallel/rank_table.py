"""Tables of which ranks hold which part of a tensor, as text or in colour with rich.

Two dims are rows and columns; further split dims make pages. Of long tables the first and the last
rows, columns and pages are shown, so that a table of any mesh fits on a screen or two.

    f32[2, 4, 6] @ P('a', 'b', 'c') on (a=2, b=2, c=2)
    [0:1, :, :]  dim 2 0:3  dim 2 3:6
      dim 1 0:2          0          1
      dim 1 2:4          2          3
    [1:2, :, :]  dim 2 0:3  dim 2 3:6
      dim 1 0:2          4          5
      dim 1 2:4          6          7
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...mesh.text import elided, rank_ranges, table_lines
from ..layout.layout import Layout
from ..layout.shard_holders import (
    Interval,
    holders,
    page_title,
    pages,
    parts,
    pending_mark,
    shown_dims,
    title,
)

if TYPE_CHECKING:
    from rich.table import Table

MAX_ROWS, MAX_COLUMNS, MAX_PAGES = 16, 8, 4


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the ranks that hold the box, or a label.
        first: the lowest of the ranks; None for a label.
    """

    text: str
    first: int | None = None


GAP = Cell("...")


@dataclass(frozen=True)
class RankTable:
    """A layout as a table.

    Attributes:
        layout: the layout shown.
        pages: for each page its rows, the first of which has the labels of columns.
        left_out: the parts that are not shown; empty if all are.
    """

    layout: Layout
    pages: tuple[tuple[tuple[Cell, ...], ...], ...]
    left_out: str

    @staticmethod
    def of(layout: Layout) -> RankTable:
        """Return the table of a layout."""
        dims = shown_dims(layout)
        # A dim that the tensor does not have is shown as one interval.
        rows, cols = [*[[None]] * (2 - len(dims)), *[parts(layout, dim) for dim in dims]]
        all_pages = pages(layout, dims) if rows and cols else []
        shown = [page for page in elided(all_pages, MAX_PAGES) if page is not None]
        titles = [page_title(layout, page) if len(all_pages) > 1 else "" for page in shown]
        counts = {
            "rows": (len(rows), MAX_ROWS),
            "columns": (len(cols), MAX_COLUMNS),
            "pages": (len(all_pages), MAX_PAGES),
        }
        hidden = [
            f"{count - most:,} of {count:,} {name}"
            for name, (count, most) in counts.items()
            if count > most
        ]
        drawn = [
            _page(layout, name, page, rows, cols) for name, page in zip(titles, shown, strict=True)
        ]
        return RankTable(layout, tuple(drawn), f"not shown: {', '.join(hidden)}" if hidden else "")

    def text(self) -> str:
        """Return the layout, and the table below it."""
        rows = [[cell.text for cell in row] for page in self.pages for row in page]
        table = table_lines(rows, right=range(len(rows[0]))) if rows else ["no elements"]
        return "\n".join([title(self.layout), *table, *[self.left_out] * bool(self.left_out)])

    def rich(self) -> Table:
        """Return a rich table in which each cell has the colour of the ranks that hold it.

        Raises:
            ImportError: rich is not installed.
        """
        table = rich_table(title(self.layout), self.left_out)
        ranks = int(self.layout.mesh.ranks.max()) + 1
        for column in self.pages[0][0] if self.pages else [Cell("no elements")]:
            table.add_column(_rich_text(column, ranks), justify="right")
        for number, (header, *rows) in enumerate(self.pages):
            if number:
                table.add_section()
                table.add_row(*[_rich_text(cell, ranks) for cell in header])
            for row in rows:
                table.add_row(*[_rich_text(cell, ranks) for cell in row])
        return table


def _page(
    layout: Layout,
    name: str,
    page: Sequence[Any],
    row_parts: Sequence[Any],
    col_parts: Sequence[Any],
) -> tuple[tuple[Cell, ...], ...]:
    row_dim, col_dim = [
        None,
        None,
        *[dim for dim in range(len(layout.shape)) if page[dim] is None],
    ][-2:]
    fixed = [part for part in page if part is not None]
    # Numbered, since an interval may be None, which `elided` uses for omitted ones.
    rows = elided(list(enumerate(row_parts)), MAX_ROWS)
    cols = elided(list(enumerate(col_parts)), MAX_COLUMNS)
    lines = [
        (Cell(name), *[GAP if col is None else _label(layout, col_dim, col[1]) for col in cols])
    ]
    for row in rows:
        cells = [
            GAP if row is None or col is None else _cell(layout, [*fixed, row[1], col[1]])
            for col in cols
        ]
        lines.append((GAP if row is None else _label(layout, row_dim, row[1]), *cells))
    return tuple(lines)


def _cell(layout: Layout, box: Sequence[Interval | None]) -> Cell:
    ranks = holders(layout, [part for part in box if part is not None])
    return Cell(rank_ranges(ranks) + pending_mark(layout), ranks[0])


def _label(layout: Layout, dim: int | None, interval: Interval | None) -> Cell:
    if interval is None:
        return Cell("all")
    ndim = len(layout.shape)
    name = f"dim {dim}" if ndim > 2 else "cols" if dim == ndim - 1 else "rows"
    return Cell(f"{name} {interval}")


# -- rich ------------------------------------------------------------------------------------------


def rich_table(name: str, caption: str) -> Table:
    """Return an empty rich table in the style of all tables of this library.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "style='rich' needs rich, which is not installed: pip install shardmesh[viz], or use "
            "style='text'"
        ) from error
    texts: Any = {"title": Text(name), "caption": Text(caption) if caption else None}
    return Table(**texts, box=box.SIMPLE, title_justify="left", caption_justify="left")


def _rich_text(cell: Cell, ranks: int) -> Any:
    return coloured_text(cell.text, None if cell.first is None else colour(cell.first, ranks))


def coloured_text(text: str, background: tuple[float, float, float] | None = None) -> Any:
    """Return text for a rich table, without markup: black on a background, or bold without one."""
    from rich.text import Text

    if background is None:
        return Text(text, style="bold")
    red, green, blue = (round(255 * part) for part in background)
    return Text(text, style=f"black on rgb({red},{green},{blue})")


def colour(number: int, count: int) -> tuple[float, float, float]:
    """Return one of `count` colours, light enough for black text.

    Neighbours differ in shade, distant ones in hue.
    """
    return colorsys.hsv_to_rgb(number / count, 0.5 if number % 2 else 0.35, 0.95)


def plain(text: str) -> Any:
    """Return text for a rich table, without markup and style."""
    from rich.text import Text

    return Text(text)

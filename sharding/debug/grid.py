"""Tables of which ranks hold which part of a tensor: as text, or in colour with rich.

Two dims make a table, and further split dims pages of it. Of long tables the first and the last rows, columns and pages are
shown, so that a picture of any mesh fits a screen or two.

    f32[2, 4, 6] @ P('a', 'b', 'c') on (a=2, b=2, c=2)
    [0:1, :, :]  dim 2 0:3  dim 2 3:6
      dim 1 0:2          0          1
      dim 1 2:4          2          3
    [1:2, :, :]  dim 2 0:3  dim 2 3:6
      dim 1 0:2          4          5
      dim 1 2:4          6          7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...mesh.text import columns, ends, rank_runs
from ..layout.layout import Layout
from ..layout.shard_holders import Interval, holders, page_title, pages, parts, pending_mark, shown_dims, title
from .panel import colour

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS, MOST_COLUMNS, MOST_PAGES = 16, 8, 4


@dataclass(frozen=True)
class Cell:
    """What stands at one place of a table.

    Attributes:
        text: the ranks that hold the box, or a label.
        first: the lowest of the ranks; None for a label.
    """

    text: str
    first: int | None = None


GAP = Cell("...")


@dataclass(frozen=True)
class Grid:
    """A table of a layout.

    Attributes:
        layout: what is shown.
        pages: of each page its rows, the first of which has the labels of columns.
        left_out: what is not shown; empty if everything is.
    """

    layout: Layout
    pages: tuple[tuple[tuple[Cell, ...], ...], ...]
    left_out: str

    @staticmethod
    def of(layout: Layout) -> Grid:
        """The table of any layout."""
        dims = shown_dims(layout)
        # A dim that the tensor does not have is shown as one whole interval.
        rows, cols = [*[[None]] * (2 - len(dims)), *[parts(layout, dim) for dim in dims]]
        found = pages(layout, dims) if rows and cols else []
        shown = [page for page in ends(found, MOST_PAGES) if page is not None]
        titles = [page_title(layout, page) if len(found) > 1 else "" for page in shown]
        left_out = _left_out(
            rows=(len(rows), MOST_ROWS), columns=(len(cols), MOST_COLUMNS), pages=(len(found), MOST_PAGES)
        )
        drawn = [_page(layout, name, page, (rows, cols)) for name, page in zip(titles, shown, strict=True)]
        return Grid(layout, tuple(drawn), left_out)

    def text(self) -> str:
        """The layout, and the table below it."""
        table = self._lines() if self.pages else ["no elements"]
        return "\n".join([title(self.layout), *table, *[self.left_out] * bool(self.left_out)])

    def _lines(self) -> list[str]:
        rows = [[cell.text for cell in row] for page in self.pages for row in page]
        return columns(rows, right=range(len(rows[0])))

    def rich(self) -> Table:
        """The same, each cell in the colour of the ranks that hold it.

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


def _page(layout: Layout, name: str, page: Sequence[Any], sides: tuple[list[Any], list[Any]]) -> tuple[tuple[Cell, ...], ...]:
    row_dim, col_dim = _sides(layout, page)
    fixed = [part for part in page if part is not None]
    rows, cols = ends(_numbered(sides[0]), MOST_ROWS), ends(_numbered(sides[1]), MOST_COLUMNS)
    lines = [(Cell(name), *[GAP if col is None else _label(layout, col_dim, col[1]) for col in cols])]
    for row in rows:
        cells = [GAP if row is None or col is None else _cell(layout, [*fixed, row[1], col[1]]) for col in cols]
        lines.append((GAP if row is None else _label(layout, row_dim, row[1]), *cells))
    return tuple(lines)


def _sides(layout: Layout, page: Sequence[Any]) -> list[int | None]:
    """The dims downwards and to the right: those that the page does not fix."""
    return [None, None, *[dim for dim in range(len(layout.shape)) if page[dim] is None]][-2:]


def _numbered(items: list[Any]) -> list[tuple[int, Any]]:
    """An interval may be None, which `ends` uses for what it leaves out."""
    return list(enumerate(items))


def _cell(layout: Layout, box: Sequence[Interval | None]) -> Cell:
    ranks = holders(layout, [part for part in box if part is not None])
    return Cell(rank_runs(ranks) + pending_mark(layout), ranks[0])


def _label(layout: Layout, dim: int | None, interval: Interval | None) -> Cell:
    if interval is None:
        return Cell("all")
    ndim = len(layout.shape)
    what = f"dim {dim}" if ndim > 2 else "cols" if dim == ndim - 1 else "rows"
    return Cell(f"{what} {interval}")


def _left_out(**counts: tuple[int, int]) -> str:
    """`not shown: 112 of 128 rows, 3 of 4 pages`."""
    texts = [f"{there - most:,} of {there:,} {what}" for what, (there, most) in counts.items() if there > most]
    return f"not shown: {', '.join(texts)}" if texts else ""


# -- rich -------------------------------------------------------------------------------------------------------------


def rich_table(name: str, caption: str) -> Table:
    """An empty table in the one look that tables have here."""
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "style='rich' needs rich, which is not here: pip install shardmesh[viz], or use style='text'"
        ) from error
    texts: Any = {"title": Text(name), "caption": Text(caption) if caption else None}
    return Table(**texts, box=box.SIMPLE, title_justify="left", caption_justify="left")


def _rich_text(cell: Cell, ranks: int) -> Any:
    return coloured(cell.text, None if cell.first is None else colour(cell.first, ranks))


def coloured(text: str, background: tuple[float, float, float] | None = None) -> Any:
    """Text for a rich table, taken as it is; black on a background, or bold without one."""
    from rich.text import Text

    if background is None:
        return Text(text, style="bold")
    red, green, blue = (round(255 * part) for part in background)
    return Text(text, style=f"black on rgb({red},{green},{blue})")

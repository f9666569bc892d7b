"""Measure how the package is built: folders, files, functions, and who imports whom.

    python tests/structure/measure.py                   the figures, and all that is outside the goals
    python tests/structure/measure.py --limits          the exceptions that `limits.py` records, as Python
    python tests/structure/measure.py --contributing    write the table of CONTRIBUTING.md
    python tests/structure/measure.py --write           write both

The source is read, not imported. `limits.py` has the goals; `test_structure.py` fails beyond the limits.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a run as a script

from tests.structure import import_graph, limits, ratchet
from tests.structure.public_names import public_names
from tests.structure.source_tree import Import, Module, read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- written by `python tests/structure/measure.py --contributing` -->\n"
END = "<!-- end of what is written -->\n"


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest value that the given share of all values does not exceed; 0 without values."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0


@dataclass(frozen=True)
class Figures:
    """The measured figures of a package.

    Attributes:
        modules: by path.
        layers: folders from the lowest to the highest.
        public: names that the package's root offers.
    """

    modules: Mapping[str, Module]
    layers: Sequence[str]
    public: Sequence[str]

    @cached_property
    def folders(self) -> dict[str, int]:
        """Number of files by folder, folders inside it not counted."""
        return dict(sorted(Counter(m.folder for m in self.modules.values()).items()))

    @cached_property
    def files(self) -> dict[str, int]:
        """Number of lines by file."""
        return {path: m.lines for path, m in self.modules.items()}

    @cached_property
    def functions(self) -> list[int]:
        """Number of lines of each function's body, in order of size."""
        return sorted(f.lines for m in self.modules.values() for f in m.functions)

    @cached_property
    def edges(self) -> list[Import]:
        """The imports between modules that importing them executes."""
        return import_graph.edges(self.modules)

    @cached_property
    def circles(self) -> list[tuple[str, ...]]:
        """Modules of which each imports each, directly or by way of others."""
        return import_graph.circles(self.edges)

    @cached_property
    def upward(self) -> list[Import]:
        """Imports of a higher layer by a lower one, wherever they are written."""
        return import_graph.upward(self.modules, self.layers)

    @cached_property
    def function_imports(self) -> list[Import]:
        """Imports of the package's own modules inside functions."""
        return [i for m in self.modules.values() for i in m.imports if i.when == "call"]

    @cached_property
    def classes_twice(self) -> dict[str, list[str]]:
        """The places of class names that are defined more than once."""
        places: dict[str, list[str]] = {}
        for path, module in self.modules.items():
            for name, line in module.classes:
                places.setdefault(name, []).append(f"{path}:{line}")
        return {name: places[name] for name in sorted(places) if len(places[name]) > 1}

    def functions_over(self, lines: int) -> list[str]:
        """Return where functions with more lines than that are, the longest first."""
        over = [
            (f.lines, f"{m.path}:{f.line} {f.name}")
            for m in self.modules.values()
            for f in m.functions
            if f.lines > lines
        ]
        return [f"{place}, {n} lines" for n, place in sorted(over, reverse=True)]

    def describe(self, inner: Import) -> str:
        """Return an import inside a function, and the circle that it would close at the top of the file, if any."""
        circle = import_graph.shortest_circle(inner, self.edges)
        return f"{inner} (not at the top: " + ", ".join(map(str, circle[1:])) + ")" if circle[1:] else str(inner)

    def circle_through(self, path: str) -> list[Import]:
        """Return the imports of a shortest circle through a module."""
        first = [i for i in self.edges if i.source == path]
        return min(filter(None, (import_graph.shortest_circle(i, self.edges) for i in first)), key=len, default=[])


def measure(root: Path, layers: Sequence[str], name: str) -> Figures:
    """Return the figures of the package whose `__init__.py` is in a folder.

    Args:
        root: that folder.
        layers: folders inside it, the lowest layer first; the top-level ones and the root's own files are the package.
        name: of the package.
    """
    folders = dict.fromkeys(layer.split("/")[0] for layer in layers)
    return Figures(read(root, folders, name), layers, public_names(root / "__init__.py"))


def exceptions(figures: Figures) -> dict[str, int | dict[str, int] | list[tuple[str, ...]]]:
    """Return what `limits.py` has to record: each measured value outside its goal, by the name it has there."""
    return {
        "CIRCLES": figures.circles,
        "UPWARD": dict(Counter(f"{i.source} -> {i.target}" for i in figures.upward)),
        "CLASSES_TWICE": {name: len(places) for name, places in figures.classes_twice.items()},
        "FUNCTION_IMPORTS": dict(Counter(i.source for i in figures.function_imports)),
        "PUBLIC_NAMES": len(figures.public),
    }


def table(figures: Figures) -> list[tuple[str, int, str]]:
    """Return what CONTRIBUTING.md shows: rows of a figure's name, its value and the goal."""
    return [
        ("lines of a function's body, median", quantile(figures.functions, 0.5), ""),
        ("the same, nine in ten at most", quantile(figures.functions, 0.9), ""),
        ("lines of a file, median", quantile([*figures.files.values()], 0.5), ""),
        ("modules that import each other in a circle", sum(map(len, figures.circles)), "0"),
        ("imports of a higher layer by a lower one", len(figures.upward), "0"),
        ("class names defined more than once", len(figures.classes_twice), "0"),
        ("imports of our own modules inside functions", len(figures.function_imports), "fewer"),
        ("names in `shardmesh` itself", len(figures.public), "about 60"),
    ]


def write_table(page: Path, rows: Sequence[tuple[str, int, str]]) -> None:
    """Write the table between the markers of a page.

    Raises:
        ValueError: the page does not have both markers once, in this order.
    """
    text = page.read_text(encoding="utf-8")
    lines = ["| figure | today | goal |", "|---|---|---|", *(f"| {name} | {n} | {goal} |" for name, n, goal in rows)]
    head, tail = _around(text, page.name)
    page.write_text(head + "\n".join(lines) + "\n" + tail, encoding="utf-8")


def read_table(page: Path) -> dict[str, int]:
    """Return the values of the table on a page by the name of the figure."""
    text = page.read_text(encoding="utf-8")
    head, tail = _around(text, page.name)
    rows = re.findall(r"^\| (.+?) \| (\d+) \|", text[len(head) : len(text) - len(tail)], re.MULTILINE)
    return {name: int(value) for name, value in rows}


def _around(text: str, name: str) -> tuple[str, str]:
    """Return what comes before the table, with the first marker, and what comes after it, with the second."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{name} must have the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return head + begin, end + tail


def report(figures: Figures) -> Iterator[str]:
    """Yield the lines that the script prints."""
    yield f"{'folder':<32}{'files':>6}{'lines':>8}{'longest file':>14}"
    for folder, files in figures.folders.items():
        lines = [m.lines for m in figures.modules.values() if m.folder == folder]
        yield f"{folder:<32}{files:>6}{sum(lines):>8}{max(lines):>14}"
    yield f"{'all':<32}{len(figures.files):>6}{sum(figures.files.values()):>8}{max(figures.files.values(), default=0):>14}"
    yield ""
    for name, n, goal in table(figures):
        yield f"{name:<52}{n:>6}    {'goal ' + goal if goal else ''}".rstrip()
    for circle in figures.circles:
        imports = import_graph.inside(circle, figures.edges)
        yield from _section(f"circle of {len(circle)} modules, {len(imports)} imports between them", map(str, imports))
    yield from _section("the longest functions", figures.functions_over(0)[:20])
    yield from _section("imports of a higher layer by a lower one", map(str, figures.upward))
    yield from _section("imports inside functions", map(figures.describe, figures.function_imports))
    twice = (f"{name}: {', '.join(places)}" for name, places in figures.classes_twice.items())
    yield from _section("class names defined more than once", twice)


def _section(title: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield from ("", title)
    yield from (f"    {line}" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limits", action="store_true", help="print the exceptions that limits.py records")
    parser.add_argument("--contributing", action="store_true", help="write the table of CONTRIBUTING.md")
    parser.add_argument("--write", action="store_true", help="write limits.py and the table of CONTRIBUTING.md")
    chosen = parser.parse_args(arguments)
    figures = measure(ROOT, limits.LAYERS, limits.PACKAGE)
    if chosen.limits:
        print(ratchet.render(exceptions(figures)), end="")
    if chosen.write:
        ratchet.write(Path(limits.__file__), exceptions(figures))
    if chosen.write or chosen.contributing:
        write_table(PAGE, table(figures))
    if not (chosen.limits or chosen.write or chosen.contributing):
        print("\n".join(report(figures)))


if __name__ == "__main__":
    main()

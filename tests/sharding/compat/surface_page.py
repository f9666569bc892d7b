"""The tables of docs/from_dtensor.md: torch's names, their parameters, and what `shardmesh.compat`
does with them.

`python -m tests.sharding.compat.surface_page` writes them into the page; `test_surface_page.py`
compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sharding.compat import surface_dtensor, surface_fsdp

PAGE = Path(__file__).parents[3] / "docs" / "from_dtensor.md"
BEGIN = "<!-- written by `python -m tests.sharding.compat.surface_page` -->"
END = "<!-- end of what is written -->"
TITLES = {
    "Tensors, styles, experimental functions and meshes": surface_dtensor.STATUS,
    "FSDP2": surface_fsdp.STATUS,
}


def tables() -> str:
    """Return the text between the marks."""
    return "\n".join([BEGIN, *_lines(), END])


def _lines() -> Iterator[str]:
    for title, status in TITLES.items():
        yield from ("", f"### {title}", "", "| name | | parameters | notes |", "|---|---|---|---|")
        yield from _rows(status)
    yield ""


def _rows(status: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield one row for each name, with those of its parameters that do something else than the
    name.
    """
    parameters: dict[str, list[str]] = {}
    for key in status:
        name, _, parameter = key.rstrip(")").partition("(")
        parameters.setdefault(name, [])
        if parameter:
            parameters[name].append(parameter)
    for name, names in parameters.items():
        state, note = status.get(name, ("", ""))
        cells = [_parameter(p, state, *status[f"{name}({p})"]) for p in names]
        yield f"| `{name}` | {state} | {', '.join(cells)} | {_cell(note)} |"


def _parameter(name: str, state_of_callable: str, state: str, note: str) -> str:
    remarks = [] if state == state_of_callable else [state]
    if note:
        remarks.append(_cell(note))
    return f"`{name}`" + (f" ({': '.join(remarks)})" if remarks else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def written(page: str) -> str:
    """Return the page with its tables replaced by today's."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + tables() + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

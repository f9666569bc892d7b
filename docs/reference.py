"""Writes the pages of the API reference.

There is one for the top level of the package and one for each of its namespaces. Sphinx fills them
from the docstrings.
"""

from __future__ import annotations

import inspect
import re
import shutil
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import shardmesh as sm

# Subjects of the top level, by the module that defines a name: the first prefix that fits.
SUBJECTS = {
    "shardmesh.mesh": "Meshes and ranks",
    "shardmesh.sharding.layout": "Layouts",
    "shardmesh.sharding.tensor": "Sharded tensors",
    "shardmesh.sharding.functional.collectives": "Collectives of mapped functions",
    "shardmesh.sharding.functional.transforms": "Gradients and transforms",
    "shardmesh.sharding.functional": "Mapped functions and control flow",
    "shardmesh.sharding.jit": "Compiled steps",
    "shardmesh.sharding": "Programs",
}


_SHORT = 30  # letters of a sentence that says too little without the next one


def write_reference(folder: Path) -> None:
    """Write the pages into a folder, in place of those that are there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = [name for name in sm._NAMESPACES if isinstance(getattr(sm, name), ModuleType)]
    described: set[int] = set()
    _write(folder / "index.md", _index(names))
    _write(folder / "shardmesh.md", _page(sm, _by_subject(sm), described))
    for name in names:
        module = import_module(f"shardmesh.{name}")
        subjects = {"": sorted(module.__all__, key=str.lower)}
        _write(folder / f"{name}.md", _page(module, subjects, described))


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def _index(namespaces: list[str]) -> list[str]:
    """Return the page that lists the others."""
    rows = [f"| [`sm.{name}`]({name}.md) | {_summary(getattr(sm, name))} |" for name in namespaces]
    return [
        "# API reference",
        "",
        "`import shardmesh as sm`. All public names; what is not listed here may change.",
        "",
        "| | |",
        "|---|---|",
        f"| [`sm`](shardmesh.md) | {_summary(sm)} |",
        *rows,
        "",
        "```{toctree}",
        ":hidden:",
        "",
        "shardmesh",
        *namespaces,
        "```",
    ]


def _summary(module: ModuleType) -> str:
    return (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _by_subject(module: ModuleType) -> dict[str, list[str]]:
    """Return the names of a module by the subject of where they are defined."""
    subjects: dict[str, list[str]] = {}
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        defined_in = getattr(value, "__module__", module.__name__)
        subject = next(
            title for prefix, title in SUBJECTS.items() if f"{defined_in}.".startswith(f"{prefix}.")
        )
        subjects.setdefault(subject, []).append(name)
    return {title: subjects[title] for title in SUBJECTS.values() if title in subjects}


def _page(module: ModuleType, subjects: dict[str, list[str]], described: set[int]) -> list[str]:
    """Return the page of a module: a table of each subject's names, then their docstrings.

    Args:
        described: ids of the objects that have a full entry on a page; those of this page are
            added. Another name of such an object has a line that leads there.
    """
    lines = [f"# {module.__name__}", "", _summary(module), ""]
    for title, names in subjects.items():
        if title:
            lines += [f"## {title}", ""]
        lines += ["| | |", "|---|---|"]
        lines += [f"| {_link(module, name)} | {_first_sentence(module, name)} |" for name in names]
        lines.append("")
        for name in names:
            value = getattr(module, name)
            lines += ["```{eval-rst}", *_entry(module, name, id(value) in described), "```", ""]
            described.add(id(value))
    return lines


def _link(module: ModuleType, name: str) -> str:
    return f"{{py:obj}}`{name} <{module.__name__}.{name}>`"


def _first_sentence(module: ModuleType, name: str) -> str:
    """Return what the docstring of a name says first, without its call."""
    value = getattr(module, name)
    if not (inspect.isclass(value) or callable(value)):
        return type(value).__name__
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    call, text = _call_and_text(" ".join(paragraphs[0].split()))
    if call and len(text) < _SHORT and len(paragraphs) > 1:
        text += " " + re.split(r"(?<=[.:]) ", " ".join(paragraphs[1].split()))[0]
    return re.sub(r"([|*\[\]<])", r"\\\1", text.removeprefix("→ ").removesuffix(":"))


def _call_and_text(line: str) -> tuple[str, str]:
    """Return the two parts of "call(x) -> what it returns" or "Class(x): what it is".

    The first is empty for other lines.
    """
    match = re.match(r"((?:with )?[\w.]+\(.*?\))(?: (?=-> )|: )(?=\S)", line)
    return (match[1], line[match.end() :].replace("->", "→")) if match else ("", line)


def _entry(module: ModuleType, name: str, is_described: bool) -> list[str]:
    """Return the directive for one name."""
    value: Any = getattr(module, name)
    full_name = f"{module.__name__}.{name}"
    if inspect.isclass(value):
        lines = [f".. autoclass:: {full_name}"]
        if is_described:
            return [*lines, "   :no-index:"]
        if value.__module__.startswith("shardmesh") and not issubclass(value, Exception):
            lines += ["   :members:"]
        return lines
    no_index = ["   :no-index:"][: int(is_described)]
    if callable(value):
        return [f".. autofunction:: {full_name}", *no_index]
    if type(value).__module__ == "builtins":  # whose docstring is that of the type
        return [f".. py:data:: {full_name}", f"   :type: {type(value).__name__}", *no_index]
    return [f".. autodata:: {full_name}", *no_index]


# -- docstrings ------------------------------------------------------------------------------------

_CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)(?=(\w?))")
_TITLES = ("Args", "Attributes", "Communication", "Example", "Raises", "Returns", "Yields")
_OPENING = re.compile(rf"^({'|'.join(_TITLES)}):(?: +(\S.*))?$")


def as_restructured_text(docstring: list[str]) -> list[str]:
    """Return a docstring of the library as the lines that Sphinx reads.

    Its code is in single backticks, charts and programs are indented, and a section may begin on
    the line of its title ("Communication: none.").
    """
    result: list[str] = []
    is_in_section = False
    call, first = _call_and_text(docstring[0]) if docstring else ("", "")
    if call:
        separator = " " if first.startswith("→") else ": "
        docstring = [f"`{call}`{separator}{first}", *docstring[1:]]
    for paragraph in "\n".join(docstring).strip("\n").split("\n\n"):
        rows = paragraph.split("\n")
        opening = _OPENING.match(rows[0])
        if opening and opening[2] is None:
            is_in_section = True
        elif not rows[0].startswith(" "):
            is_in_section = False
        if opening and opening[2] is not None:
            rows[0] = f"**{opening[1]}:** {_escape(opening[2])}"
            result += [rows[0], *_escape("\n".join(row.strip() for row in rows[1:])).split("\n")]
        elif not is_in_section and _is_chart(rows):
            result += ["::", "", *(f"    {row}" for row in rows)]
        elif rows[0].lstrip().startswith(">>>"):
            result += rows
        else:
            result += _escape(paragraph).split("\n")
        result.append("")
    return result


def _is_chart(rows: list[str]) -> bool:
    """Return whether a paragraph is a program, a table or a chart, to be shown as it stands."""
    return all(row.startswith("    ") for row in rows) or rows[0].startswith("|")


def _escape(text: str) -> str:
    """Return text in which code is `` `so` `` with its characters as reStructuredText."""
    pieces = []
    end = 0
    for match in _CODE.finditer(text):
        pieces.append(_escape_prose(text[end : match.start()]))
        pieces.append(f"``{' '.join(match[1].split())}``" + ("\\ " if match[2] else ""))
        end = match.end()
    return "".join([*pieces, _escape_prose(text[end:])])


def _escape_prose(text: str) -> str:
    return re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", text)

"""Tests of the measurements, on small made-up packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.structure import limits
from tests.structure import measure as script
from tests.structure.import_graph import circles, layer
from tests.structure.measure import BEGIN, END, Figures, exceptions, measure, quantile, read_table, table, write_table
from tests.structure.ratchet import LINE, check_counts, check_groups, render, write
from tests.structure.source_tree import Import

LAYERS = ("low", "high")
Make = Callable[[dict[str, str]], Figures]


@pytest.fixture
def package(tmp_path) -> Make:
    """From paths and texts to the figures of a package `made` of these files; `__init__.py`s are added."""

    def make(files: dict[str, str]) -> Figures:
        files = {"__init__.py": "__all__ = []\n"} | files
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
            for folder in (tmp_path / path).relative_to(tmp_path).parents:
                (tmp_path / folder / "__init__.py").touch()
        return measure(tmp_path, LAYERS, "made")

    return make


def edges(figures: Figures) -> set[tuple[str, str]]:
    return {(i.source, i.target) for i in figures.edges}


# -- imports -----------------------------------------------------------------------------------------------------------


def test_an_import_is_an_edge_to_the_module_it_names(package):
    made = package(
        {
            "low/a.py": "from . import b\nfrom .b import x\nfrom .deep.c import y\n",
            "low/b.py": "from .. import low\nfrom ..low.deep import c, d\nimport os, numpy.random\nfrom json import loads\n",
            "low/deep/__init__.py": "d = 1\n",
            "low/deep/c.py": "from ... import high as h\nfrom ...high.e import *\nimport made.low.a\nfrom made.low import b\n",
            "high/e.py": "",
        }
    )
    assert edges(made) == {
        ("low/a.py", "low/b.py"),
        ("low/a.py", "low/deep/c.py"),
        ("low/b.py", "low/__init__.py"),
        ("low/b.py", "low/deep/c.py"),
        ("low/b.py", "low/deep/__init__.py"),
        ("low/deep/c.py", "high/__init__.py"),
        ("low/deep/c.py", "high/e.py"),
        ("low/deep/c.py", "low/a.py"),
        ("low/deep/c.py", "low/b.py"),
    }


@pytest.mark.parametrize(
    ("init", "target"),
    [
        ("from .plan import plan\n", "low/__init__.py"),
        ("def plan(): ...\n", "low/__init__.py"),
        ("plan = 1\n", "low/__init__.py"),
        ("", "low/plan.py"),
        ("from . import plan\n", "low/plan.py"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .plan import plan\n", "low/plan.py"),
    ],
)
def test_a_name_that_the_package_binds_hides_the_submodule(package, init, target):
    made = package({"low/__init__.py": init, "low/plan.py": "plan = 1\n", "high/a.py": "from ..low import plan\n"})
    assert ("high/a.py", target) in edges(made)


def test_an_import_of_nothing_names_its_line(package):
    with pytest.raises(ImportError, match=r"low/a\.py:2 imports low\.gone, and the package has no such module"):
        package({"low/a.py": "\nfrom .gone import x\n"})


def test_code_executed_at_import_counts(package):
    made = package(
        {
            "low/a.py": "try:\n    from . import b\nexcept ImportError:\n    from . import c\nelse:\n    from . import d\n"
            "finally:\n    from . import e\nclass A:\n    from . import f\nwith x:\n    from . import g\n"
            "match x:\n    case 1:\n        from . import h\n",
            **{f"low/{name}.py": "" for name in "bcdefgh"},
        }
    )
    assert edges(made) == {("low/a.py", f"low/{name}.py") for name in "bcdefgh"}


def test_imports_for_type_checkers_and_inside_functions_make_no_circle(package):
    made = package(
        {
            "low/a.py": "from . import b, c\nfrom . import d\n",
            "low/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\nelse:\n    from . import e\n",
            "low/c.py": "def f():\n    def g():\n        from . import a\n    async def h():\n        from .a import x\n",
            "low/d.py": "import typing as t\nif not t.TYPE_CHECKING:\n    from . import e\nelse:\n    from . import a\n",
            "low/e.py": "class A:\n    def f(self):\n        if TYPE_CHECKING:\n            from . import a\n",
        }
    )
    assert made.circles == []
    assert edges(made) >= {("low/b.py", "low/e.py"), ("low/d.py", "low/e.py")}
    assert [str(i) for i in made.function_imports] == ["low/c.py:3 -> low/a.py", "low/c.py:5 -> low/a.py"]
    assert made.describe(made.function_imports[0]) == "low/c.py:3 -> low/a.py (not at the top: low/a.py:1 -> low/c.py)"


def test_one_statement_is_one_import_of_a_module(package):
    made = package({"low/a.py": "def f():\n    from .b import x, y, z\n    from .b import w\n", "low/b.py": ""})
    assert [made.describe(i) for i in made.function_imports] == ["low/a.py:2 -> low/b.py", "low/a.py:3 -> low/b.py"]


# -- circles and layers ------------------------------------------------------------------------------------------------


def test_circles(package):
    made = package(
        {
            "low/a.py": "from . import b\n",
            "low/b.py": "\nfrom . import c, d\n",
            "low/c.py": "from . import a\n",
            "low/d.py": "from . import e\n",
            "low/e.py": "from . import d\nfrom . import e\n",
            "low/f.py": "from . import a, f\n",
        }
    )
    assert made.circles == [("low/a.py", "low/b.py", "low/c.py"), ("low/d.py", "low/e.py")]
    way = ["low/b.py:2 -> low/c.py", "low/c.py:1 -> low/a.py", "low/a.py:1 -> low/b.py"]
    assert [str(i) for i in made.circle_through("low/b.py")] == way
    assert made.circle_through("low/f.py") == []


def test_circles_are_the_strongly_connected_components():
    """Against reachability, on every graph of three nodes and on a chain that recursion would not survive."""
    pairs = [(a, b) for a in "abc" for b in "abc" if a != b]
    for bits in range(1 << len(pairs)):
        arrows = {pair for n, pair in enumerate(pairs) if bits >> n & 1}
        reach = set(arrows)
        for _ in "abc":
            reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
        found = circles([Import(a, b, 1, "import") for a, b in arrows])
        assert {(a, b) for c in found for a in c for b in c if a != b} == {
            (a, b) for a, b in reach if (b, a) in reach and a != b
        }
    chain = [Import(str(n), str(n + 1), 1, "import") for n in range(5000)]
    assert circles(chain) == []
    assert [len(c) for c in circles([*chain, Import("5000", "0", 1, "import")])] == [5001]


def test_an_arrow_upward_counts_wherever_it_is(package):
    made = package(
        {
            "low/a.py": "from ..high import b\n",
            "low/c.py": "def f():\n    from .. import __version__\n",
            "low/d.py": "if TYPE_CHECKING:\n    from ..high.b import B\n",
            "high/b.py": "from ..low import c\n",
            "__main__.py": "from .high import b\n",
        }
    )
    arrows = ["low/a.py:1 -> high/b.py", "low/c.py:2 -> __init__.py", "low/d.py:2 -> high/b.py"]
    assert [str(i) for i in made.upward] == arrows


def test_a_folder_inside_a_layer_may_be_a_layer():
    layers = ("low", "high/first", "high")
    paths = ("low/a.py", "high/first/a.py", "high/a.py", "lower/a.py", "a.py")
    assert [layer(path, layers) for path in paths] == [0, 1, 2, 3, 3]


# -- sizes and names ---------------------------------------------------------------------------------------------------


def test_sizes(package):
    files = {"low/a.py": "x = 1\n\n# the end\n", "low/deep/b.py": "", "tests/c.py": "not Python", "d.py": "x = 1"}
    made = package(files)
    assert made.folders == {".": 2, "low": 2, "low/deep": 2}
    assert made.files["low/a.py"] == 3
    assert made.files["d.py"] == 1


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("def f(a,\n      b):\n    return 1\n", [1]),
        ('def f():\n    """One\n\n    two."""\n    x = 1\n\n    # why\n    return x\n', [4]),
        ("def f():\n    return g(\n        1,\n    )\n", [3]),
        (
            "class A:\n    def f(self):\n        @cache\n        async def g():\n            pass\n        return g\n",
            [1, 4],
        ),
        ('def f():\n    """A declaration."""\n\ndef g(): ...\n\ndef h():\n    """Another."""\n    ...\n', []),
        ("try:\n    def f():\n        return 1\nexcept E:\n    def f():\n        return 2\n", [1, 1]),
    ],
)
def test_lines_of_functions(package, text, lengths):
    made = package({"low/a.py": text})
    assert made.functions == lengths


def test_the_longest_functions_are_named(package):
    made = package({"low/a.py": "def f():\n    x = 1\n    return x\n\ndef g():\n    return 1\n"})
    assert made.functions_over(1) == ["low/a.py:1 f, 2 lines"]


def test_quantiles():
    assert [quantile(range(1, 11), share) for share in (0.05, 0.5, 0.9, 1.0)] == [1, 5, 9, 10]
    assert quantile([7], 0.5) == 7
    assert quantile([], 0.5) == 0


def test_class_names_defined_more_than_once(package):
    made = package(
        {
            "low/a.py": "class A: ...\nclass B:\n    class C: ...\n",
            "high/b.py": "\nclass A: ...\ndef f():\n    class C: ...\nclass D(A): ...\n",
        }
    )
    assert made.classes_twice == {"A": ["high/b.py:2", "low/a.py:1"], "C": ["high/b.py:4", "low/a.py:3"]}


@pytest.mark.parametrize(
    "text",
    [
        '__all__ = ["b", "a"]\n',
        '__all__: list[str] = ["b"] + ["a"]\n',
        '_LAZY = {"a": ".low"}\n__all__ = ["b", *_LAZY]\n',
        '_LAZY = {"a": ".low"}\n_MORE = {**_LAZY, "b": ".low"}\n__all__ = sorted(_MORE)\n',
        '__all__ = ["b"]\n__all__ += ("a",)\n',
    ],
)
def test_public_names(package, text):
    assert sorted(package({"__init__.py": text}).public) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no __all__"), ("__all__ = dir()\n", r"cannot read __all__ .*: dir\(\)")]
)
def test_public_names_that_cannot_be_read(package, text, message):
    with pytest.raises(ValueError, match=message):
        package({"__init__.py": text})


# -- ratchets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measured", "recorded"), [({}, {}), ({"a": 3}, {"a": 3}), ({"a": 3}, {"a": 5})])
def test_counts_as_recorded(measured, recorded):
    check_counts(measured, recorded, str, slack=2)


@pytest.mark.parametrize(
    ("measured", "recorded", "message"),
    [
        ({"a": 4, "b": 2}, {"a": 3, "b": 2}, "^too much in a$"),
        ({"a": 1}, {}, "^too much in a$"),
        ({"a": 1}, {"b": 9}, "^too much in a$"),  # what is worse comes first
        ({"a": 1}, {"a": 4}, "lower the limits .*\na: recorded 4, now 1$"),
        ({}, {"a": 1}, "lower the limits .*\na: recorded 1, now within the goal$"),
    ],
)
def test_counts_that_have_changed(measured, recorded, message):
    with pytest.raises(AssertionError, match=message):
        check_counts(measured, recorded, lambda name: f"too much in {name}", slack=2)


@pytest.mark.parametrize("groups", [[], [("a", "b")], [("a", "b"), ("c", "d")]])
def test_groups_as_recorded(groups):
    check_groups(groups, groups, str)


@pytest.mark.parametrize(
    ("measured", "recorded", "message"),
    [
        ([("a", "b")], [], "^see a\nsee b$"),
        ([("a", "b", "c")], [("a", "b")], "^see c$"),
        ([("a", "b", "c", "d", "e")], [("a", "b", "c"), ("d", "e")], "^see d\nsee e$"),
        ([("a", "b")], [("a", "b", "c")], "lower the limits .*\na, b, c$"),
        ([], [("a", "b")], "lower the limits .*\na, b$"),
    ],
)
def test_groups_that_have_changed(measured, recorded, message):
    with pytest.raises(AssertionError, match=message):
        check_groups(measured, recorded, lambda name: f"see {name}")


def test_exceptions_are_what_is_outside_the_goals(package):
    made = package(
        {
            "high/a.py": "from . import b\nclass A: ...\n",
            "high/b.py": "from . import a\ndef f():\n    from . import a\nclass A: ...\n",
            "low/deep/c.py": "from ...high import a\n",
            "__init__.py": '__all__ = ["x"]\n',
        }
    )
    assert exceptions(made) == {
        "CIRCLES": [("high/a.py", "high/b.py")],
        "UPWARD": {"low/deep/c.py -> high/a.py": 1},
        "CLASSES_TWICE": {"A": 2},
        "FUNCTION_IMPORTS": {"high/b.py": 1},
        "PUBLIC_NAMES": 1,
    }


@pytest.mark.parametrize(
    "recorded",
    [
        {"FOLDERS": {}, "CIRCLES": [], "PUBLIC_NAMES": 0},
        {"FOLDERS": {"a": 1, "b/c": 20}, "CIRCLES": [("a", "b"), ("c", "d", "e")], "PUBLIC_NAMES": 7},
    ],
)
def test_exceptions_round_trip(tmp_path, recorded):
    file = tmp_path / "limits.py"
    file.write_text(f"GOAL = 1\n\n{LINE}written\nOLD: int = 2\n")
    write(file, recorded)
    once = file.read_text()
    write(file, recorded)
    assert file.read_text() == once == f"GOAL = 1\n\n{LINE}written\n{render(recorded)}"
    names: dict[str, object] = {}
    exec(once, names)
    assert {name: value for name, value in names.items() if name.isupper()} == {"GOAL": 1, **recorded}


def test_limits_without_the_line_are_left_alone(tmp_path):
    file = tmp_path / "limits.py"
    file.write_text("GOAL = 1\n")
    with pytest.raises(ValueError, match="has no line that begins with"):
        write(file, {})
    assert file.read_text() == "GOAL = 1\n"


def test_page_keeps_text_around_the_table(tmp_path):
    page = tmp_path / "PAGE.md"
    page.write_text(f"before | 1 |\n{BEGIN}old\n{END}after\n")
    write_table(page, [("files", 12, "0"), ("names", 3, "")])
    text = page.read_text()
    assert text.startswith(f"before | 1 |\n{BEGIN}| figure")
    assert text.endswith(f"| files | 12 | 0 |\n| names | 3 |  |\n{END}after\n")
    assert read_table(page) == {"files": 12, "names": 3}
    page.write_text("no table\n")
    with pytest.raises(ValueError, match=r"PAGE\.md must have the lines"):
        read_table(page)


def test_rows_of_the_table_have_distinct_names(package):
    rows = table(package({}))
    assert len({name for name, _, _ in rows}) == len(rows)


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(package, tmp_path, monkeypatch) -> Callable[..., tuple[str, str]]:
    """From arguments of the script to the texts of `limits.py` and of the page after it has run on a made-up package."""
    made = package({"high/a.py": "from . import b\n", "high/b.py": "from . import a\n"})
    page, file = tmp_path / "PAGE.md", tmp_path / "limits.py"
    page.write_text(f"{BEGIN}{END}")
    file.write_text(f"{LINE}written\n")
    monkeypatch.setattr(script, "measure", lambda *_: made)
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(limits, "__file__", str(file))

    def run(*arguments: str) -> tuple[str, str]:
        script.main(arguments)
        return file.read_text(), page.read_text()

    return run


def test_without_arguments_the_script_prints(written, capsys):
    assert written() == (f"{LINE}written\n", f"{BEGIN}{END}")
    printed = capsys.readouterr().out
    assert "\nmodules that import each other in a circle               2    goal 0\n" in printed
    assert "\n    high/a.py:1 -> high/b.py\n" in printed


def test_what_the_script_prints_as_limits_is_what_it_writes(written, capsys):
    assert written("--limits") == (f"{LINE}written\n", f"{BEGIN}{END}")
    printed = capsys.readouterr().out
    file, page = written("--write")
    assert file == f"{LINE}written\n{printed}"
    assert "| modules that import each other in a circle | 2 | 0 |" in page
    assert capsys.readouterr().out == ""


def test_the_script_writes_the_page_alone(written):
    file, page = written("--contributing")
    assert file == f"{LINE}written\n"
    assert "| modules that import each other in a circle | 2 | 0 |" in page


def test_the_script_runs_in_any_folder(tmp_path):
    done = subprocess.run([sys.executable, script.__file__, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--write" in done.stdout


def test_limits_records_each_exception():
    assert {*exceptions(Figures({}, (), ()))} <= {*vars(limits)}
